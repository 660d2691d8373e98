"""A Valkey Cluster of three primaries with a replica each, every node a process of its own that a test can kill."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from redis.crc import key_slot

from tests.ports import free_ports
from tests.valkeys import Valkey
from tests.waiting import eventually

SLOTS = 16_384


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
        primaries, replicas = self.nodes[: self._primaries], self.nodes[self._primaries :]
        first, share = self.nodes[0], -(-SLOTS // len(primaries))
        for number, node in enumerate(primaries):
            self.ask(node, "SET-CONFIG-EPOCH", number + 1)
            last = min(SLOTS, (number + 1) * share) - 1
            self.ask(node, "ADDSLOTSRANGE", number * share, last)
        for node in self.nodes[1:]:
            self.ask(first, "MEET", "127.0.0.1", node.port, node.config["cluster-port"])
        eventually(lambda: all(self._knows_all(node) for node in self.nodes), 20.0)
        for number, replica in enumerate(replicas):
            self.ask(replica, "REPLICATE", self.id_of(primaries[number % len(primaries)]))
        eventually(lambda: all(replica.client.role()[3] == b"connected" for replica in replicas), 20.0)
        eventually(lambda: all(self.state_of(node) == "ok" for node in self.nodes), 20.0)
        eventually(lambda: all(self._sees_roles(node, len(replicas)) for node in self.nodes), 20.0)

    @staticmethod
    def ask(node: Valkey, command: str, *words: Any) -> Any:
        """Send a CLUSTER command to a node; redis-py parses the reply."""
        return node.client.execute_command(f"CLUSTER {command}", *words)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Kill everything."""
        for node in self.nodes:
            node.client.close()
            node.kill()

    def id_of(self, node: Valkey) -> str:
        """Return the id of a node."""
        reply: Any = self.ask(node, "MYID")
        return reply.decode() if isinstance(reply, bytes) else str(reply)

    def state_of(self, node: Valkey) -> str:
        """Return `ok` if a node knows an owner of every slot."""
        return str(self.ask(node, "INFO")["cluster_state"])

    def _knows_all(self, node: Valkey) -> bool:
        lines: Any = self.ask(node, "NODES")
        return len(lines) == len(self.nodes) and not any("handshake" in line["flags"] for line in lines.values())

    def _sees_roles(self, node: Valkey, replicas: int) -> bool:
        lines: Any = self.ask(node, "NODES")
        return sum("slave" in line["flags"] for line in lines.values()) == replicas

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
        lines: Any = self.ask(node, "NODES")
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
        self.ask(target, "SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.ask(source, "SETSLOT", slot, "MIGRATING", self.id_of(target))

    def end_move(self, key: str, source: Valkey, target: Valkey) -> None:
        """Move the keys of the slot, then the slot."""
        slot = key_slot(key.encode())
        while names := self.ask(source, "GETKEYSINSLOT", slot, 10):
            source.client.migrate("127.0.0.1", target.port, names, 0, 5000)
        for node in (target, source, *self.primaries()):
            self.ask(node, "SETSLOT", slot, "NODE", self.id_of(target))

    def keys(self) -> dict[int, list[bytes]]:
        """Return the keys of each primary, by port."""
        return {node.port: sorted(node.client.scan_iter(count=1000)) for node in self.primaries()}
