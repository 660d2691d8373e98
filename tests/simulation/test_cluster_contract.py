"""The model of a cluster sends clients to the nodes that a real Valkey Cluster sends them to, and refuses alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from redis.exceptions import AskError, ResponseError

from replaybuf.store import keys
from replaybuf.store.redis.cluster_map import combine, parse_nodes
from replaybuf.store.redis.server import LIBRARY_CODE, find_split
from tests.clusters import ValkeyCluster
from tests.simulation import mix
from tests.simulation.mix import CLUSTER
from tests.simulation.plan import Plan
from tests.simulation.redis_model.cluster import RedisCluster
from tests.simulation.redis_model.layout import SHARDS, address_of, slot_of
from tests.simulation.redis_model.link import Link
from tests.simulation.world import World
from tests.waiting import eventually

RUN = "contract"
NOTED = [keys.attempts(RUN, 7), keys.written(RUN, 7)]
NOTE = ["FCALL", "rb_note", 2, *NOTED, 0, 0, "payload"]
MISSING = f"rb:b:{{{RUN}/07}}:missing"
WITHIN_S = 30.0


class BothClusters:
    """A real cluster and the model, which get the same commands. Nodes are named by their numbers."""

    def __init__(self, real: ValkeyCluster, model: RedisCluster) -> None:
        self.real, self.model = real, model
        self._ports = {node.port: number for number, node in enumerate(real.nodes)}
        self._ports |= {address_of(number)[1]: number for number in range(SHARDS)}
        self._connections: list[Any] = [node.client.connection_pool.get_connection() for node in real.nodes]
        self._links = [Link(node) for node in model.nodes]

    def call(self, number: int, *words: Any) -> tuple[Any, Any]:
        """Send a command to one node; return the replies of the real one and of the model."""
        self._connections[number].send_command(*words)
        try:
            real = self._connections[number].read_response()
        except ResponseError as error:
            real = error
        raw = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        return self._comparable(real), self._comparable(self.model.nodes[number].execute(self._links[number], raw))

    def _comparable(self, reply: Any) -> Any:
        if isinstance(reply, AskError):
            return type(reply).__name__, reply.slot_id, self._ports[reply.port]
        return type(reply).__name__ if isinstance(reply, ResponseError) else reply

    def check(self, number: int, *words: Any) -> Any:
        """Check that both answer alike; return what."""
        real, modelled = self.call(number, *words)
        assert modelled == real, words
        return real

    def check_nodes(self, number: int) -> None:
        """Check that both describe the cluster alike, as the store reads it."""
        views = []
        for text in self.call(number, "CLUSTER", "NODES"):
            nodes = parse_nodes(text.decode(), ("", 0))
            views.append({self._ports[node.address[1]]: sorted(node.slots) for node in nodes if node.slots})
            assert not any(node.failed for node in nodes)
        assert views[0] == views[1]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    with ValkeyCluster(tmp_path_factory.mktemp("contract"), replicas=0) as cluster:
        yield cluster


@pytest.fixture
def both(real: ValkeyCluster) -> Iterator[BothClusters]:
    world = World(Plan(1, redis=CLUSTER))
    model = RedisCluster(world, fsync="always")
    for node in model.nodes:
        node.linked = [False] * len(node.linked)  # nor have the real ones a replica
    pair = BothClusters(real, model)
    for number in range(SHARDS):
        pair.call(number, "FUNCTION", "LOAD", "REPLACE", LIBRARY_CODE)
    yield pair
    world.loop.discard()


def test_a_moving_slot_answers_as_on_a_real_cluster(both: BothClusters) -> None:
    """MOVED, ASK, ASKING, TRYAGAIN and CROSSSLOT, before, during and after the move."""
    slot, source = slot_of(NOTED[0].encode()), both.model.layout.owner_of(slot_of(NOTED[0].encode()))
    target = (source + 1) % SHARDS
    for number in range(SHARDS):
        both.check_nodes(number)
        both.check(number, *NOTE)
        both.check(number, "GET", NOTED[1])
        both.check(number, "XREAD", "COUNT", 1, "STREAMS", MISSING, "0-0")
        both.check(number, "MGET", "a", "b")
        both.check(number, "PING")

    both.real.begin_move(NOTED[0], both.real.nodes[target])
    nodes = both.model.nodes
    nodes[source].leaving[slot], nodes[target].coming[slot] = nodes[target], nodes[source]
    during: list[list[Any]] = [
        NOTE,
        ["GET", NOTED[1]],
        ["GET", MISSING],
        ["MGET", NOTED[1], MISSING],
        ["UNLINK", MISSING],
    ]
    for number in range(SHARDS):
        for words in during:
            both.check(number, *words)
    assert both.check(target, "ASKING") == b"OK"
    assert both.check(target, "SET", MISSING, "arrived") == b"OK"
    assert both.check(target, "GET", MISSING)[0] == "MovedError"
    for words in during[:4]:
        both.check(target, "ASKING")
        both.check(target, *words)

    both.real.end_move(NOTED[0], both.real.nodes[source], both.real.nodes[target])
    for name in (name for name in nodes[source].values.names() if slot_of(name) == slot):
        nodes[target].values.put(name, *nodes[source].values.take(name))
    both.model.change(both.model.layout.move(slot, target), *nodes)
    for number in range(SHARDS):
        both.check_nodes(number)
        for words in during:
            both.check(number, *words)


def test_a_primary_without_a_replica_answers_as_a_real_one(both: BothClusters) -> None:
    """It confirms no replica, and what it says of itself lets the store use it."""
    assert [both.call(0, "WAIT", 1, 1)[0], both.call(0, "WAIT", 0, 1)] == [0, (0, 0)]
    for info in both.call(0, "INFO", "server", "replication"):
        assert find_split(info.decode(), replicas=0, down_after_s=1.0) is None


def shards(texts: Sequence[bytes], ports: Sequence[int]) -> tuple[dict[int, int], list[int]]:
    """Return how many replicas the primary of each shard has, and the numbers of nodes that are down."""
    view = combine([parse_nodes(text.decode(), ("", 0)) for text in texts])
    replicas = {ports.index(address[1]) % SHARDS: view.followers.get(address, 0) for address in view.primaries}
    return replicas, [ports.index(port) for _, port in view.down]


def test_the_other_replica_follows_the_one_that_is_promoted(tmp_path: Path) -> None:
    """As with real nodes: before and after the failover, and when the former primary has come back as a replica."""
    with mock.patch.object(mix, "TWO_REPLICAS", 1.0), ValkeyCluster(tmp_path, replicas=2) as real:
        world = World(Plan(1, redis=CLUSTER))
        model = RedisCluster(world, fsync="always")

        def of_real() -> tuple[dict[int, int], list[int]]:
            texts = []
            for node in real.living():
                connection: Any = node.client.connection_pool.get_connection()
                connection.send_command("CLUSTER", "NODES")
                texts.append(connection.read_response())
                node.client.connection_pool.release(connection)
            return shards(texts, [node.port for node in real.nodes])

        def of_model(after_s: float) -> tuple[dict[int, int], list[int]]:
            world.loop.call_at(world.loop.time() + after_s, world.loop.stop)
            with world.instead_of_python():
                world.loop.run_forever()
            texts = [node.layout.describe(node.number).encode() for node in model.nodes if not node.node.dead]
            return shards(texts, [address_of(node.number)[1] for node in model.nodes])

        both = BothClusters(real, model)

        def usable(replicas: int) -> list[bool]:
            real.nodes[0].client.wait(3, 50)  # as the service does: a new primary asks for offsets then
            infos = both.call(0, "INFO", "server", "replication")
            return [find_split(info.decode(), replicas=replicas, down_after_s=60.0) is None for info in infos]

        assert eventually(lambda: usable(2), WITHIN_S, all)
        assert usable(3) == [False, False]
        for count in (1, 2):
            assert both.check(0, "WAIT", count, 1000) == 2
        assert of_real() == of_model(1.0) == ({0: 2, 1: 2, 2: 2}, [])

        real.nodes[0].kill()
        model.nodes[0].crash()
        failed_over = of_model(5.0)
        assert failed_over == ({0: 1, 1: 2, 2: 2}, [0])
        eventually(of_real, WITHIN_S, lambda seen: seen == failed_over)

        real.nodes[0].start()
        model.nodes[0].start()
        healed = of_model(5.0)
        assert healed == ({0: 2, 1: 2, 2: 2}, [])
        eventually(of_real, WITHIN_S, lambda seen: seen == healed)
        (promoted,) = (node for node in real.primaries() if real.nodes.index(node) % SHARDS == 0)
        assert eventually(lambda: promoted.client.wait(2, 1000), WITHIN_S, lambda confirmed: confirmed == 2)
        modelled = model.nodes[model.layout.primaries[0]]
        assert modelled.execute(Link(modelled), [b"WAIT", b"2", b"1000"]) == 2
        world.loop.discard()
