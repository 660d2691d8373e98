"""Processes beside the service for work that would hold its event loop or could end it.

A process ends when its socket closes, so none outlives the service.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from replaybuf.service.shared_bytes import MESSAGE_BYTES

_STDERR = 2


class ChildProcess:
    """One process that runs `python -m module FD`, where FD is its socket; it answers one message at a time."""

    def __init__(self, module: str) -> None:
        self._socket, remote = socket.socketpair()
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(remote.fileno())],
                pass_fds=[remote.fileno()],
                stdout=_STDERR,  # what a plug-in prints must not mix with the output of the service
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )
        self._socket.setblocking(False)

    async def ask(self, message: bytes, fds: Sequence[int], timeout_s: float) -> bytes:
        """Send a message with open files; return the line that answers it.

        Raises `ConnectionError` if the process ends or answers more than a line, and `TimeoutError`. After an error, or
        if the caller is cancelled, the process must be ended: its answer would be taken for that of the next message.
        """
        loop, reply = asyncio.get_running_loop(), b""
        socket.send_fds(self._socket, [message], fds)
        async with asyncio.timeout(timeout_s):
            while not reply.endswith(b"\n"):
                part = await loop.sock_recv(self._socket, MESSAGE_BYTES)
                if not part or len(reply) > MESSAGE_BYTES:
                    raise ConnectionResetError("the process ended" if not part else "the answer has no end")
                reply += part
        return reply

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def end(self) -> None:
        """Kill the process."""
        self._socket.close()
        self._process.kill()
        threading.Thread(target=self._process.wait, daemon=True).start()  # the end of a large process takes a while
