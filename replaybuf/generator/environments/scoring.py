"""Scoring under a time bound: a reward that raises, hangs or is no number is a fault of one group, never a hang."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from replaybuf.errors import Invalid, RewardFault
from replaybuf.generator.environments.contract import Environment, Reward, Score, score_of, takes_turns
from replaybuf.generator.prompts.prompt import Prompt
from replaybuf.generator.threads import LoopThread, Worker
from replaybuf.kernel.advantages import ProcessReward
from replaybuf.wire.group import Float64s

MAX_STUCK = 16
"""So many scorings may hang at the same time before no further one is begun."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scores of a group: `rewards` float64 [n], `parts` float64 [n] by name.

    `process_rewards`: those of each completion, none where no completion has any; their ends are counted as in `Score`
    until `replaybuf.generator.environments.process_rewards` makes tokens of them.
    """

    rewards: Float64s
    parts: dict[str, Float64s]
    process_rewards: tuple[tuple[ProcessReward, ...], ...] = ()


class Scoring(Protocol):
    """What scores groups: `Scorer` in this process, `RewardPool` in others."""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Scores:
        """Score the n completions of one prompt. Raises `RewardFault`."""


class Scorer:
    """Runs environments, each group in a thread of its own, for at most `timeout_s` seconds.

    A thread that hangs cannot be ended. It is left behind, as a daemon thread, so that it does not hold up the end of
    the process either; `stuck` counts them, and as long as MAX_STUCK of them run no further one is begun. Code that
    hangs inside an extension without releasing the interpreter lock is out of reach of this bound, but not of that of a
    `RewardPool`. Coroutines all run in one thread of their own, and are cancelled at the bound.

    There are as many threads as groups were ever scored at the same time, which the caller bounds, times the rewards,
    plus the stuck ones. Of several rewards, or one with a weight, the reward is sum(weight * reward), and the parts are
    each reward by its name, and its own parts as `<name>.<part>`.
    """

    def __init__(self, environment: Environment | Sequence[Reward], *, timeout_s: float) -> None:
        rewards = environment if isinstance(environment, Sequence) else [Reward("", environment)]
        several_turns = next((reward.name for reward in rewards if takes_turns(reward.environment)), None)
        if several_turns is not None:
            detail = f"environment {several_turns!r} plays turns; it stands alone, without weight and reward processes"
            raise Invalid(detail, name="environment", value=several_turns)
        self._rewards = tuple(rewards)
        self._blended = len(rewards) > 1 or rewards[0].weight != 1.0
        self._timeout_s = timeout_s
        self._left_behind: list[Future[list[Score]]] = []
        self._idle: list[Worker] = []
        self._loop: LoopThread | None = None

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
            raise reward_fault("timeout", prompt, f"is not computed: {self.stuck} scorings before it still hang")
        promises = [self._start(reward, prompt, completions) for reward in self._rewards]
        try:
            async with asyncio.timeout(self._timeout_s) as bound:
                scored = [await asyncio.wrap_future(promise) for promise in promises]
            return self._joined(prompt, scored)
        except RewardFault:
            raise
        except Exception as error:  # whatever an environment raises is its author's to read
            if not bound.expired():
                raise reward_fault("raised", prompt, f"raised {error!r}") from error
            raise reward_fault("timeout", prompt, f"is not there after {self._timeout_s:g} s") from None
        finally:
            for promise in promises:
                if not promise.cancel() and not promise.done():  # a thread, which nothing ends
                    self._left_behind.append(promise)

    def _start(self, reward: Reward, prompt: Prompt, completions: Sequence[str]) -> Future[list[Score]]:
        if inspect.iscoroutinefunction(reward.environment.score):
            self._loop = self._loop or LoopThread()
            return self._loop.start(_gathered(reward.environment.score, prompt, completions))
        score: Callable[[Prompt, str], Score | float] = reward.environment.score  # type: ignore[assignment]
        worker = self._idle.pop() if self._idle else Worker(self._idle)
        return worker.do(lambda: [score_of(score(prompt, text)) for text in completions])

    def _joined(self, prompt: Prompt, scored: list[list[Score]]) -> Scores:
        columns = [columns_of(prompt, scores) for scores in scored]
        if not self._blended:
            return columns[0]
        parts: dict[str, Float64s] = {}
        for reward, column in zip(self._rewards, columns, strict=True):
            parts[reward.name] = column.rewards
            parts |= {f"{reward.name}.{part}": values for part, values in column.parts.items()}
        with np.errstate(over="ignore", invalid="ignore"):  # judged below, by the result
            total = np.array([reward.weight for reward in self._rewards]) @ np.array([c.rewards for c in columns])
        if not np.isfinite(total).all():
            raise reward_fault("not_finite", prompt, f"is not finite: the weighted sum holds {total.tolist()}")
        return Scores(total, parts, self._joined_process(scored))

    def _joined_process(self, scored: list[list[Score]]) -> tuple[tuple[ProcessReward, ...], ...]:
        """Weigh the process rewards of all rewards, which add up where they end at the same place."""
        joined = tuple(
            tuple(
                (end, reward.weight * value)
                for reward, score in zip(self._rewards, of_one, strict=True)
                for end, value in score.process_rewards
            )
            for of_one in zip(*scored, strict=True)
        )
        return joined if any(joined) else ()


async def _gathered(
    score: Callable[[Prompt, str], Awaitable[Score | float]], prompt: Prompt, completions: Sequence[str]
) -> list[Score]:
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_awaited(score(prompt, text))) for text in completions]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]


async def _awaited(score: Awaitable[Score | float]) -> Score:
    return score_of(await score)


def columns_of(prompt: Prompt, scores: Sequence[Score]) -> Scores:
    """Put the scores of a group side by side. Raises `RewardFault` where one is not finite or has other parts."""
    rewards = np.array([score.reward for score in scores], np.float64)
    names = list(scores[0].parts)
    if any(score.parts.keys() != scores[0].parts.keys() for score in scores):
        raise reward_fault("parts_differ", prompt, "has different parts per completion")
    parts = {name: np.array([score.parts[name] for score in scores], np.float64) for name in names}
    process = tuple(score.process_rewards for score in scores) if any(score.process_rewards for score in scores) else ()
    named = {"reward": rewards, **parts}
    if process:
        named["process_rewards"] = np.array([reward for given in process for _, reward in given], np.float64)
    for name, values in named.items():
        if not np.isfinite(values).all():
            raise reward_fault("not_finite", prompt, f"is not finite: {name} holds {values.tolist()}")
    return Scores(rewards, parts, process)


def episode_fault(what: str, kind: str, prompt: Prompt, detail: str) -> RewardFault:
    """Say what `what`, environment or reward, did to the rollout of a prompt; counted as `<what>_<kind>`."""
    prompt_id = prompt.prompt_id
    return RewardFault(f"{what}_{kind}", f"{what} of prompt {prompt_id!r} {detail}", name=what, value=prompt_id)


def reward_fault(kind: str, prompt: Prompt, detail: str) -> RewardFault:
    """Say what a reward did to the group of a prompt; counted as `reward_<kind>`."""
    return episode_fault("reward", kind, prompt, detail)
