"""One connection to the modelled Redis: commands and replies keep their order, and it may be cut anywhere."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import ConnectionError as RedisConnectionError

from tests.simulation.loop import NODE, WORLD, Node
from tests.simulation.world import LATEST_S, LATEST_SEND_S

if TYPE_CHECKING:
    from tests.simulation.redis_model.server import RedisServer

END = object()
"""Instead of a reply: the connection ends."""
WAITS = object()
"""Instead of a reply: the command blocks its connection, and answers later."""
PAUSES = 0.05
"""Share of commands of a pipeline before which other connections get a turn."""
RECORD_TYPE = re.compile(rb"\xa4type[\xa1-\xbf]([A-Z_]+)")
RECORDS = (b"rb_append", b"rb_columns")
PUBLISH, PUBLISH_FACTOR = b"rb_publish", 25
"""With many rewinds, groups are late so much more often: a rewind may take their version back on their way."""


class Link:
    """A connection of a client to a server. `closed`: the server knows its end; `broken`: the client does too."""

    def __init__(self, server: RedisServer) -> None:
        self.server, self.world = server, server.world
        self.closed = self.broken = False
        self.client = NODE.get()
        self._arrives_s = self._answers_s = 0.0
        self._sent: deque[tuple[Sequence[Sequence[bytes]], int | None]] = deque()
        self._commands: deque[tuple[Sequence[bytes], bool]] = deque()
        self._answered: deque[list[Any]] = deque()
        self._busy = False
        self.asking = False
        """Whether the next command is for a slot that is on its way to the server."""
        self.queued: list[Sequence[bytes]] | None = None
        """Commands of an open transaction."""
        self.replies: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None
        server.links.append(self)

    # ------------------------------------------------------------------ the client

    def send(self, commands: Sequence[Sequence[bytes]]) -> None:
        """Send commands. A cut may come before, between or after them. Raises `RedisConnectionError` after an end."""
        if self.broken:
            raise RedisConnectionError("the connection was closed by the server")
        world = self.world
        cut_at = None
        if world.may_hurt(self.client) and world.faults.happens("cut send", world.faults.cut, world):
            cut_at = world.rng.randint(0, len(commands))
            world.coverage.add_stack(sys._getframe(1))
        self._arrives_s = max(self._arrives_s, world.now_s() + world.way_s() + self._late_s(commands))
        self._sent.append((commands, cut_at))  # a queue: timers of one moment have no order
        world.at(self.server.node, self._arrives_s, self._arrive)

    def _late_s(self, commands: Sequence[Sequence[bytes]]) -> float:
        """Draw by how much commands are late."""
        world, rate = self.world, self.world.faults.late_send
        if world.mix.rewinds and any(PUBLISH in words[:2] for words in commands):
            rate *= PUBLISH_FACTOR
        if not (world.may_hurt(self.client) and world.faults.happens("late send", rate, world)):
            return 0.0
        late_s = world.rng.uniform(0.0, LATEST_SEND_S)
        world.note(f"commands to Redis from {_name(commands[0])} on are {late_s:.1f} s late")
        return late_s

    async def receive(self) -> Any:
        """Return the next reply; errors are returned too. Raises `RedisConnectionError` after an end."""
        while not self.replies:
            if self.broken:
                raise RedisConnectionError("Connection closed by server.")
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self.replies.popleft()

    def close(self) -> None:
        """Close the connection at the client; what it sent still arrives."""
        self.broken = True
        self.world.at(WORLD, self.world.now_s() + self.world.way_s(), self._forget)

    # ------------------------------------------------------------------ the server

    def _arrive(self) -> None:
        commands, cut_at = self._sent.popleft()
        if not self.closed:
            self._commands.extend((words, at == cut_at) for at, words in enumerate(commands))
            if cut_at == len(commands):
                self._commands.append(((), True))
            if not self._busy:
                self._work()

    def _work(self) -> None:
        self._busy, world, replies = False, self.world, list[Any]()
        while self._commands and not self.closed:
            words, cut = self._commands.popleft()
            if cut:
                world.note(f"the connection of {self.client} is cut before {_name(words)}")
                self._reply(replies)
                self.cut()
                return
            self._busy = True
            reply = self.server.execute(self, words)
            world.note(_describe, self.client, words, reply)
            if reply is WAITS:
                break
            self._busy = False
            replies.append(reply)
            if self._commands and world.rng.random() < PAUSES:
                self._busy = True
                world.at(self.server.node, world.now_s() + world.way_s(), self._work)
                break
        self._reply(replies)

    def answer(self, reply: Any) -> None:
        """Answer the command that blocks the connection, and go on with the next."""
        if not self.closed:
            self._reply([reply])
            self._work()

    def push(self, news: Any) -> None:
        """Send what the client did not ask for."""
        if not self.closed:
            self._answer_in(self.world.way_s(), news)

    def _reply(self, replies: Sequence[Any]) -> None:
        """Send the replies of one turn together, as a server does: each may be late, with all behind it."""
        world, after_s = self.world, self.world.way_s()
        for reply in replies:
            if world.may_hurt(self.client) and world.faults.happens("late", world.faults.late, world):
                late_s = world.rng.uniform(0.0, LATEST_S)
                world.note(f"a reply to {self.client} is {late_s:.1f} s late")
                after_s += late_s
            self._answer_in(after_s, reply)

    def cut(self) -> None:
        """End the connection; the client notices a little later."""
        self._forget()
        self._answer_in(self.world.way_s(), END)

    def _forget(self) -> None:
        self.closed = True
        if self in self.server.links:
            self.server.links.remove(self)

    # ------------------------------------------------------------------ replies on their way

    def _answer_in(self, after_s: float, reply: Any) -> None:
        arrives_s = self.world.now_s() + after_s
        if self._answered and arrives_s <= self._answers_s:  # it comes with the reply before it
            self._answered[-1].append(reply)
            return
        self._answers_s = arrives_s
        self._answered.append([reply])
        self.world.at(WORLD, arrives_s, self._deliver)

    def _deliver(self) -> None:
        replies = self._answered.popleft()
        if self.broken:
            return
        self.broken = replies[-1] is END
        self.replies.extend(replies[:-1] if self.broken else replies)
        if self._reader and not self._reader.done():
            self._reader.set_result(None)


def record_of(arguments: Sequence[bytes]) -> bytes:
    """Return the ledger record among the arguments of a function."""
    return next((argument for argument in arguments if RECORD_TYPE.search(argument)), b"")


def _describe(client: Node, words: Sequence[bytes], reply: Any) -> str:
    return f"{client}: {_name(words)} -> {_short(reply)}"


def _name(words: Sequence[bytes]) -> str:
    """Name a command for the trace: its key or its run, and a ledger record."""
    if not words:
        return "its end"
    if words[0] == b"FCALL":
        shown = [words[1], *words[3:4]]
        if words[1] in RECORDS:
            shown.append(record_of(words[3 + int(words[2]) :]))
    else:
        shown = list(words[:2])
    return " ".join(repr(bytes(word[:60]))[2:-1] for word in shown)


def _short(reply: Any) -> str:
    if isinstance(reply, (list, int, bytes, str, Exception)) or reply is None:
        return repr(reply)[:60]
    return type(reply).__name__
