"""Scoring under a time bound: a reward that raises, hangs or is no number is a fault of one group, never a hang."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from replaybuf.errors import ReplaybufError, RewardFault
from replaybuf.generator.environments import Environment, Reward, Score
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


class _Loop:
    """A thread with an event loop for coroutines of the user's: what blocks there blocks no other part."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="replaybuf-score-loop", daemon=True).start()

    def start(self, work: Coroutine[Any, Any, list[Score]]) -> Future[list[Score]]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class Scoring(Protocol):
    """What scores groups: `Scorer` in this process, `replaybuf.generator.reward_pool.RewardPool` in others."""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Scores:
        """Score the n completions of one prompt. Raises `RewardFault`."""


class Scorer:
    """Runs environments, each group in a thread of its own, for at most `timeout_s` seconds.

    A thread that hangs cannot be ended. It is left behind, as a daemon thread, so that it does not hold up the end of
    the process either; `stuck` <= MAX_STUCK counts them, and beyond that scoring raises `ReplaybufError`. Code that
    hangs inside an extension without releasing the interpreter lock is out of reach of this bound, but not of that of a
    `RewardPool`. Coroutines all run in one thread of their own, and are cancelled at the bound.

    There are as many threads as groups were ever scored at the same time, which the caller bounds, times the rewards,
    plus the stuck ones. Of several rewards, or one with a weight, the reward is sum(weight * reward), and the parts are
    each reward by its name, and its own parts as `<name>.<part>`.
    """

    def __init__(self, environment: Environment | Sequence[Reward], *, timeout_s: float) -> None:
        rewards = environment if isinstance(environment, Sequence) else [Reward("", environment)]
        self._rewards = tuple(rewards)
        self._blended = len(rewards) > 1 or rewards[0].weight != 1.0
        self._timeout_s = timeout_s
        self._left_behind: list[Future[list[Score]]] = []
        self._idle: list[_Worker] = []
        self._loop: _Loop | None = None

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
        promises = [self._start(reward, prompt, completions) for reward in self._rewards]
        try:
            async with asyncio.timeout(self._timeout_s) as bound:
                scored = [await asyncio.wrap_future(promise) for promise in promises]
            return self._joined(prompt, scored)
        except RewardFault:
            raise
        except Exception as error:  # whatever an environment raises is its author's to read
            if not bound.expired():
                raise reward_fault("reward_raised", prompt, f"raised {error!r}") from error
            raise reward_fault("reward_timeout", prompt, f"is not there after {self._timeout_s:g} s") from None
        finally:
            for promise in promises:
                if not promise.cancel() and not promise.done():  # a thread, which nothing ends
                    self._left_behind.append(promise)

    def _start(self, reward: Reward, prompt: Prompt, completions: Sequence[str]) -> Future[list[Score]]:
        if inspect.iscoroutinefunction(reward.environment.score):
            self._loop = self._loop or _Loop()
            return self._loop.start(_gathered(reward.environment.score, prompt, completions))
        promise: Future[list[Score]] = Future()
        promise.set_running_or_notify_cancel()  # from here on it cannot be cancelled, only awaited no longer
        score: Callable[[Prompt, str], Score] = reward.environment.score  # type: ignore[assignment]

        def run() -> None:
            try:
                promise.set_result([score(prompt, text) for text in completions])
            except Exception as error:  # noqa: BLE001 - the boundary of the thread: whoever awaits the promise judges it
                # An exception that means something to coroutines must not travel through one as itself.
                promise.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

        worker = self._idle.pop() if self._idle else _Worker(self._idle)
        worker.do(run)
        return promise

    def _joined(self, prompt: Prompt, scored: list[list[Score]]) -> Scores:
        columns = [_columns(prompt, scores) for scores in scored]
        if not self._blended:
            return columns[0]
        parts: dict[str, Float64s] = {}
        for reward, column in zip(self._rewards, columns, strict=True):
            parts[reward.name] = column.rewards
            parts |= {f"{reward.name}.{part}": values for part, values in column.parts.items()}
        with np.errstate(over="ignore", invalid="ignore"):  # judged below, by the result
            total = np.array([reward.weight for reward in self._rewards]) @ np.array([c.rewards for c in columns])
        if not np.isfinite(total).all():
            raise reward_fault("reward_not_finite", prompt, f"is not finite: the weighted sum holds {total.tolist()}")
        return Scores(total, parts)


async def _gathered(
    score: Callable[[Prompt, str], Awaitable[Score]], prompt: Prompt, completions: Sequence[str]
) -> list[Score]:
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_awaited(score(prompt, text))) for text in completions]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]


async def _awaited(score: Awaitable[Score]) -> Score:
    return await score


def _columns(prompt: Prompt, scores: Sequence[Score]) -> Scores:
    rewards = np.array([score.reward for score in scores], np.float64)
    names = list(scores[0].parts)
    if any(score.parts.keys() != scores[0].parts.keys() for score in scores):
        raise reward_fault("reward_parts_differ", prompt, "has different parts per completion")
    parts = {name: np.array([score.parts[name] for score in scores], np.float64) for name in names}
    for name, values in {"reward": rewards, **parts}.items():
        if not np.isfinite(values).all():
            raise reward_fault("reward_not_finite", prompt, f"is not finite: {name} holds {values.tolist()}")
    return Scores(rewards, parts)


def reward_fault(reason: str, prompt: Prompt, what: str) -> RewardFault:
    """Say what a reward did to the group of a prompt."""
    return RewardFault(reason, f"reward of prompt {prompt.prompt_id!r} {what}", name="reward", value=prompt.prompt_id)
