"""Length penalty: a part of the reward that punishes completions near the maximum length.

Yu et al. 2025, "DAPO", arXiv 2503.14476, section 3.4, equation 13 ("soft overlong punishment"). With |y| tokens::

    penalty(y) = 0                                   |y| <= max - cache
                 ((max - cache) - |y|) / cache       max - cache < |y| <= max
                 -1                                  max < |y|

|y| counts all tokens of a completion, also the answers of an environment with turns, as `max_tokens` does.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from cyclopts.types import PositiveInt

from replaybuf.errors import Invalid, counted
from replaybuf.generator.environments.scoring import Scores, reward_fault
from replaybuf.generator.prompts import Prompt
from replaybuf.wire.group import Float64s, Int32s

PART = "length_penalty"
"""Name of the penalty among the parts of the reward."""


@dataclasses.dataclass(frozen=True, slots=True)
class LengthPenalty:
    """The penalty falls from 0 at `max_tokens - cache_tokens` to -1 at `max_tokens`; 1 <= cache <= max."""

    max_tokens: int
    cache_tokens: int

    def penalties(self, lengths: Int32s) -> Float64s:
        """Return the penalties of completions of these lengths in tokens, float64 [n] in -1..0."""
        excess = lengths - (self.max_tokens - self.cache_tokens)
        penalties: Float64s = 0.0 - np.clip(excess / self.cache_tokens, 0.0, 1.0)
        return penalties

    def add(self, prompt: Prompt, scores: Scores, lengths: Int32s) -> Scores:
        """Add the penalties to the rewards of a group, and to their parts. Raises `RewardFault` for a part so named."""
        if PART in scores.parts:
            raise reward_fault("part_taken", prompt, f"has a part {PART!r}, which is the name of the length penalty")
        penalties = self.penalties(lengths)
        return dataclasses.replace(scores, rewards=scores.rewards + penalties, parts=scores.parts | {PART: penalties})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthPenaltyOptions:
    """Which lengths to punish; by default none."""

    length_penalty_cache: PositiveInt | None = None
    """Number of tokens before length_penalty_max over which a penalty, added to the reward, falls from 0 to -1: the
    soft overlong punishment of DAPO, with L_cache. Evaluations are without it. Default: no penalty."""
    length_penalty_max: PositiveInt | None = None
    """Length of a completion in tokens from which the penalty is -1: L_max of DAPO. Default: max_tokens."""

    def penalty(self, max_tokens: int) -> LengthPenalty | None:
        """Return the penalty for completions of at most `max_tokens`, or None. Raises `Invalid`."""
        cache, bound = self.length_penalty_cache, self.length_penalty_max or max_tokens
        if cache is None:
            if self.length_penalty_max is not None:
                detail = "length_penalty_cache is missing: length_penalty_max alone is no penalty"
                raise Invalid(detail, name="length_penalty_cache")
            return None
        if cache > bound:
            raise Invalid(
                f"length_penalty_cache is {cache}; the maximum is {bound}, the length at which the penalty is -1",
                name="length_penalty_cache",
                value=cache,
                bound=bound,
            )
        if bound - cache >= max_tokens:
            raise Invalid(
                f"length_penalty_max is {bound} and length_penalty_cache {cache}: the penalty begins above "
                f"{counted(bound - cache, 'token')}, and a completion has at most {max_tokens}; lower "
                "length_penalty_max",
                name="length_penalty_max",
                value=bound,
                bound=max_tokens + cache - 1,
            )
        return LengthPenalty(bound, cache)
