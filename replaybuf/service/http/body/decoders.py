"""Pool of processes that decode large JSON bodies, so that none of them holds the event loop."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from replaybuf.errors import ServiceUnavailable
from replaybuf.service.child_processes import ChildProcess
from replaybuf.service.http.body.decoder_process import ERRORS, Answer, Job, Outcome
from replaybuf.service.shared_bytes import SharedBytes
from replaybuf.wire.contract import AckRequest
from replaybuf.wire.decoding import collector_paused, prepared

MODULE = "replaybuf.service.http.body.decoder_process"
PROCESSES = 4
"""Bodies decoded at once; further ones wait."""
DECODE_TIMEOUT_S = 60.0
"""A process that takes longer for one body is killed."""


class DecoderPool:
    """Up to `PROCESSES` decoders. Each starts when it is needed and is used again; one that fails is replaced."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(PROCESSES)
        self._idle: list[ChildProcess] = []

    async def decode_groups(self, body: SharedBytes, limits: Job) -> tuple[memoryview, list[Outcome]]:
        """Return the frames of all groups, one after another, and one outcome per group. Raises what `_run` raises."""
        answer, view = await self._run(limits, body)
        return view[: answer.frames_bytes], msgspec.msgpack.decode(
            view[answer.frames_bytes :], type=prepared(list[Outcome])
        )

    async def decode_ack(self, body: SharedBytes) -> AckRequest:
        """Return an ack, checked. Raises what `_run` raises."""
        _, view = await self._run(Job(ack=True), body)
        with collector_paused():
            return msgspec.msgpack.decode(view, type=prepared(AckRequest))

    async def _run(self, job: Job, body: SharedBytes) -> tuple[Answer, memoryview]:
        """Return the answer of a process and the file that it wrote.

        Raises what the body as a whole is refused for, and `ServiceUnavailable` if the process fails.
        """
        frames = SharedBytes()
        async with self._turns:
            answer = await self._decode(job, body, frames)
        if failure := answer.failure:
            raise ERRORS[failure.kind](failure.detail, name=failure.name, value=failure.value, bound=failure.bound)
        return answer, frames.view()

    async def _decode(self, job: Job, body: SharedBytes, frames: SharedBytes) -> Answer:
        decoder = await self._take()
        with contextlib.ExitStack() as stack:
            stack.callback(decoder.end)
            try:
                reply = await decoder.ask(msgspec.json.encode(job), [body.fd, frames.fd], DECODE_TIMEOUT_S)
            except (OSError, TimeoutError) as error:
                raise ServiceUnavailable(f"the body was not decoded: {error!r}; send it again", name="body") from error
            stack.pop_all()
        self._idle.append(decoder)
        return msgspec.json.decode(reply, type=prepared(Answer))

    async def _take(self) -> ChildProcess:
        while self._idle:
            if (decoder := self._idle.pop()).running:
                return decoder
            decoder.end()
        return await asyncio.to_thread(ChildProcess, MODULE)
