"""Pool of processes that decode large JSON bodies, so that none of them holds the event loop.

A process ends when its socket closes, so none outlives the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading

import msgspec

from replaybuf.errors import ServiceUnavailable
from replaybuf.service.http.decoder_process import ERRORS, MESSAGE_BYTES, Answer, Job, Outcome
from replaybuf.service.http.shared_bytes import SharedBytes
from replaybuf.wire.collector import collector_paused
from replaybuf.wire.contract import AckRequest

PROCESSES = 4
"""Bodies decoded at once; further ones wait."""
DECODE_TIMEOUT_S = 60.0
"""A process that takes longer for one body is killed."""


class Decoder:
    """One decoder process; it decodes one body at a time."""

    def __init__(self) -> None:
        self._socket, remote = socket.socketpair()
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "replaybuf.service.http.decoder_process", str(remote.fileno())],
                pass_fds=[remote.fileno()],
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )
        self._socket.setblocking(False)

    async def decode(self, job: Job, body: SharedBytes, frames: SharedBytes) -> Answer:
        """Decode a body. Raises `ConnectionError` if the process ends, and `TimeoutError`."""
        loop, reply = asyncio.get_running_loop(), b""
        socket.send_fds(self._socket, [msgspec.json.encode(job)], [body.fd, frames.fd])
        async with asyncio.timeout(DECODE_TIMEOUT_S):
            while not reply.endswith(b"\n"):
                if not (part := await loop.sock_recv(self._socket, MESSAGE_BYTES)):
                    raise ConnectionResetError("the process ended")
                reply += part
        return msgspec.json.decode(reply, type=Answer)

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def end(self) -> None:
        """Kill the process."""
        self._socket.close()
        self._process.kill()
        threading.Thread(target=self._process.wait, daemon=True).start()  # the end of a large process takes a while


class DecoderPool:
    """Up to `PROCESSES` decoders. Each starts when it is needed and is used again; one that fails is replaced."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(PROCESSES)
        self._idle: list[Decoder] = []

    async def decode_groups(self, body: SharedBytes, limits: Job) -> tuple[memoryview, list[Outcome]]:
        """Return the frames of all groups, one after another, and one outcome per group. Raises what `_run` raises."""
        answer, view = await self._run(limits, body)
        return view[: answer.frames_bytes], msgspec.msgpack.decode(view[answer.frames_bytes :], type=list[Outcome])

    async def decode_ack(self, body: SharedBytes) -> AckRequest:
        """Return an ack, checked. Raises what `_run` raises."""
        _, view = await self._run(Job(ack=True), body)
        with collector_paused():
            return msgspec.msgpack.decode(view, type=AckRequest)

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
                answer = await decoder.decode(job, body, frames)
            except (OSError, TimeoutError) as error:
                raise ServiceUnavailable(f"the body was not decoded: {error!r}; send it again", name="body") from error
            stack.pop_all()
        self._idle.append(decoder)
        return answer

    async def _take(self) -> Decoder:
        while self._idle:
            if (decoder := self._idle.pop()).running:
                return decoder
            decoder.end()
        return await asyncio.to_thread(Decoder)
