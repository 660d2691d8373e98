"""A modelled primary and its replicas that three sentinels watch: failover with a quorum, and none without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from replaybuf.store.redis.durability import WritePolicy
from tests.simulation.loop import WORLD, Node
from tests.simulation.redis_model.link import Link
from tests.simulation.redis_model.replicated import (
    DOWN_AFTER_S,
    LONGEST_VOTE_S,
    LOOK_EVERY_S,
    ReplicatedServer,
    introduce,
)
from tests.simulation.redis_model.values import NoModel
from tests.simulation.world import World

NAME = "main"
SENTINELS, QUORUM = 3, 2
ADDRESSES = ("redis-a", 6380), ("redis-b", 6381), ("redis-c", 6382)
HEARS_S = 0.8
"""Within this time a sentinel hears of a failover."""
DEMOTES_S = 2.0
"""A former primary that comes back takes writes until a sentinel makes it a replica, within this time."""


class Sentinel:
    """One sentinel: what it believes, and what it answers. It has the parts of a server that a `Link` needs."""

    def __init__(self, group: SentinelGroup, number: int) -> None:
        self.group, self.world = group, group.world
        self.node = Node(f"sentinel{number}")
        self.links: list[Link] = []
        self.primary, self.epoch = 0, 0
        self.down = self.failing_over = False
        self._listeners: list[Link] = []
        self.world.network[f"sentinel{number}", 26379] = self

    def execute(self, link: Link, words: Sequence[bytes]) -> Any:
        """Answer a question."""
        name = words[0].upper()
        if name == b"SUBSCRIBE":
            self._listeners.append(link)
            for channel in words[1:-1]:
                link.push([b"subscribe", channel, 1])
            return [b"subscribe", words[-1], 1]
        if name != b"SENTINEL":
            raise NoModel(f"a sentinel with {name.decode()}")
        host, port = ADDRESSES[self.primary]
        match words[1].upper():
            case b"GET-MASTER-ADDR-BY-NAME":
                return [host.encode(), b"%d" % port]
            case b"MASTER":
                return self._facts(host, port)
            case b"REPLICAS":
                replicas = self.group.servers[self.primary].peers
                return [{b"flags": b"slave" if replica.running else b"s_down,slave"} for replica in replicas]
        return ResponseError("Unknown subcommand")

    def _facts(self, host: str, port: int) -> dict[bytes, bytes]:
        flags = ["master"] + ["s_down"] * self.down + ["failover_in_progress"] * self.failing_over
        return {
            b"name": NAME.encode(),
            b"ip": host.encode(),
            b"port": b"%d" % port,
            b"flags": ",".join(flags).encode(),
            b"config-epoch": b"%d" % self.epoch,
            b"num-other-sentinels": b"%d" % (SENTINELS - 1),
            b"quorum": b"%d" % QUORUM,
            b"down-after-milliseconds": b"%d" % (1000 * DOWN_AFTER_S),
        }

    def learn(self, primary: int, epoch: int) -> None:
        """Hear of a failover."""
        self.primary, self.epoch, self.down, self.failing_over = primary, epoch, False, False
        self.publish(b"+switch-master")

    def publish(self, channel: bytes) -> None:
        """Say to all who listen what has happened."""
        self._listeners = [link for link in self._listeners if not link.closed]
        for link in self._listeners:
            link.push([b"message", channel, NAME.encode()])


class SentinelGroup:
    """All servers and sentinels. `primary`: the number of the true one; `records`: as in `RedisServer`."""

    def __init__(self, world: World, *, fsync: str) -> None:
        self.world, self.primary, self.epoch = world, 0, 0
        mix = world.mix
        self.policy = WritePolicy(replicas=mix.confirming)
        self.url = f"redis+sentinel://{','.join(f'sentinel{at}:26379' for at in range(SENTINELS))}/{NAME}"
        self.servers = [
            ReplicatedServer(
                world,
                fsync=fsync,
                address=address,
                is_primary=number == 0,
                replicas=mix.replicas,
                confirming=mix.confirming,
            )
            for number, address in enumerate(ADDRESSES[: 1 + mix.replicas])
        ]
        introduce(self.servers)
        self.records = self.servers[0].records
        for server in self.servers:
            server.records = self.records
        self.sentinels = [Sentinel(self, number) for number in range(SENTINELS)]
        self._missed_since_s: float | None = None
        self._promotes_at_s = 0.0
        self._look()

    # ------------------------------------------------------------------ for the world

    def server_of(self, key: str) -> ReplicatedServer:
        """Return the primary."""
        return self.servers[self.primary]

    def pick(self) -> ReplicatedServer:
        """Draw a server to hurt; most often the primary."""
        primary = self.servers[self.primary]
        if self.world.rng.random() < 0.8:
            return primary
        if len(primary.peers) == 1:
            return primary.peers[0]  # without a draw, which would change the schedules of known seeds
        return self.world.rng.choice(primary.peers)

    # ------------------------------------------------------------------ failover

    def _look(self) -> None:
        """Look at all servers, as the sentinels do."""
        primary = self.servers[self.primary]
        for at, peer in enumerate(primary.peers):
            primary.link(at, known=not peer.is_primary)
        if primary.running:
            self._missed_since_s = None
            for sentinel in self._voters:
                sentinel.down = sentinel.failing_over = False
        else:
            self._miss(primary)
        self.world.at(WORLD, self.world.now_s() + LOOK_EVERY_S, self._look)

    @property
    def _voters(self) -> list[Sentinel]:
        return [sentinel for sentinel in self.sentinels if not sentinel.node.stopped]

    def _miss(self, primary: ReplicatedServer) -> None:
        now_s = self.world.now_s()
        if self._missed_since_s is None:
            self._missed_since_s = now_s
        if now_s < self._missed_since_s + DOWN_AFTER_S:
            return
        voters = self._voters
        for sentinel in voters:
            if not sentinel.down and self.world.rng.random() < 0.5:  # each has its own clock
                sentinel.down = True
                sentinel.publish(b"+sdown")
        if sum(sentinel.down for sentinel in voters) < QUORUM or 2 * len(voters) <= SENTINELS:
            return
        if not any(sentinel.failing_over for sentinel in voters):
            self._promotes_at_s = now_s + self.world.rng.uniform(0.1, LONGEST_VOTE_S)
            self.world.rng.choice(voters).failing_over = True
        elif now_s >= self._promotes_at_s and (promoted := primary.promote_replica()):
            self._switch(primary, promoted)

    def _switch(self, former: ReplicatedServer, promoted: ReplicatedServer) -> None:
        """Let the sentinels hear of the new primary; one of them makes the former one a replica when it is back."""
        self.primary, self.epoch, self._missed_since_s = self.servers.index(promoted), self.epoch + 1, None
        leader = next(sentinel for sentinel in self._voters if sentinel.failing_over)
        for sentinel in self.sentinels:
            after_s = 0.0 if sentinel is leader else self.world.rng.uniform(0.05, HEARS_S)
            self.world.at(sentinel.node, self.world.now_s() + after_s, sentinel.learn, self.primary, self.epoch)
        self._demote_later(former)

    def _demote_later(self, former: ReplicatedServer) -> None:
        self.world.at(WORLD, self.world.now_s() + self.world.rng.uniform(0.3, DEMOTES_S), self._demote, former)

    def _demote(self, former: ReplicatedServer) -> None:
        if former is self.servers[self.primary] or not former.is_primary:
            return
        if former.running and self._voters:
            former.become_replica()
            for link in list(former.links):  # CLIENT KILL TYPE normal
                link.cut()
        else:
            self._demote_later(former)
