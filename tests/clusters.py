"""A Valkey Cluster of three primaries with a replica each, every node a process of its own that a test can kill."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import redis
from redis.crc import key_slot

from tests.ports import free_ports
from tests.valkeys import Valkey
from tests.waiting import eventually

SLOTS = 16_384
WITHIN_S = 20.0


class Address(NamedTuple):
    """A node: a client of it, its port, and its port for other nodes."""

    client: redis.Redis
    port: int
    bus: int


def ask(client: redis.Redis, command: str, *words: Any) -> Any:
    """Send a CLUSTER command to a node; redis-py parses the reply."""
    return client.execute_command(f"CLUSTER {command}", *words)  # type: ignore[no-untyped-call]


def form_cluster(nodes: Sequence[Address], primaries: int) -> None:
    """Make one cluster of running nodes: the first own the slots, the others are their replicas, in turn."""
    share = -(-SLOTS // primaries)
    for number, node in enumerate(nodes[:primaries]):
        ask(node.client, "SET-CONFIG-EPOCH", number + 1)
        ask(node.client, "ADDSLOTSRANGE", number * share, min(SLOTS, (number + 1) * share) - 1)
    for node in nodes[1:]:
        ask(nodes[0].client, "MEET", "127.0.0.1", node.port, node.bus)
    eventually(lambda: all(_count(node, "handshake") == (len(nodes), 0) for node in nodes), WITHIN_S)
    replicas = nodes[primaries:]
    for number, replica in enumerate(replicas):
        ask(replica.client, "REPLICATE", _id_of(nodes[number % primaries].client))
    eventually(lambda: all(replica.client.role()[3] == b"connected" for replica in replicas), WITHIN_S)
    eventually(lambda: all(serves(node.client) for node in nodes), WITHIN_S)
    eventually(lambda: all(_count(node, "slave") == (len(nodes), len(replicas)) for node in nodes), WITHIN_S)


def serves(client: redis.Redis) -> bool:
    """Check whether a node knows an owner of every slot; False if it does not answer."""
    with contextlib.suppress(redis.RedisError):
        return bool(ask(client, "INFO")["cluster_state"] == "ok")
    return False


def _count(node: Address, flag: str) -> tuple[int, int]:
    """Return how many nodes a node knows, and how many of them have a flag."""
    lines: Any = ask(node.client, "NODES")
    return len(lines), sum(flag in line["flags"] for line in lines.values())


def _id_of(client: redis.Redis) -> str:
    reply: Any = ask(client, "MYID")
    return reply.decode() if isinstance(reply, bytes) else str(reply)


class ValkeyCluster:
    """Nodes of which the first `primaries` own the slots, with `replicas` for each. `url` is for the store."""

    def __init__(self, folder: Path, primaries: int = 3, replicas: int = 1, **config: str) -> None:
        count = primaries * (1 + replicas)
        settings = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": "1000",
            "cluster_replica_validity_factor": "0",
            "bind": "127.0.0.1",
            **config,
        }
        self.nodes = [
            Valkey(folder / f"n{number}", cluster_port=str(bus), **settings)
            for number, bus in enumerate(free_ports(count))
        ]
        self._primaries = primaries
        self.url = f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes[:primaries])}"

    def __enter__(self) -> ValkeyCluster:
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _start(self) -> None:
        with ThreadPoolExecutor(len(self.nodes)) as threads:
            list(threads.map(Valkey.start, self.nodes))
        addresses = [Address(node.client, node.port, int(node.config["cluster-port"])) for node in self.nodes]
        form_cluster(addresses, self._primaries)

    def end(self) -> None:
        """Kill everything."""
        for node in self.nodes:
            node.client.close()
            node.kill()

    @staticmethod
    def id_of(node: Valkey) -> str:
        """Return the id of a node."""
        return _id_of(node.client)

    def living(self) -> Iterator[Valkey]:
        """Return the nodes that answer."""
        for node in self.nodes:
            with contextlib.suppress(redis.ConnectionError):
                node.client.ping()
                yield node

    def primaries(self) -> list[Valkey]:
        """Return the nodes that are primaries now and own slots."""
        return [node for node in self.living() if node.client.role()[0] == b"master" and self.slots_of(node)]

    def slots_of(self, node: Valkey) -> list[list[str]]:
        """Return the ranges of slots of a node, as it says itself."""
        lines: Any = ask(node.client, "NODES")
        (own,) = (line for line in lines.values() if "myself" in line["flags"])
        return list(own["slots"])

    def owner(self, key: str) -> Valkey:
        """Return the primary that owns the slot of a key."""
        slot = key_slot(key.encode())
        for node in self.primaries():
            for bounds in self.slots_of(node):
                if int(bounds[0]) <= slot <= int(bounds[-1]):
                    return node
        raise LookupError(f"nobody owns slot {slot}")

    def begin_move(self, key: str, target: Valkey) -> None:
        """Begin to move the slot of a key, as `valkey-cli --cluster reshard` does."""
        source, slot = self.owner(key), key_slot(key.encode())
        ask(target.client, "SETSLOT", slot, "IMPORTING", self.id_of(source))
        ask(source.client, "SETSLOT", slot, "MIGRATING", self.id_of(target))

    def end_move(self, key: str, source: Valkey, target: Valkey) -> None:
        """Move the keys of the slot, then the slot."""
        slot = key_slot(key.encode())
        while names := ask(source.client, "GETKEYSINSLOT", slot, 10):
            source.client.migrate("127.0.0.1", target.port, names, 0, 5000)
        for node in (target, source, *self.primaries()):
            ask(node.client, "SETSLOT", slot, "NODE", self.id_of(target))

    def keys(self) -> dict[int, list[bytes]]:
        """Return the keys of each primary, by port."""
        return {node.port: sorted(node.client.scan_iter(count=1000)) for node in self.primaries()}
