"""A Valkey Cluster of three primaries with one or more replicas each, for the chaos test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.chaos.failover import ANSWER_TIMEOUT_S, PRIMARY_SHARE, START_TIMEOUT_S, role_of
from tests.chaos.processes import Child, Valkey
from tests.clusters import Address, form_cluster, serves
from tests.ports import free_ports
from tests.waiting import eventually

PRIMARIES = 3
_SETTINGS = """\
cluster-enabled yes
cluster-port {bus}
cluster-node-timeout 1000
cluster-replica-validity-factor 0
cluster-require-full-coverage no
"""


class Spread:
    """`url` names the nodes that are primaries at the start."""

    sentinels: Sequence[Child] = ()

    def __init__(self, folder: Path, replicas: int) -> None:
        self._replicas = PRIMARIES * replicas
        ports = free_ports(2 * (PRIMARIES + self._replicas))
        self._ports, self._buses = ports[::2], ports[1::2]
        self.valkeys = [
            Valkey(f"valkey-{number}", folder / f"valkey-{number}", port, _SETTINGS.format(bus=bus))
            for number, (port, bus) in enumerate(zip(self._ports, self._buses, strict=True), 1)
        ]
        self._clients = [
            redis.Redis(port=port, socket_timeout=ANSWER_TIMEOUT_S, retry=Retry(NoBackoff(), 0)) for port in self._ports
        ]
        self.url = f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in self._ports[:PRIMARIES])}"

    @property
    def all(self) -> list[Child]:
        """Every process."""
        return list(self.valkeys)

    def start(self) -> None:
        """Start the nodes, and wait until each knows all others and its part."""
        for valkey in self.valkeys:
            valkey.start()
            valkey.wait_ready()
        form_cluster(list(map(Address, self._clients, self._ports, self._buses)), PRIMARIES)
        eventually(self.whole, START_TIMEOUT_S)

    def whole(self) -> bool:
        """Check that three nodes are primaries, the others follow them, and every slot is served."""
        roles = sorted(role_of(client) for client in self._clients)
        return roles == ["connected"] * self._replicas + ["master"] * PRIMARIES and all(map(serves, self._clients))

    def choose(self, rng: random.Random) -> Valkey | None:
        """Choose a node to hurt."""
        primary = rng.random() < PRIMARY_SHARE
        roles = [role_of(client) for client in self._clients]
        chosen = [valkey for valkey, role in zip(self.valkeys, roles, strict=True) if (role == "master") == primary]
        return rng.choice(chosen) if chosen else None
