"""One node of a modelled cluster: serves its slots, sends others away, and hears of changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import AskError, ClusterCrossSlotError, ClusterDownError, MovedError, ResponseError, TryAgainError

from tests.simulation.redis_model.commands import OK
from tests.simulation.redis_model.layout import SHARDS, Layout, address_of, keys_of, slot_of
from tests.simulation.redis_model.link import Link
from tests.simulation.redis_model.replicated import ReplicatedServer

if TYPE_CHECKING:
    from tests.simulation.redis_model.cluster import RedisCluster

UNUSABLE_S = 2.0
"""A primary that restarted waits so long for news of the cluster (`CLUSTER_WRITABLE_DELAY`)."""
HEARS_S = 0.5
"""Within this time a node hears of a change."""


class ClusterNode(ReplicatedServer):
    """A node. `layout`: what it knows of the cluster."""

    mode = "cluster"

    def __init__(self, cluster: RedisCluster, number: int) -> None:
        self.cluster, self.number = cluster, number
        self.layout = cluster.layout
        self.leaving: dict[int, ClusterNode] = {}
        """Slots on their way to another node (MIGRATING)."""
        self.coming: dict[int, ClusterNode] = {}
        """Slots on their way to this node (IMPORTING)."""
        self._usable_at_s = 0.0
        mix = cluster.world.mix
        super().__init__(
            cluster.world,
            fsync=cluster.fsync,
            address=address_of(number),
            is_primary=self.is_primary,
            replicas=mix.replicas,
            confirming=mix.confirming,
        )
        self.records = cluster.records

    @property
    def is_primary(self) -> bool:
        """Whether this node believes to be the primary of its shard."""
        return self.layout.is_primary(self.number)

    @property
    def healthy(self) -> bool:
        """Whether the right server runs, and has its slots: one on its way stays there until the server is right."""
        return super().healthy and not (self.leaving or self.coming)

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start a process on what is on the disk. It hears later what changed while it was away."""
        again = self._starts > 0
        super().start()
        if again:
            self._usable_at_s = self.world.now_s() + UNUSABLE_S
            self.hear(self.cluster.layout)

    def hear(self, layout: Layout) -> None:
        """Let the node learn of a change a little later."""
        self.world.at(self.node, self.world.now_s() + self.world.rng.uniform(0.01, HEARS_S), self.learn, layout)

    def learn(self, layout: Layout) -> None:
        """Follow a newer layout. A former primary drops what it holds: its successor sends it everything."""
        if layout.version <= self.layout.version:
            return
        was_primary, self.layout = self.is_primary, layout
        own = self.number % SHARDS if self.is_primary else None
        self.leaving = {slot: target for slot, target in self.leaving.items() if layout.shard_of(slot) == own}
        self.coming = {slot: source for slot, source in self.coming.items() if own not in (None, layout.shard_of(slot))}
        if was_primary and not self.is_primary:
            self.become_replica()
        for entry in list(self._blocked):
            if error := self._redirect(entry[1], asking=False):
                self._blocked.remove(entry)
                entry[0].answer(error)

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


def _where(slot: int, number: int) -> str:
    host, port = address_of(number)
    return f"{slot} {host}:{port}"


def _try_again() -> TryAgainError:
    return TryAgainError("Multiple keys request during rehashing of slot", status_code="TRYAGAIN")
