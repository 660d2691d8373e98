"""A modelled Redis Cluster: three primaries with one or two replicas each, failover, and slots that move."""

from __future__ import annotations

import asyncio
from typing import cast

from replaybuf.store import keys
from replaybuf.store.redis.durability import WritePolicy
from tests.simulation.loop import WORLD
from tests.simulation.redis_model.cluster_node import ClusterNode
from tests.simulation.redis_model.layout import SHARDS, Layout, address_of, slot_of
from tests.simulation.redis_model.replicated import DOWN_AFTER_S, LONGEST_VOTE_S, LOOK_EVERY_S, introduce
from tests.simulation.world import RUN, World

CONTROL_SHARE = 0.5
"""Share of faults that hurt the node of the main run's index and ledger."""
KEY_PAUSE_S = 0.02


class RedisCluster:
    """All nodes. `layout`: the newest; `records`: what was written to ledgers, as in `RedisServer`."""

    def __init__(self, world: World, *, fsync: str) -> None:
        self.world, self.fsync = world, fsync
        self.policy = WritePolicy(replicas=world.mix.confirming)
        self.url = "redis+cluster://" + ",".join(f"{host}:{port}" for host, port in map(address_of, range(SHARDS)))
        self.layout = Layout(replicas=world.mix.replicas)
        self.records: dict[bytes, dict[int, tuple[bytes, bytes]]] = {}
        self.nodes = [ClusterNode(self, number) for number in self.layout.nodes]
        for shard in range(SHARDS):
            introduce(self.nodes[shard::SHARDS])
        self._moving: set[int] = set()
        self._missed_since: dict[int, float] = {}
        self._promotes_at: dict[int, float] = {}
        self._look()

    # ------------------------------------------------------------------ for the world

    def server_of(self, key: str) -> ClusterNode:
        """Return the primary of a key."""
        return self.nodes[self.layout.owner_of(slot_of(key.encode()))]

    def pick(self) -> ClusterNode:
        """Draw a node to hurt."""
        if self.world.rng.random() < CONTROL_SHARE:
            return self.server_of(keys.counts(RUN))
        return self.world.rng.choice(self.nodes)

    def change(self, layout: Layout, *first: ClusterNode) -> None:
        """Change the cluster: some nodes know it at once, the others hear of it."""
        self.layout = layout
        for node in self.nodes:
            (node.learn if node in first else node.hear)(layout)

    # ------------------------------------------------------------------ failover

    def _look(self) -> None:
        """Look at all nodes, as they look at each other."""
        for node in self.nodes:
            self._look_at(node)
        for shard in range(SHARDS):
            primary = self.nodes[self.layout.primaries[shard]]
            for at, replica in enumerate(cast(list[ClusterNode], primary.peers)):
                known = all(node.layout.primaries[shard] == primary.number for node in (primary, replica))
                primary.link(at, known=known)
        self.world.at(WORLD, self.world.now_s() + LOOK_EVERY_S, self._look)

    def _look_at(self, node: ClusterNode) -> None:
        number, now_s, failed = node.number, self.world.now_s(), self.layout.failed
        if node.running:
            self._missed_since.pop(number, None)
            if number in failed:
                self.change(self.layout.mark_failed(failed - {number}))
            return
        since_s = self._missed_since.setdefault(number, now_s)
        if now_s < since_s + DOWN_AFTER_S or not self._has_majority:
            return
        if number not in failed:
            self._promotes_at[number] = now_s + self.world.rng.uniform(0.1, LONGEST_VOTE_S)
            self.change(self.layout.mark_failed(failed | {number}))
        elif self.layout.is_primary(number) and now_s >= self._promotes_at[number]:
            self._replace(node)

    def _replace(self, primary: ClusterNode) -> None:
        """Let a replica of a primary take over, if one can."""
        if successor := cast(ClusterNode | None, primary.promote_replica()):
            self.change(self.layout.promote(successor.number), successor)

    @property
    def _has_majority(self) -> bool:
        return 2 * sum(self.nodes[number].running for number in self.layout.primaries) > SHARDS

    # ------------------------------------------------------------------ slots

    async def move(self, slot: int) -> None:
        """Move a slot to another shard, key by key, as `valkey-cli --cluster reshard` does. An outage delays it."""
        if slot in self._moving:
            return  # an operator moves a slot to one place at a time
        self._moving.add(slot)
        own, rng = self.layout.shard_of(slot), self.world.rng
        other = rng.choice([shard for shard in range(SHARDS) if shard != own])

        def ends() -> tuple[ClusterNode, ClusterNode] | None:
            """Return source and target, which must both run; after a failover the operator begins again there."""
            source, target = (self.nodes[self.layout.primaries[shard]] for shard in (own, other))
            if not all(node.running and node.is_primary and not node.replaced for node in (source, target)):
                return None
            source.leaving[slot], target.coming[slot] = target, source
            return source, target

        while True:
            await asyncio.sleep(rng.uniform(0.0, KEY_PAUSE_S))
            if not (pair := ends()):
                continue
            source, target = pair
            names = sorted(key for key in source.values.names() if slot_of(key) == slot)
            if not names:
                break
            name = rng.choice(names)
            target.values.put(name, *source.values.take(name))
            for node in pair:
                node.settle_writes()
        self.change(self.layout.move(slot, other), source, target)
        self._moving.discard(slot)
