"""A modelled server with a replica: waits for it, and is promoted with a history that lacks what was not replicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from tests.simulation.redis_model.link import WAITS, Link
from tests.simulation.redis_model.server import RedisServer
from tests.simulation.world import World

DOWN_AFTER_S = 1.0
"""A server that is silent for so long counts as down."""
LONGEST_VOTE_S = 1.0
"""How long a replica takes to be promoted after that."""
LOOK_EVERY_S = 0.1
LONGEST_LINK_S = 1.0
"""How long a replica takes to follow a primary."""
LONGEST_STREAM_S, SLOWEST_STREAM_S = 0.01, 3.0
"""How long a write takes to the replica, and how long if it is slow."""
STREAM_EVERY_S = 0.3
"""So often the replica has all writes for which nobody waits."""
INFO = (
    "# Server\r\nredis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.2\r\nserver_mode:{mode}\r\n"
    "redis_mode:{mode}\r\nrun_id:{id}\r\nuptime_in_seconds:{up_s}\r\n"
    "# Replication\r\nrole:{role}\r\nconnected_slaves:{replicas}\r\n{replica}master_replid:{id}\r\n"
    "master_replid2:{former:040x}\r\n"
    "# Memory\r\nused_memory:1000000\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n"
)


class ReplicatedServer(RedisServer):
    """One of a primary and its replica. `linked`: its replica has all that it had at some moment."""

    mode = "standalone"

    def __init__(self, world: World, *, fsync: str, address: tuple[str, int], is_primary: bool) -> None:
        self.linked, self.promoted = True, False
        self._is_primary = is_primary
        self._links_at_s: float | None = None
        super().__init__(world, fsync=fsync, address=address, followed=True)

    @property
    def is_primary(self) -> bool:
        """Whether this server believes to be the primary."""
        return self._is_primary

    @property
    def running(self) -> bool:
        """Whether others hear of this server."""
        return not (self.node.dead or self.node.stopped)

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start a process on what is on the disk; no replica follows it yet."""
        again = self._starts > 0
        super().start()
        self._started_s = self.world.now_s()
        self.world.at(self.node, self._started_s + STREAM_EVERY_S, self._stream_again)
        if again:
            self.linked = self.promoted = False

    def become_replica(self) -> None:
        """Follow the new primary, which sends everything: drop what is here."""
        self.world.note("becomes a replica", node=self.node)
        self._is_primary = self.linked = self.promoted = False
        self.values.load({})

    def take_over_from(self, former: ReplicatedServer) -> bool:
        """Become the primary, unless this replica cannot; it lacks what was not replicated."""
        if not former.linked or not self.running or former.replaced:
            return False
        lacking = former.values.unreplicated
        self.world.note(f"is promoted without {lacking} writes", node=self.node)
        self.values.load(former.values.copy(lacking))
        self.take_library(former)
        self._is_primary = self.promoted = True
        self.linked = former.linked = False  # a former primary that goes on has nobody who confirms its writes
        return True

    def link(self, replica: ReplicatedServer, *, known: bool) -> None:
        """Let a replica follow a little after both know each other."""
        now_s = self.world.now_s()
        if not self.running:
            self.linked = self.linked and replica.running  # a replica that ended too may lack what it confirmed
        elif not (known and replica.running):
            self.linked, self._links_at_s = False, None
        elif not self.linked:
            if self._links_at_s is None:
                self._links_at_s = now_s + self.world.rng.uniform(0.1, LONGEST_LINK_S)
            if now_s >= self._links_at_s:
                self.linked, self._links_at_s = True, None
                self.values.replicated(self.values.written)

    # ------------------------------------------------------------------ commands

    def execute(self, link: Link, words: Sequence[bytes]) -> Any:
        """Run a command; a replica takes no writes, and does not wait."""
        name = words[0].upper()
        if name in (b"WAIT", b"WAITAOF") and not self.is_primary:
            return ResponseError(f"{name.decode()} cannot be used with replica instances.")
        if name == b"WAIT":
            return self._wait_for_replica(link, int(words[1]), int(words[2]))
        if name == b"ROLE":
            return [b"master", 14, []] if self.is_primary else [b"slave", b"", 0, b"connected", 14]
        return super().execute(link, words)

    def info(self) -> str:
        """Return what the server says of itself."""
        replica = f"slave0:ip={self._host},port={self._port},state=online,offset=14,lag=0\r\n"
        return INFO.format(
            mode=self.mode,
            id=self._id.decode(),
            up_s=int(self.world.now_s() - self._started_s),
            role="master" if self.is_primary else "slave",
            replicas=int(self.linked),
            replica=replica if self.linked else "",
            former=9 * self.promoted,
        )

    def _wait_for_replica(self, link: Link, count: int, timeout_ms: int) -> Any:
        self.values.commit()
        world, through = self.world, self.values.written
        if count == 0 or (count == 1 and self.linked and not self.values.unreplicated):
            return int(self.linked)
        slow = world.faults.happens("slow replica", world.faults.slow_sync, world)
        takes_s = world.rng.uniform(0.0, SLOWEST_STREAM_S if slow else LONGEST_STREAM_S)
        ends_s = world.now_s() + timeout_ms / 1000
        at_s = min(world.now_s() + takes_s, ends_s)
        world.at(self.node, at_s, self._confirm, link, through if takes_s * 1000 < timeout_ms else 0, ends_s)
        return WAITS

    def _confirm(self, link: Link, through: int, ends_s: float) -> None:
        """Let the replica confirm its first `through` writes, if it still follows."""
        if through and self.linked and self.is_primary:
            self.values.replicated(through)
            link.answer(1)
        else:
            self.world.at(self.node, max(ends_s, self.world.now_s()), link.answer, 0)

    def settle_writes(self) -> None:
        """Let disk and replica have all writes, as an operator does between two steps."""
        self.values.commit()
        self.values.synced(self.values.written)
        if self.linked:
            self.values.replicated(self.values.written)

    def _stream_again(self) -> None:
        if self.linked and self.is_primary:
            self.values.replicated(self.values.written)
        self.world.at(self.node, self.world.now_s() + STREAM_EVERY_S, self._stream_again)
