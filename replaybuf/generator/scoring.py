"""Scoring under a time bound: a reward that raises, hangs or is no number is a fault of one group, never a hang."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from replaybuf.errors import ReplaybufError, RewardFault
from replaybuf.generator.environments import Environment, Score
from replaybuf.generator.prompts import Prompt
from replaybuf.group import Float64s

MAX_STUCK = 16
"""So many scorings may hang at the same time before the environment counts as broken."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scores of a group: `rewards` float64 [n], `parts` float64 [n] by name."""

    rewards: Float64s
    parts: dict[str, Float64s]


class _Worker:
    """A thread that does one job after another; `idle` workers wait for the next.

    Not `concurrent.futures`: its threads are joined at the end of the process, so one that hangs would hold that up.
    Not a new thread per group: starting one blocks the event loop until the thread runs.
    """

    def __init__(self, idle: list[_Worker]) -> None:
        self._idle = idle
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="replaybuf-score", daemon=True).start()

    def do(self, job: Callable[[], None]) -> None:
        """Do `job`, which raises nothing; at most one is given at a time."""
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            self._idle.append(self)


class Scorer:
    """Runs an environment, each group in a thread of its own, for at most `timeout_s` seconds.

    A thread that hangs cannot be ended. It is left behind, as a daemon thread, so that it does not hold up the end of
    the process either; `stuck` <= MAX_STUCK counts them, and beyond that scoring raises `ReplaybufError`. Code that
    hangs inside an extension without releasing the interpreter lock is out of reach of this bound.

    There are as many threads as groups were ever scored at the same time, which the caller bounds, plus the stuck ones.
    """

    def __init__(self, environment: Environment, *, timeout_s: float) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self._left_behind: list[Future[Scores]] = []
        self._idle: list[_Worker] = []

    @property
    def stuck(self) -> int:
        """Count the threads that were left behind and still run."""
        self._left_behind = [promise for promise in self._left_behind if not promise.done()]
        return len(self._left_behind)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Scores:
        """Score the n completions of one prompt.

        Raises `RewardFault` where a score raises, is late, is not finite, or has other parts than its neighbours.
        """
        if self.stuck >= MAX_STUCK:
            raise ReplaybufError(f"{MAX_STUCK} scorings hang; the environment is broken", name="stuck", bound=MAX_STUCK)
        promise = self._start(prompt, completions)
        try:
            async with asyncio.timeout(self._timeout_s) as bound:
                return await asyncio.wrap_future(promise)
        except RewardFault:
            raise
        except Exception as error:  # whatever an environment raises is its author's to read
            if not bound.expired():
                raise _fault("reward_raised", prompt, f"raised {error!r}") from error
            self._left_behind.append(promise)
            raise _fault("reward_timeout", prompt, f"is not there after {self._timeout_s:g} s") from None

    def _start(self, prompt: Prompt, completions: Sequence[str]) -> Future[Scores]:
        promise: Future[Scores] = Future()
        promise.set_running_or_notify_cancel()  # from here on it cannot be cancelled, only awaited no longer

        def run() -> None:
            try:
                scores = [self._environment.score(prompt, text) for text in completions]
                promise.set_result(_columns(prompt, scores))
            except Exception as error:  # noqa: BLE001 - the boundary of the thread: whoever awaits the promise judges it
                # An exception that means something to coroutines must not travel through one as itself.
                promise.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

        worker = self._idle.pop() if self._idle else _Worker(self._idle)
        worker.do(run)
        return promise


def _columns(prompt: Prompt, scores: Sequence[Score]) -> Scores:
    rewards = np.array([score.reward for score in scores], np.float64)
    names = list(scores[0].parts)
    if any(score.parts.keys() != scores[0].parts.keys() for score in scores):
        raise _fault("reward_parts_differ", prompt, "has different parts per completion")
    parts = {name: np.array([score.parts[name] for score in scores], np.float64) for name in names}
    for name, values in {"reward": rewards, **parts}.items():
        if not np.isfinite(values).all():
            raise _fault("reward_not_finite", prompt, f"is not finite: {name} holds {values.tolist()}")
    return Scores(rewards, parts)


def _fault(reason: str, prompt: Prompt, what: str) -> RewardFault:
    return RewardFault(reason, f"reward of prompt {prompt.prompt_id!r} {what}", name="reward", value=prompt.prompt_id)
