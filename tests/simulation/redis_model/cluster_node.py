"""One node of a modelled cluster: serves its slots, sends others away, waits for its replica, and hears of changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import AskError, ClusterCrossSlotError, ClusterDownError, MovedError, ResponseError, TryAgainError

from tests.simulation.redis_model.commands import OK
from tests.simulation.redis_model.layout import SHARDS, Layout, address_of, id_of, keys_of, slot_of
from tests.simulation.redis_model.link import WAITS, Link
from tests.simulation.redis_model.server import RedisServer

if TYPE_CHECKING:
    from tests.simulation.redis_model.cluster import RedisCluster

NODE_TIMEOUT_S = 1.0
UNUSABLE_S = 2.0
"""A primary that restarted waits so long for news of the cluster (`CLUSTER_WRITABLE_DELAY`)."""
HEARS_S = 0.5
"""Within this time a node hears of a change."""
LONGEST_STREAM_S, SLOWEST_STREAM_S = 0.01, 3.0
"""How long a write takes to the replica, and how long if it is slow."""
STREAM_EVERY_S = 0.3
"""So often the replica has all writes for which nobody waits."""
INFO = (
    "# Server\r\nredis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.2\r\nserver_mode:cluster\r\n"
    "redis_mode:cluster\r\nrun_id:{id}\r\nuptime_in_seconds:{up_s}\r\n"
    "# Replication\r\nrole:{role}\r\nconnected_slaves:{replicas}\r\n{replica}master_replid:{id}\r\n"
    "master_replid2:{former}\r\n"
    "# Memory\r\nused_memory:1000000\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n"
)


class ClusterNode(RedisServer):
    """A node. `layout`: what it knows of the cluster; `linked`: its replica has all that it had at some moment."""

    def __init__(self, cluster: RedisCluster, number: int) -> None:
        self.cluster, self.number = cluster, number
        self.layout = cluster.layout
        self.leaving: dict[int, ClusterNode] = {}
        """Slots on their way to another node (MIGRATING)."""
        self.coming: dict[int, ClusterNode] = {}
        """Slots on their way to this node (IMPORTING)."""
        self.linked = True
        self.promoted = False
        self._usable_at_s = 0.0
        super().__init__(cluster.world, fsync=cluster.fsync, address=address_of(number), followed=True)
        self.records = cluster.records

    @property
    def is_primary(self) -> bool:
        """Whether this node believes to be the primary of its shard."""
        return self.layout.is_primary(self.number)

    @property
    def running(self) -> bool:
        """Whether others hear of this node."""
        return not (self.node.dead or self.node.stopped)

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start a process on what is on the disk. It hears later what changed while it was away."""
        now_s, again = self.world.now_s(), self._starts > 0
        super().start()
        self._started_s = now_s
        self.world.at(self.node, now_s + STREAM_EVERY_S, self._stream_again)
        if again:
            self.linked = self.promoted = False
            self._usable_at_s = now_s + UNUSABLE_S
            self.hear(self.cluster.layout)

    def hear(self, layout: Layout) -> None:
        """Let the node learn of a change a little later."""
        self.world.at(self.node, self.world.now_s() + self.world.rng.uniform(0.01, HEARS_S), self.learn, layout)

    def learn(self, layout: Layout) -> None:
        """Follow a newer layout. A former primary drops what it holds: its successor sends it everything."""
        if layout.version <= self.layout.version:
            return
        was_primary, self.layout = self.is_primary, layout
        for slots in (self.leaving, self.coming):
            for slot in [slot for slot, other in slots.items() if not self._moves(slot, other)]:
                del slots[slot]
        if was_primary and not self.is_primary:
            self.world.note("becomes a replica", node=self.node)
            self.linked = self.promoted = False
            self.values.load({})
        for entry in list(self._blocked):
            if error := self._redirect(entry[1], asking=False):
                self._blocked.remove(entry)
                entry[0].answer(error)

    def _moves(self, slot: int, other: ClusterNode) -> bool:
        return self.is_primary and self.layout.shard_of(slot) in (self.number % SHARDS, other.number % SHARDS)

    # ------------------------------------------------------------------ commands

    def execute(self, link: Link, words: Sequence[bytes]) -> Any:
        """Run a command, unless another node has its keys."""
        asking, link.asking = link.asking, False
        name = words[0].upper()
        if name == b"ASKING":
            link.asking = True
            return OK
        if name == b"CLUSTER" and words[1].upper() == b"NODES":
            return self.layout.describe(self.number).encode()
        if name == b"WAIT":
            return self._wait_for_replica(link, int(words[1]), int(words[2]))
        if name == b"WAITAOF" and not self.is_primary:
            return ResponseError("WAITAOF cannot be used with replica instances.")
        return self._redirect(words, asking=asking) or super().execute(link, words)

    def _redirect(self, words: Sequence[bytes], *, asking: bool) -> ResponseError | None:
        """Return the error for a command whose keys are not here."""
        names = keys_of(words)
        if not names:
            return None
        slot = slot_of(names[0])
        if any(slot_of(name) != slot for name in names[1:]):
            return ClusterCrossSlotError("Keys in request don't hash to the same slot", status_code="CROSSSLOT")
        if self.world.now_s() < self._usable_at_s:
            return ClusterDownError("The cluster is down", status_code="CLUSTERDOWN")
        missing = sum(self.values.peek(name) is None for name in names) if self.leaving or self.coming else 0
        owner = self.layout.owner_of(slot)
        if owner == self.number:
            if slot not in self.leaving or not missing:
                return None
            if missing == len(names):
                return AskError(_where(slot, self.leaving[slot].number), status_code="ASK")
            return _try_again()
        if slot in self.coming and asking:
            return _try_again() if missing and len(names) > 1 else None
        return MovedError(_where(slot, owner), status_code="MOVED")

    def info(self) -> str:
        """Return what the node says of itself."""
        host, port = address_of(self.number)
        replica = f"slave0:ip={host},port={port},state=online,offset=14,lag=0\r\n"
        return INFO.format(
            id=self._id.decode(),
            up_s=int(self.world.now_s() - self._started_s),
            role="master" if self.is_primary else "slave",
            replicas=int(self.linked),
            replica=replica if self.linked else "",
            former=id_of(self.promoted * 9),
        )

    # ------------------------------------------------------------------ the replica

    def _wait_for_replica(self, link: Link, count: int, timeout_ms: int) -> Any:
        if not self.is_primary:
            return ResponseError("WAIT cannot be used with replica instances.")
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


def _where(slot: int, number: int) -> str:
    host, port = address_of(number)
    return f"{slot} {host}:{port}"


def _try_again() -> TryAgainError:
    return TryAgainError("Multiple keys request during rehashing of slot", status_code="TRYAGAIN")
