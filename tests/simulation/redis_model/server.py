"""A modelled Redis server: runs commands, syncs its disk, crashes, and comes back with what was on the disk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError, ResponseError

from replaybuf.store import keys
from replaybuf.store.redis.durability import STRICT
from replaybuf.store.redis.server import LIBRARY_CODE
from tests.simulation.loop import Node
from tests.simulation.redis_model.commands import COMMANDS, GROWING
from tests.simulation.redis_model.functions import Functions
from tests.simulation.redis_model.link import RECORDS, WAITS, Link, record_of
from tests.simulation.redis_model.stream_commands import read_new
from tests.simulation.redis_model.values import NoModel, Saved, Values
from tests.simulation.world import EPOCH_S, World

LED = {name.encode() for name in re.findall(r"'(rb_\w+)', led\(", LIBRARY_CODE)}
"""Functions that only the newest leader may call."""
READ_ENDS, LOST = b"rb_ends", keys.guarded("").index(keys.lost(""))
"""The function that each reader calls, and where it gets the only one of its keys that may end by itself."""
REFUSED_WHEN_FULL = {b"FCALL", b"rb_restore", b"FUNCTION", b"LOAD"}
"""Calls that a full server refuses: of the one function that does not allow it, and to load a library."""
TRANSACTION = (b"MULTI", b"EXEC")
SYNC_EVERY_S = 1.0
LONGEST_SYNC_S, SLOWEST_SYNC_S = 0.01, 3.0
LATEST_NEWS_S = 1.5
TELLING = re.compile(rb"\xa4type[\xa1-\xbf](?:ATTACH|REWIND|CONFIG)")
"""Ledger records that change what a follower may do: news of them are late more often."""
TELLING_FACTOR, MOST_LATE = 5, 0.5
INFO = (
    "# Server\r\nredis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.2\r\nserver_mode:standalone\r\n"
    "redis_mode:standalone\r\nrun_id:{id}\r\n"
    "# Replication\r\nrole:master\r\nconnected_slaves:0\r\nmaster_replid:{id}\r\n"
    "# Memory\r\nused_memory:1000000\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n"
)
SETTINGS = {
    b"cluster-node-timeout": b"1000",
    b"appendonly": b"yes",
    b"no-appendfsync-on-rewrite": b"no",
    b"maxmemory-policy": b"noeviction",
}


class RedisServer:
    """One server. `fsync`: its `appendfsync`, `always` or `everysec`. `damage` changes the library as it is loaded."""

    def __init__(
        self, world: World, *, fsync: str, address: tuple[str, int] = ("redis", 6379), replicas: int = 0
    ) -> None:
        self.world, self.fsync = world, fsync
        self.policy = STRICT
        self._host, self._port = address
        self.url = f"redis://{self._host}:{self._port}/0"
        world.network[address] = self
        self.wall_ahead_s = 0.0
        self.values = Values(self._now_ms, replicas=replicas)
        self.links: list[Link] = []
        self.records: dict[bytes, dict[int, tuple[bytes, bytes]]] = {}
        """By ledger and entry: the newest record that was written there, and the newest group that it noted."""
        self._code = ""
        self._blocked: list[tuple[Link, Sequence[bytes]]] = []
        self._starts = 0
        self.full = False
        """Whether it refuses commands that need memory."""
        self.replaced = False
        """Whether a replica with a shorter history answers."""
        self.start()

    def _now_ms(self) -> int:
        return int(1000 * (EPOCH_S + self.world.now_s() + self.wall_ahead_s))

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start a process on what is on the disk."""
        self._starts += 1
        self.node = Node(f"{self._host}{self._starts}")
        self._id = b"%040x" % (1000 * self._port + self._starts)
        self._functions = Functions(self._code, self._call) if self._code else None
        self._ends, self._ends_at = dict[tuple[bytes, ...], Any](), -1
        self._blocked = []
        if self.fsync == "everysec":
            self.world.at(self.node, self.world.now_s() + SYNC_EVERY_S, self._sync_again)

    def crash(self) -> None:
        """End the process at once: unsynced writes may be lost, from some point on."""
        lost = self.world.rng.randint(0, self.values.unsynced)
        self.world.note(f"crash, {lost} of {self.values.unsynced} unsynced writes are lost", node=self.node)
        self.node.dead = True
        self.values.lose(lost)
        for link in list(self.links):
            link.cut()

    def info(self) -> str:
        """Return what the server says of itself."""
        return INFO.format(id=self._id.decode())

    def take_library(self, primary: RedisServer) -> None:
        """Get the functions of a primary, as its replica does."""
        self._code = primary._code
        self._functions = Functions(self._code, self._call) if self._code else None
        self._ends.clear()

    # ------------------------------------------------------------------ for the world

    def server_of(self, key: str) -> RedisServer:
        """Return the server of a key."""
        return self

    def pick(self) -> RedisServer:
        """Draw a server to hurt."""
        return self

    @property
    def healthy(self) -> bool:
        """Whether the right server runs."""
        return not (self.node.dead or self.node.stopped or self.replaced)

    def take_over(self, held: Saved) -> Saved:
        """Let a replica with a shorter history answer, or the right server again; return what the former one held."""
        self.replaced = not self.replaced
        return self.replace(held)

    def replace(self, held: Saved) -> Saved:
        """Let another server answer that holds this; return what the former one held. All of it counts as synced."""
        self.world.note("another server takes over", node=self.node)
        self.node.dead = True
        for link in list(self.links):
            link.cut()
        former = self.values.copy()
        self.values.load(held)
        self.start()
        return former

    # ------------------------------------------------------------------ commands

    def execute(self, link: Link, words: Sequence[bytes]) -> Any:
        """Run a command of a connection; return its reply, an error to send, or `WAITS`."""
        name = words[0].upper()
        try:
            if self.full and (name in GROWING or REFUSED_WHEN_FULL.issuperset(words[:2])):
                raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
            if name in TRANSACTION or link.queued is not None:
                reply = self._queue(link, name, words)
            elif name == b"FCALL":
                reply = self._read_ends(words) if words[1] == READ_ENDS else self._fcall(words)
            elif name == b"XREAD":
                reply = self._read(link, words)
            elif name == b"WAITAOF":
                reply = self._wait(link, int(words[1]), int(words[3]))
            else:
                reply = self._call(words)
        except ResponseError as error:
            reply = error
        if self.values.commit():
            if self.fsync == "always":
                self.values.synced(self.values.written)
            self._wake()
        return reply

    def _queue(self, link: Link, name: bytes, words: Sequence[bytes]) -> Any:
        """Begin a transaction, queue a command of it, or run all of them."""
        queued = link.queued
        if name == b"MULTI":
            link.queued = []
            return b"OK"
        if queued is None:
            raise ResponseError("EXEC without MULTI")
        if name != b"EXEC":
            queued.append(words)
            return b"QUEUED"
        link.queued = None
        return [self._call(command) for command in queued]

    def _call(self, words: Sequence[bytes]) -> Any:
        if command := COMMANDS.get(words[0]):
            return command(self.values, words[1:])
        name = words[0].upper()
        if command := COMMANDS.get(name):
            return command(self.values, words[1:])
        if name == b"INFO":
            return self.info().encode()
        if name == b"CONFIG" and words[1].upper() == b"GET":
            settings = SETTINGS | {b"appendfsync": self.fsync.encode()}
            return {word: settings[word] for word in words[2:] if word in settings}
        if name == b"FUNCTION" and words[1].upper() == b"LIST":
            return [{b"library_name": b"replaybuf1", b"library_code": self._code.encode()}] if self._code else []
        if name == b"FUNCTION" and words[1].upper() == b"LOAD":
            self._code = words[-1].decode()
            self._functions = Functions(self._code, self._call)
            self._ends.clear()
            return b"replaybuf1"
        raise NoModel(f"the model of Redis lacks the command {b' '.join(words[:2]).decode(errors='replace')}")

    def _read_ends(self, words: Sequence[bytes]) -> Any:
        """Run the function that each reader calls. The same call has the same reply until a key changes."""
        values = self.values
        if values.changes != self._ends_at or values.end_of(words[3 + LOST]) is not None:
            self._ends.clear()
        call = tuple(words)
        reply = self._ends.get(call)
        if reply is None:
            reply = self._ends[call] = self._fcall(words)
            self._ends_at = values.changes
        return reply

    def _fcall(self, words: Sequence[bytes]) -> Any:
        if self._functions is None:
            raise ResponseError("Function not found")
        count = int(words[2])
        names, arguments = words[3 : 3 + count], words[3 + count :]
        fence = self.values.get(names[0], bytes) if words[1] in LED else None
        reply = self._functions.run(words[1], names, arguments)
        if words[1] in RECORDS and reply[0] == b"ok":
            self._note_record(names[0], arguments, reply[1])
        if words[1] in LED and reply[0] == b"ok" and arguments[0] != fence:
            self.world.wrong.append(f"{words[1].decode()} of a former leader, {arguments[0].decode()}, was executed")
        return reply

    def _note_record(self, fence: bytes, arguments: Sequence[bytes], detail: bytes) -> None:
        record = record_of(arguments)
        self.world.coverage.add_record(record, len(self.world.faults.happened))
        number = int(arguments[arguments.index(record) - 1])
        self.records.setdefault(fence, {})[number] = record, detail.partition(b" ")[2]

    # ------------------------------------------------------------------ blocking commands

    def _read(self, link: Link, words: Sequence[bytes]) -> Any:
        found = read_new(self.values, words[1:])
        upper = [word.upper() for word in words]
        if b"BLOCK" not in upper:
            return found
        if found:
            self._send_news(link, found)
            return WAITS
        entry = (link, words)
        self._blocked.append(entry)
        after_s = int(words[upper.index(b"BLOCK") + 1]) / 1000
        self.world.at(self.node, self.world.now_s() + after_s, self._give_up, entry)
        return WAITS

    def _give_up(self, entry: tuple[Link, Sequence[bytes]]) -> None:
        for at, blocked in enumerate(self._blocked):
            if blocked is entry:
                del self._blocked[at]
                entry[0].answer(None)

    def _wake(self) -> None:
        """Answer blocked reads that have something to read now."""
        for entry in list(self._blocked):
            link, words = entry
            if link.closed:
                self._blocked.remove(entry)
            elif found := read_new(self.values, words[1:]):
                self._blocked.remove(entry)
                self._send_news(link, found)

    def _send_news(self, link: Link, news: Any) -> None:
        """Answer a read of new entries, late at times: until then a follower knows nothing of them."""
        world, late_s = self.world, 0.0
        tells = any(TELLING.search(word) for entries in news.values() for _, words in entries for word in words)
        rate = min(MOST_LATE, world.faults.late_news * (TELLING_FACTOR if tells else 1))
        if world.faults.happens("late news", rate, world):
            late_s = world.rng.uniform(0.0, LATEST_NEWS_S)
        world.at(self.node, world.now_s() + late_s, link.answer, news)

    # ------------------------------------------------------------------ the disk

    def _wait(self, link: Link, local: int, timeout_ms: int) -> Any:
        self.values.commit()
        if not local or not self.values.unsynced:
            return [1, 0]
        world, through = self.world, self.values.written
        slow = world.faults.happens("slow sync", world.faults.slow_sync, world)
        takes_s = world.rng.uniform(0.0, SLOWEST_SYNC_S if slow else LONGEST_SYNC_S)
        world.at(self.node, world.now_s() + takes_s, self.values.synced, through)
        in_time = not timeout_ms or takes_s <= timeout_ms / 1000
        after_s = takes_s if in_time else timeout_ms / 1000
        world.at(self.node, world.now_s() + after_s, link.answer, [int(in_time), 0])
        return WAITS

    def _sync_again(self) -> None:
        self.values.synced(self.values.written)
        self.world.at(self.node, self.world.now_s() + SYNC_EVERY_S, self._sync_again)
