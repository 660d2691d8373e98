"""Scoring under a time bound: a reward that raises, hangs or is no number is a fault of one group, never a hang."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np

from replaybuf.errors import ReplaybufError, RewardFault
from replaybuf.generator.environments import Environment, Score
from replaybuf.generator.prompts import Prompt
from replaybuf.group import Float64s

logger = logging.getLogger(__name__)

MAX_STUCK = 16
"""So many scorings may hang at the same time before the environment counts as broken."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scores of a group: `rewards` float64 [n], `parts` float64 [n] by name."""

    rewards: Float64s
    parts: dict[str, Float64s]


class Scorer:
    """Runs an environment, one group at a time in a thread of its own, for at most `timeout_s` seconds.

    A thread that hangs cannot be ended; it is left behind, as a daemon thread, so that it does not hold up the end of
    the process either. `stuck` counts them, stuck <= MAX_STUCK: beyond, scoring raises `ReplaybufError`.
    """

    def __init__(self, environment: Environment, *, timeout_s: float) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self.stuck = 0

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Scores:
        """Score the n completions of one prompt.

        Raises `RewardFault` where a score raises, is late, not finite, or has other parts than the one before.
        """
        if self.stuck >= MAX_STUCK:
            raise ReplaybufError(f"{self.stuck} scorings hang; the environment is broken", name="stuck", bound=MAX_STUCK)
        scored = self._start(lambda: [self._environment.score(prompt, text) for text in completions])
        try:
            async with asyncio.timeout(self._timeout_s):
                scores = await asyncio.shield(scored)
        except TimeoutError:
            if not scored.done():
                self._leave_behind(scored)
                detail = f"reward of prompt {prompt.prompt_id!r} is not there after {self._timeout_s:g} s"
                raise RewardFault("reward_timeout", detail, name="reward", bound=self._timeout_s) from None
            raise RewardFault("reward_raised", _raised(prompt, TimeoutError())) from None
        except Exception as error:  # whatever an environment raises is its author's to read
            raise RewardFault("reward_raised", _raised(prompt, error), name="reward") from error
        return _columns(prompt, scores)

    def _start(self, work: Callable[[], list[Score]]) -> asyncio.Future[list[Score]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Score]] = loop.create_future()

        def settle(result: list[Score] | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result or [])

        def run() -> None:
            ...

        threading.Thread(target=run, name="replaybuf-score", daemon=True).start()
        return future
