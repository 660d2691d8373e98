"""Scoring in processes of its own: for rewards that compute, and for those that nothing but a kill ends.

Each worker is a fresh interpreter (`replaybuf.generator.environments.reward_worker`) that scores one group at a time::

    free ──job──► scoring ──answer──► free
                     └── late, or ended by itself ──► killed ──next job──► started anew ──► scoring

Jobs and answers are msgpack behind their length (4 bytes, little-endian), by standard input and output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from replaybuf.errors import ReplaybufError, RewardFault
from replaybuf.generator.environments.scoring import Scores, reward_fault
from replaybuf.generator.prompts.prompt import Prompt

START_S = 60.0
"""A worker that has not imported its environment by then is broken."""
_END_S = 5.0
_LENGTH = struct.Struct("<I")


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
    """Scores of a group; or why there are none: `reason` and `detail` of a `RewardFault`. The first says "ready"."""

    rewards: list[float] = []
    parts: dict[str, list[float]] = {}
    process_rewards: tuple[tuple[tuple[int, float], ...], ...] = ()
    reason: str | None = None
    detail: str = ""


class RewardPool:
    """Scores groups in `processes` other processes, each for at most `timeout_s` seconds; `environment` as in options.

    The bound runs from when a worker is free; since each is free again within the bound, waiting for one is bounded by
    the groups waiting. Use as an async context manager: entering starts all workers and raises `ReplaybufError` where
    one does not start, leaving ends them.
    """

    def __init__(self, environment: str, *, processes: int, timeout_s: float) -> None:
        self._environment = environment
        self._processes = processes
        self._timeout_s = timeout_s
        self._free: asyncio.Queue[_Worker | None] = asyncio.Queue()  # None: a place whose worker is to be started

    async def __aenter__(self) -> RewardPool:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._processes):
                    tasks.create_task(self._add())
        except BaseExceptionGroup as group:
            await self.aclose()
            raise group.exceptions[0] from None
        except asyncio.CancelledError:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the workers; call when nothing is being scored any more."""
        while not self._free.empty():
            worker = self._free.get_nowait()
            if worker is not None:
                await worker.end()

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Scores:
        """Score the n completions of one prompt. Raises `RewardFault`."""
        worker, usable = await self._free.get(), False
        try:
            worker = worker or await self._started()
            async with asyncio.timeout(self._timeout_s):
                answer = await worker.ask(_job_of(prompt, completions))
            usable = True
        except TimeoutError:
            raise reward_fault("timeout", prompt, f"is not there after {self._timeout_s:g} s") from None
        except (EOFError, ConnectionError) as error:
            raise reward_fault("raised", prompt, "ended the process that computed it") from error
        except ReplaybufError as error:
            raise reward_fault("raised", prompt, f"has no process: {error.detail}") from error
        finally:
            if worker is not None and not usable:  # a cancelled job too: its answer would be taken for the next one's
                await worker.end()
                worker = None
            self._free.put_nowait(worker)
        if answer.reason is not None:
            raise RewardFault(answer.reason, answer.detail, name="reward", value=prompt.prompt_id)
        parts = {name: np.array(values, np.float64) for name, values in answer.parts.items()}
        return Scores(np.array(answer.rewards, np.float64), parts, answer.process_rewards)

    async def _add(self) -> None:
        self._free.put_nowait(await self._started())

    async def _started(self) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "replaybuf.generator.environments.reward_worker", self._environment),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is the generator's, which lets what is in flight finish
        )
        worker = _Worker(process)
        try:
            async with asyncio.timeout(START_S):
                ready = await worker.answer()
            if ready.reason is not None:
                raise ReplaybufError(f"a reward process does not start: {ready.detail}", name="environment")
        except TimeoutError:
            await worker.end()
            raise ReplaybufError(f"a reward process did not start within {START_S:g} s", name="environment") from None
        except (EOFError, ReplaybufError) as error:
            await worker.end()
            detail = error.detail if isinstance(error, ReplaybufError) else "a reward process ended as it started"
            raise ReplaybufError(detail, name="environment", value=self._environment) from error
        except BaseException:
            await worker.end()
            raise
        return worker


class _Worker:
    """One process, and the two pipes to it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, job: Job) -> Answer:
        """Have one job done. Raises `EOFError` or `ConnectionError` where the process ends over it."""
        stdin = self._process.stdin
        if stdin is None:
            raise EOFError
        stdin.write(framed(job))
        await stdin.drain()
        return await self.answer()

    async def answer(self) -> Answer:
        stdout = self._process.stdout
        if stdout is None:
            raise EOFError
        (length,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
        return msgspec.msgpack.decode(await stdout.readexactly(length), type=Answer)

    async def end(self) -> None:
        """Kill the process, with what it started itself, and wait until it is gone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        async with asyncio.timeout(_END_S):
            await self._process.wait()


def framed(message: Job | Answer) -> bytes:
    """Encode a message behind its length."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def length_of(head: bytes) -> int:
    """Return the length that stands before a message."""
    (length,) = _LENGTH.unpack(head)
    return int(length)


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
