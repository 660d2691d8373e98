"""Length penalty: a part of the reward that punishes completions near the maximum length.

Yu et al. 2025, "DAPO", arXiv 2503.14476, section 3.4, equation 13 ("soft overlong punishment"). With |y| tokens::

    penalty(y) = 0                                   |y| <= max - cache
                 ((max - cache) - |y|) / cache       max - cache < |y| <= max
                 -1                                  max < |y|

|y| counts all tokens of a completion, also the answers of an environment with turns, as `max_tokens` does.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import numpy as np

from replaybuf.errors import Invalid, counted
from replaybuf.generator.environments.scoring import Scores, reward_fault
from replaybuf.generator.prompts import Prompt
from replaybuf.option_types import OptionGroup, Positive, about, group_option
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


@group_option
class LengthPenaltyOptions(OptionGroup, frozen=True, kw_only=True):
    """Penalty for completions near the maximum length, such as {"cache_tokens": 128}: that of DAPO.

    It is added to the reward, but not in evaluations.
    """

    cache_tokens: Annotated[Positive, about("Tokens before max_tokens over which it falls from 0 to -1: L_cache.")]
    max_tokens: Annotated[Positive | None, about("Length from which it is -1: L_max. Default: --max-tokens.")] = None

    def penalty(self, longest: int) -> LengthPenalty:
        """Return the penalty for completions of at most `longest` tokens. Raises `Invalid`."""
        cache, bound = self.cache_tokens, self.max_tokens or longest
        if cache > bound:
            detail = f"cache_tokens is {cache}; the maximum is {bound}, the length at which the length penalty is -1"
            raise Invalid(detail, name="cache_tokens", value=cache, bound=bound)
        if bound - cache >= longest:
            raise Invalid(
                f"max_tokens is {bound} and cache_tokens {cache}: the length penalty begins above "
                f"{counted(bound - cache, 'token')}, and a completion has at most {longest}; lower max_tokens",
                name="max_tokens",
                value=bound,
                bound=longest + cache - 1,
            )
        return LengthPenalty(bound, cache)
