"""Proxy between a service and Redis that injects network faults."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from replaybuf.service.turns import cancel_all

T = TypeVar("T")

_CHUNK = 65536
_STEP_TIMEOUT_S = 10.0


class FaultyProxy:
    """Forward bytes between a TCP port and the unix socket of a Redis. Methods inject faults, from any thread.

    Faults until `heal`: `refuse` (the port is closed), `swallow` (connections are accepted, every byte is lost),
    `delay` (answers are late), `lose_replies` (commands arrive, answers are lost).
    Faults that happen once: `drop` (all connections close), `break_once` (one command or answer is lost).
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.port = 0
        self.connections = 0
        self._swallowing = self._losing = False
        self._delay_s = 0.0
        self._once: tuple[bytes, str] | None = None
        self._happened = threading.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        """Redis URL of the proxy."""
        return f"redis://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        """Serve inside the `with` block; close all connections at its end."""
        self._thread.start()
        self._do(self._listen())
        try:
            yield self
        finally:
            self._do(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STEP_TIMEOUT_S)
            self._loop.close()

    # ------------------------------------------------------------------ faults

    def drop(self) -> None:
        """Close all connections; accept new ones."""
        self._do(self._cut())

    def refuse(self) -> None:
        """Close all connections and refuse new ones."""
        self._do(self._close())
        self._do(self._cut())

    def swallow(self) -> None:
        """Accept connections and discard every byte in both directions."""
        self._swallowing = True

    def lose_replies(self) -> None:
        """Forward commands and discard every answer."""
        self._losing = True

    def delay(self, seconds: float) -> None:
        """Delay each answer by `seconds`."""
        self._delay_s = seconds

    def break_once(self, mark: bytes, fate: str) -> None:
        """Break the next command that contains `mark`, and close its connection.

        `cut`: send half of the answer. `lost`: send no answer. `unsent`: do not forward the command.
        """
        self._happened.clear()
        self._once = (mark, fate)

    def happened(self, within_s: float) -> bool:
        """Wait until the fault of `break_once` has happened; return whether it has."""
        return self._happened.wait(within_s)

    def heal(self) -> None:
        """Forward everything again; close connections that lost bytes."""
        broken = self._swallowing or self._losing
        self._swallowing = self._losing = False
        self._delay_s = 0.0
        if broken:
            self._do(self._cut())
        if self._server is None:
            self._do(self._listen())

    # ------------------------------------------------------------------ plumbing

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_STEP_TIMEOUT_S)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            for listening in self._server.sockets:
                self._loop.remove_reader(listening.fileno())
            await asyncio.sleep(0)  # asyncio never closes a connection that it takes up after the end of its server
            self._server.close()
            self._server = None

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _end(self) -> None:
        await self._close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await cancel_all(others)
        await self._cut()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Note a connection at once: the end of the proxy may come before its task runs."""
        self.connections += 1
        self._writers.add(writer)
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = None
        try:
            redis, upstream = await asyncio.open_unix_connection(str(self.target))
            self._writers.add(upstream)
            fates: list[str] = []
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._commands(reader, upstream, fates))
                ways.create_task(self._answers(redis, writer, fates))
        except* (OSError, asyncio.IncompleteReadError):
            pass  # one end has closed, so close the other
        finally:
            for end in (writer, upstream):
                if end is not None:
                    self._writers.discard(end)
                    end.transport.abort()

    async def _commands(self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter, fates: list[str]) -> None:
        while chunk := await reader.read(_CHUNK):
            if self._swallowing:
                continue
            if self._once and self._once[0] in chunk:
                fate, self._once = self._once[1], None
                if fate == "unsent":
                    self._happened.set()
                    raise ConnectionResetError
                fates.append(fate)
            upstream.write(chunk)
            await upstream.drain()
        raise ConnectionResetError

    async def _answers(self, redis: asyncio.StreamReader, writer: asyncio.StreamWriter, fates: list[str]) -> None:
        while chunk := await redis.read(_CHUNK):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            if self._swallowing or self._losing:
                continue
            fate = fates.pop() if fates else None
            if fate == "cut":
                chunk = chunk[: max(1, len(chunk) // 2)]
            if fate != "lost":
                writer.write(chunk)
                await writer.drain()
            if fate:
                self._happened.set()
            if fate in ("cut", "lost"):
                raise ConnectionResetError
        raise ConnectionResetError
