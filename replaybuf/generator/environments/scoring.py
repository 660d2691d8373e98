"""Scoring with a time limit: a reward that raises, hangs or is not a number costs one group and blocks nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from replaybuf.client.producers.failures import redact
from replaybuf.errors import Invalid, RewardFault, first_error
from replaybuf.generator.environments.contract import Environment, Score, score_of, takes_turns
from replaybuf.generator.environments.rewards import Reward, rewards_of
from replaybuf.generator.prompts import Prompt
from replaybuf.generator.threads import LoopThread, Worker
from replaybuf.kernel.strategy.advantages import ProcessReward
from replaybuf.wire.group import Float64s

MAX_STUCK = 16
"""With so many hanging threads, no further scoring starts."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scores of a group: `rewards` float64 [n], `parts` float64 [n] by name.

    `process_rewards`: one tuple per completion, or none at all. Their ends are those of `Score` until
    `process_rewards.by_text` or `by_turn` converts them to tokens.
    """

    rewards: Float64s
    parts: dict[str, Float64s]
    process_rewards: tuple[tuple[ProcessReward, ...], ...] = ()


class Scoring(Protocol):
    """Scores groups: `Scorer` in this process, `RewardPool` in other processes."""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Scores:
        """Score the n completions of one prompt. Raises `RewardFault`."""


class Scorer:
    """Runs environments, each group in a thread of its own, for at most `timeout_s` seconds.

    A hanging thread cannot be ended. It stays behind as a daemon thread, so the process can still exit. `stuck` counts
    such threads; at MAX_STUCK no further scoring starts. An extension that hangs without releasing the interpreter
    lock needs a `RewardPool`. Coroutines share one thread and are cancelled at the limit.

    Threads = groups scored at the same time x rewards + stuck ones. With several rewards or a weight, the reward is
    sum(weight * reward). The parts are then each reward by its name, and its own parts as `<name>.<part>`.
    """

    def __init__(self, environment: Environment | Sequence[Reward], *, timeout_s: float) -> None:
        self._rewards = tuple(rewards_of(environment))
        several_turns = next((reward.name for reward in self._rewards if takes_turns(reward.environment)), None)
        if several_turns is not None:
            detail = (
                f"environment {several_turns!r} plays turns; it must be the only one, without weight and "
                "reward processes"
            )
            raise Invalid(detail, name="environment", value=several_turns)
        self._blended = len(self._rewards) > 1 or self._rewards[0].weight != 1.0
        self._timeout_s = timeout_s
        self._left_behind: list[Future[list[Score]]] = []
        self._idle: list[Worker] = []
        self._loop: LoopThread | None = None

    @property
    def stuck(self) -> int:
        """Count the threads that were left behind and still run."""
        self._left_behind = [future for future in self._left_behind if not future.done()]
        return len(self._left_behind)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Scores:
        """Score the n completions of one prompt.

        Raises `RewardFault` if a score raises, is late, is not finite, or if completions have different parts.
        """
        if self.stuck >= MAX_STUCK:
            raise reward_fault("timeout", prompt, f"was not computed: {self.stuck} earlier scorings still hang")
        futures = [self._start(reward, prompt, completions) for reward in self._rewards]
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                scored = [await asyncio.wrap_future(future) for future in futures]
            return self._sum(prompt, scored)
        except RewardFault:
            raise
        except Exception as error:  # an environment may raise anything
            if not limit.expired():
                raise reward_fault("raised", prompt, f"raised {error!r}") from error
            raise reward_fault("timeout", prompt, f"did not finish within {self._timeout_s:g} s") from None
        finally:
            self._left_behind += [future for future in futures if not future.cancel() and not future.done()]

    def _start(self, reward: Reward, prompt: Prompt, completions: Sequence[str]) -> Future[list[Score]]:
        if inspect.iscoroutinefunction(reward.environment.score):
            self._loop = self._loop or LoopThread()
            return self._loop.start(_gather(reward.environment.score, prompt, completions))
        score: Callable[[Prompt, str], object] = reward.environment.score
        worker = self._idle.pop() if self._idle else Worker(self._idle)
        return worker.do(lambda: [score_of(score(prompt, text)) for text in completions])

    def _sum(self, prompt: Prompt, scored: list[list[Score]]) -> Scores:
        columns = [columns_of(prompt, scores) for scores in scored]
        if not self._blended:
            return columns[0]
        parts: dict[str, Float64s] = {}
        for reward, column in zip(self._rewards, columns, strict=True):
            parts[reward.name] = column.rewards
            parts |= {f"{reward.name}.{part}": values for part, values in column.parts.items()}
        with np.errstate(over="ignore", invalid="ignore"):  # the check of the sum follows
            total = np.array([reward.weight for reward in self._rewards]) @ np.array([c.rewards for c in columns])
        if not np.isfinite(total).all():
            raise reward_fault("not_finite", prompt, f"is not finite: the weighted sum holds {total.tolist()}")
        process = tuple(
            tuple(
                (end, reward.weight * value)
                for reward, score in zip(self._rewards, of_completion, strict=True)
                for end, value in score.process_rewards
            )
            for of_completion in zip(*scored, strict=True)
        )
        return Scores(total, parts, process if any(process) else ())


async def _gather(
    score: Callable[[Prompt, str], Awaitable[Score | float]], prompt: Prompt, completions: Sequence[str]
) -> list[Score]:
    async def scored(text: str) -> Score:
        return score_of(await score(prompt, text))

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(scored(text)) for text in completions]
    except BaseExceptionGroup as group:
        error = first_error(group)
        raise error from error.__cause__  # its traceback is shown to people
    return [task.result() for task in running]


def columns_of(prompt: Prompt, scores: Sequence[Score]) -> Scores:
    """Convert the scores of a group to columns. Raises `RewardFault` for values that are not finite, other parts."""
    if any(score.parts.keys() != scores[0].parts.keys() for score in scores):
        raise reward_fault("parts_differ", prompt, "has different parts per completion")
    rewards = np.array([score.reward for score in scores], np.float64)
    parts = {name: np.array([score.parts[name] for score in scores], np.float64) for name in scores[0].parts}
    process = tuple(score.process_rewards for score in scores)
    of_stretches = np.array([reward for stretches in process for _, reward in stretches], np.float64)
    for name, values in {"reward": rewards, **parts, "process_rewards": of_stretches}.items():
        if not np.isfinite(values).all():
            raise reward_fault("not_finite", prompt, f"is not finite: {name} holds {values.tolist()}")
    return Scores(rewards, parts, process if any(process) else ())


def episode_fault(what: str, kind: str, prompt: Prompt, detail: str) -> RewardFault:
    """Describe how `what`, environment or reward, failed; the reason is `<what>_<kind>`."""
    prompt_id = prompt.prompt_id
    # Redacted before the error shortens it: a cut would leave a part of a secret.
    return RewardFault(f"{what}_{kind}", redact(f"{what} of prompt {prompt_id!r} {detail}"), name=what, value=prompt_id)


def reward_fault(kind: str, prompt: Prompt, detail: str) -> RewardFault:
    """Describe how the reward of a group failed; the reason is `reward_<kind>`."""
    return episode_fault("reward", kind, prompt, detail)
