"""The contract of environments, which score completions or play episodes of several turns.

Environments are plug-ins of the entry-point group `replaybuf.environments`, built without arguments. `Scorer` bounds
the time of `score`, and an exception in it costs one group only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from replaybuf.generator.prompts import Prompt


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Reward of one completion, and its parts by name. All completions of a group have the same names.

    `process_rewards`, for the estimator `process`: (end, reward) of each stretch of the completion. `end` is one past
    the last character of the stretch in the text. In an episode it is the number of the turn, from 1.
    """

    reward: float
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    process_rewards: tuple[tuple[int, float], ...] = ()


class Environment(Protocol):
    """Scores completions."""

    def check(self, prompt: Prompt) -> None:
        """Raise `Invalid` if `prompt` lacks what scoring needs. Called once per prompt, at start."""

    def score(self, prompt: Prompt, completion_text: str) -> Score | float | Awaitable[Score | float]:
        """Score one completion, decoded without special tokens.

        Several threads may call this at once. A coroutine function suits rewards that wait, for example for a judge
        model: many of them run in one thread.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One sampled turn: its token ids, and the same as text without special tokens."""

    text: str
    token_ids: list[int]


class Episode(Protocol):
    """One rollout of several turns.

    Two coroutine functions are optional. `cut_off(turn)` replaces `step` for a turn that ended at the token bound.
    `close()` always comes last.
    """

    async def step(self, turn: Turn) -> str | Sequence[int] | None:
        """Answer a turn with text (including role markers) or token ids; None ends the episode."""

    async def score(self) -> Score | float:
        """Score the rollout, once, after its last turn."""


class MultiTurnEnvironment(Protocol):
    """Answers turns and scores episodes. `replaybuf.generator.environments.episodes` plays it."""

    def check(self, prompt: Prompt) -> None:
        """Raise `Invalid` if `prompt` lacks what an episode needs. Called once per prompt, at start."""

    def start(self, prompt: Prompt) -> Episode:
        """Start the episode of one rollout."""


def takes_turns(environment: Any) -> bool:
    """Return whether an environment plays turns.

    An environment that can both play and score has the attribute `takes_turns`, which is valid after `check`.
    """
    declared: bool | None = getattr(environment, "takes_turns", None)
    return hasattr(environment, "start") if declared is None else declared


def score_of(result: Any) -> Score:
    """Convert the result of a reward, a `Score` or a number, to a `Score`."""
    return result if isinstance(result, Score) else Score(float(result))
