"""A modelled server with replicas: waits for them, and one is promoted without what it did not get."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from tests.simulation.redis_model.link import WAITS, Link
from tests.simulation.redis_model.server import RedisServer
from tests.simulation.redis_model.values import Saved
from tests.simulation.world import World

DOWN_AFTER_S = 1.0
"""A server that is silent for so long counts as down."""
LONGEST_VOTE_S = 1.0
"""How long a replica takes to be promoted after that."""
LOOK_EVERY_S = 0.1
LONGEST_LINK_S, SLOWEST_LINK_S = 1.0, 6.0
"""How long a replica takes to follow a primary, and how long if it is slow."""
SLOW_LINKS = 0.2
"""Share of links of two replicas that are slow: the other one confirms writes meanwhile."""
LONGEST_STREAM_S, SLOWEST_STREAM_S = 0.01, 3.0
"""How long a write takes to a replica, and how long if it is slow."""
STREAM_EVERY_S = 0.3
"""So often each replica has all writes for which nobody waits."""
INFO = (
    "# Server\r\nredis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.2\r\nserver_mode:{mode}\r\n"
    "redis_mode:{mode}\r\nrun_id:{id}\r\nuptime_in_seconds:{up_s}\r\n"
    "# Replication\r\nrole:{role}\r\nconnected_slaves:{count}\r\n{replicas}master_replid:{id}\r\n"
    "master_replid2:{former:040x}\r\n"
    "# Memory\r\nused_memory:1000000\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n"
)


@dataclasses.dataclass
class Wait:
    """A WAIT of a connection for `count` replicas: how many have confirmed, and how many have yet to answer."""

    link: Link
    through: int
    count: int
    ends_s: float
    confirmed: int
    left: int


class ReplicatedServer(RedisServer):
    """One of a primary and its replicas.

    - `peers`: the others. A list by peer is in their order
    - `confirming`: how many replicas confirm a write before its client gets an answer
    - `linked`: by peer, whether it follows this primary, and has all that it had at some moment
    - `_older`: by peer, what one has that followed this server until its crash and does not follow it again yet
    """

    mode = "standalone"

    def __init__(
        self,
        world: World,
        *,
        fsync: str,
        address: tuple[str, int],
        is_primary: bool,
        replicas: int = 1,
        confirming: int = 1,
    ) -> None:
        self.peers: Sequence[ReplicatedServer] = ()
        self.confirming, self.promoted = confirming, False
        self.linked = [True] * replicas
        self._older: dict[int, Saved] = {}
        self._is_primary = is_primary
        self._links_at_s: dict[int, float] = {}
        super().__init__(world, fsync=fsync, address=address, replicas=replicas)

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
            self.promoted = False

    def crash(self) -> None:
        """End the process at once. Its replicas keep what they have, also what is not on its disk."""
        self._older |= {at: self._held_by(at) for at in self._complete()}
        self._unlink()
        super().crash()

    def replace(self, held: Saved) -> Saved:
        """Let another server answer that holds this: no replica follows it."""
        self._older = {}
        self._unlink()
        return super().replace(held)

    def become_replica(self) -> None:
        """Follow the new primary, which sends everything: drop what is here."""
        self.world.note("becomes a replica", node=self.node)
        self._is_primary = self.promoted = False
        self._older = {}
        self._unlink()
        self.values.load({})

    def _unlink(self) -> None:
        self.linked, self._links_at_s = [False] * len(self.linked), {}

    # ------------------------------------------------------------------ failover

    def _complete(self) -> list[int]:
        """List the linked replicas that have all writes that were confirmed to clients."""
        confirmed = sorted(self.values.replicated, reverse=True)[self.confirming - 1]
        return [at for at, through in enumerate(self.values.replicated) if self.linked[at] and through >= confirmed]

    def _held_by(self, replica: int) -> Saved:
        return self.values.copy(self.values.unreplicated(replica))

    def promote_replica(self) -> ReplicatedServer | None:
        """Let a replica take over, without what it did not get; None while there is none that can.

        A restarted server begins a history with low offsets. A replica that does not follow it again has the higher one
        and goes first.
        """
        older = [at for at in self._older if self.peers[at].running]
        able = older or [at for at in self._complete() if self.peers[at].running]
        if not able or self.replaced:
            return None
        at = able[0] if len(able) == 1 else self.world.rng.choice(able)
        held = self._older[at] if older else self._held_by(at)
        self._older = {}
        self._unlink()  # a former primary that goes on has nobody who confirms its writes
        self.peers[at]._take_over(self, held)
        return self.peers[at]

    def _take_over(self, primary: ReplicatedServer, held: Saved) -> None:
        self.world.note("is promoted", node=self.node)
        self.values.load(held)
        self.take_library(primary)
        self._is_primary = self.promoted = True
        self._older = {}
        self._unlink()

    def link(self, replica: int, *, known: bool) -> None:
        """Let a replica follow a little after both know each other."""
        now_s, running = self.world.now_s(), self.peers[replica].running
        if not running:
            self._older.pop(replica, None)
        if not self.running:
            # A replica that ended too may lack what it confirmed.
            self.linked[replica] = self.linked[replica] and running
        elif not (known and running):
            self.linked[replica] = False
            self._links_at_s.pop(replica, None)
        elif not self.linked[replica]:
            links_at_s = self._links_at_s.get(replica)
            if links_at_s is None:
                slow = len(self.peers) > 1 and self.world.faults.happens("slow link", SLOW_LINKS, self.world)
                after_s = self.world.rng.uniform(0.1, SLOWEST_LINK_S if slow else LONGEST_LINK_S)
                links_at_s = self._links_at_s[replica] = now_s + after_s
            if now_s >= links_at_s:
                self._follow(replica)

    def _follow(self, replica: int) -> None:
        """Let a replica have all that is here."""
        self.linked[replica] = True
        self._links_at_s.pop(replica, None)
        self._older.pop(replica, None)
        self.values.replicate(replica, self.values.written)

    # ------------------------------------------------------------------ commands

    def execute(self, link: Link, words: Sequence[bytes]) -> Any:
        """Run a command; a replica takes no writes, and does not wait."""
        name = words[0].upper()
        if name in (b"WAIT", b"WAITAOF") and not self.is_primary:
            return ResponseError(f"{name.decode()} cannot be used with replica instances.")
        if name == b"WAIT":
            return self._wait_for_replicas(link, int(words[1]), int(words[2]))
        if name == b"ROLE":
            return [b"master", 14, []] if self.is_primary else [b"slave", b"", 0, b"connected", 14]
        return super().execute(link, words)

    def info(self) -> str:
        """Return what the server says of itself."""
        lines = [
            f"slave{number}:ip={peer._host},port={peer._port},state=online,offset=14,lag=0\r\n"
            for number, peer in enumerate(peer for at, peer in enumerate(self.peers) if self.linked[at])
        ]
        return INFO.format(
            mode=self.mode,
            id=self._id.decode(),
            up_s=int(self.world.now_s() - self._started_s),
            role="master" if self.is_primary else "slave",
            count=len(lines),
            replicas="".join(lines),
            former=9 * self.promoted,
        )

    def _wait_for_replicas(self, link: Link, count: int, timeout_ms: int) -> Any:
        self.values.commit()
        world, through = self.world, self.values.written
        lacking = [at for at, linked in enumerate(self.linked) if not linked or self.values.unreplicated(at)]
        confirmed = len(self.linked) - len(lacking)
        if confirmed >= count:
            return confirmed
        ends_s = world.now_s() + timeout_ms / 1000
        wait = Wait(link, through, count, ends_s, confirmed, len(lacking))
        for at in lacking:
            slow = world.faults.happens("slow replica", world.faults.slow_sync, world)
            takes_s = world.rng.uniform(0.0, SLOWEST_STREAM_S if slow else LONGEST_STREAM_S)
            in_time = takes_s * 1000 < timeout_ms
            world.at(self.node, min(world.now_s() + takes_s, ends_s), self._confirm, wait, at, in_time)
        return WAITS

    def _confirm(self, wait: Wait, replica: int, in_time: bool) -> None:
        """Let a replica confirm the writes before a WAIT, if it still follows, and answer when enough have."""
        wait.left -= 1
        if in_time and self.linked[replica] and self.is_primary:
            self.values.replicate(replica, wait.through)
            wait.confirmed += 1
            if wait.confirmed == wait.count:
                wait.link.answer(wait.confirmed)
        if not wait.left and wait.confirmed < wait.count:
            at_s = max(wait.ends_s, self.world.now_s())
            self.world.at(self.node, at_s, wait.link.answer, wait.confirmed)

    def settle_writes(self) -> None:
        """Let disk and replicas have all writes, as an operator does between two steps."""
        self.values.commit()
        self.values.synced(self.values.written)
        self._older = {}
        for at, linked in enumerate(self.linked):
            if linked:
                self.values.replicate(at, self.values.written)

    def _stream_again(self) -> None:
        for at, linked in enumerate(self.linked):
            if linked and self.is_primary:
                self.values.replicate(at, self.values.written)
        self.world.at(self.node, self.world.now_s() + STREAM_EVERY_S, self._stream_again)


def introduce(servers: Sequence[ReplicatedServer]) -> None:
    """Let the primary and the replicas of one shard know each other."""
    for server in servers:
        server.peers = [peer for peer in servers if peer is not server]
