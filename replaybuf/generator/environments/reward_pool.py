"""Scoring in worker processes: for rewards that compute, and for rewards that only a kill can end.

Each worker is a fresh interpreter (`reward_worker`) that scores one group at a time::

    free ──job──► scoring ──answer──► free
                     └── late, or ended by itself ──► killed ──next job──► restarted ──► scoring
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from replaybuf.errors import ReplaybufError, RewardFault, first_error
from replaybuf.generator.child_process import ChildEnded, ChildProcess
from replaybuf.generator.environments.scoring import Scores, reward_fault
from replaybuf.generator.prompts import Prompt

START_S = 60.0
"""Time limit for a worker to import its environment."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One group to score: the fields of its prompt, and the completions as text."""

    prompt_id: str
    text: str
    token_ids: list[int]
    answer: str | None
    metadata: dict[str, Any]
    where: str
    completions: list[str]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of a group, or `reason`, `detail` and `traceback` of a `RewardFault`.

    The first one: the worker is ready, or unfit.
    """

    rewards: list[float] = []
    parts: dict[str, list[float]] = {}
    process_rewards: tuple[tuple[tuple[int, float], ...], ...] = ()
    reason: str | None = None
    detail: str = ""
    traceback: str = ""


class RewardPool:
    """Scores groups in `processes` other processes, each for at most `timeout_s` seconds; `environment` as in options.

    The time limit starts when a worker is free. Use as an async context manager: entering starts all workers and
    raises `ReplaybufError` if one does not start; leaving ends them.
    """

    def __init__(self, environment: str, *, processes: int, timeout_s: float) -> None:
        self._environment = environment
        self._processes = processes
        self._timeout_s = timeout_s
        self._free: asyncio.Queue[ChildProcess[Answer] | None] = asyncio.Queue()  # None: start a worker first

    async def __aenter__(self) -> RewardPool:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._processes):
                    tasks.create_task(self._add())
        except BaseExceptionGroup as group:
            await self.aclose()
            error = first_error(group)
            raise error from error.__cause__  # its traceback is shown to people
        except asyncio.CancelledError:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the workers. Call when no scoring is in progress."""
        while not self._free.empty():
            if (worker := self._free.get_nowait()) is not None:
                await _kill(worker)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Scores:
        """Score the n completions of one prompt. Raises `RewardFault`."""
        worker, usable = await self._free.get(), False
        try:
            worker = worker or await self._start()
            async with asyncio.timeout(self._timeout_s):
                answer = await asyncio.wrap_future(worker.send(_job_of(prompt, completions))[1])
            usable = True
        except TimeoutError:
            raise reward_fault("timeout", prompt, f"did not finish within {self._timeout_s:g} s") from None
        except ChildEnded as error:
            raise reward_fault("raised", prompt, "ended the process that computed it") from error
        except ReplaybufError as error:
            raise reward_fault("raised", prompt, f"has no process: {error.detail}") from error
        finally:
            if worker is not None and not usable:  # cancelled, late or ended
                await _kill(worker)
                worker = None
            self._free.put_nowait(worker)
        if answer.reason is not None:
            fault = RewardFault(answer.reason, answer.detail, name="reward", value=prompt.prompt_id)
            fault.add_note(answer.traceback)
            raise fault
        parts = {name: np.array(values, np.float64) for name, values in answer.parts.items()}
        return Scores(np.array(answer.rewards, np.float64), parts, answer.process_rewards)

    async def _add(self) -> None:
        self._free.put_nowait(await self._start())

    async def _start(self) -> ChildProcess[Answer]:
        module = "replaybuf.generator.environments.reward_worker"
        worker = ChildProcess[Answer]([sys.executable, "-m", module, self._environment], Answer)
        why = None
        try:
            async with asyncio.timeout(START_S):
                first = await asyncio.wrap_future(worker.first)
            if first.reason is None:
                return worker
            why = f"a reward process does not start: {first.detail}"
        except TimeoutError:
            why = f"a reward process did not start within {START_S:g} s"
        except ChildEnded:
            why = "a reward process ended as it started; see standard error"
        except asyncio.CancelledError:
            await _kill(worker)
            raise
        await _kill(worker)
        raise ReplaybufError(why, name="environment", value=self._environment)


async def _kill(worker: ChildProcess[Answer]) -> None:
    worker.kill()
    await asyncio.to_thread(worker.end)


def _job_of(prompt: Prompt, completions: Sequence[str]) -> Job:
    return Job(
        prompt_id=prompt.prompt_id,
        text=prompt.text,
        token_ids=prompt.token_ids.tolist(),
        answer=prompt.answer,
        metadata=prompt.metadata,
        where=prompt.where,
        completions=list(completions),
    )
