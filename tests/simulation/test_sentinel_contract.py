"""The model of sentinels and their servers says what real ones say, before and after a failover."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from replaybuf.store.redis.sentinel_answers import Answer, read_answer
from replaybuf.store.redis.server import find_split
from tests.sentinels import NAME, Watched
from tests.simulation.mix import SENTINEL
from tests.simulation.plan import Plan
from tests.simulation.redis_model.link import Link
from tests.simulation.redis_model.replicated import DOWN_AFTER_S
from tests.simulation.redis_model.sentinel_group import ADDRESSES, SentinelGroup
from tests.simulation.world import World
from tests.waiting import eventually

QUESTIONS = ("GET-MASTER-ADDR-BY-NAME", "MASTER", "REPLICAS")
WITHIN_S = 20.0


SEEDS = {1: 0, 2: 1}
"""A seed for each number of replicas."""


@pytest.fixture(params=SEEDS)
def model(request: pytest.FixtureRequest) -> Iterator[SentinelGroup]:
    world = World(Plan(SEEDS[request.param], redis=SENTINEL))
    assert world.mix.replicas == request.param
    yield SentinelGroup(world, fsync="always")
    world.loop.discard()


def of_model(group: SentinelGroup) -> Answer:
    """Return what a modelled sentinel answers, as the store reads it."""
    sentinel = group.sentinels[0]
    return read_answer(*(sentinel.execute(Link(group.servers[0]), _words(question)) for question in QUESTIONS))


def _words(question: str) -> list[bytes]:
    return [b"SENTINEL", question.encode(), NAME.encode()]


def of_real(group: Watched) -> Answer:
    """Return what a real sentinel answers, as the store reads it."""
    with redis.Redis(port=group.sentinels[0].port, protocol=3, legacy_responses=False) as client:
        connection: Any = client.connection_pool.get_connection()
        replies = []
        for question in QUESTIONS:
            connection.send_command(*_words(question))
            replies.append(connection.read_response())
    return read_answer(*replies)


def facts(answer: Answer, ports: list[int]) -> tuple[object, ...]:
    """Return an answer without what depends on the machine, or on chance: whether the first server is the primary."""
    promoted = ports.index(answer.primary[1]) > 0 if answer.primary else None
    return promoted, answer.down, answer.failing_over, answer.sentinels, answer.quorum, answer.down_after_s


def test_sentinels_answer_as_real_ones(tmp_path: Path, model: SentinelGroup) -> None:
    """In peace, and when a replica has been promoted: the former primary counts as a replica that is down."""
    replicas = model.world.mix.replicas
    with Watched(tmp_path, replicas=replicas, down_after_ms=int(1000 * DOWN_AFTER_S)) as real:
        real_ports, ports = [server.port for server in real.servers], [port for _, port in ADDRESSES]
        assert facts(of_model(model), ports) == facts(of_real(real), real_ports)
        assert of_model(model).replicas == of_real(real).replicas == replicas
        assert find_split(model.servers[0].info(), replicas=replicas, down_after_s=DOWN_AFTER_S) is None

        before = of_real(real).epoch, of_model(model).epoch
        real.servers[0].kill()
        model.servers[0].crash()
        model.world.loop.call_at(10.0, model.world.loop.stop)
        with model.world.instead_of_python():
            model.world.loop.run_forever()
        after = facts(of_model(model), ports)
        assert after[0] and of_model(model).replicas == replicas - 1
        # A real sentinel names the new primary before it has ended the failover.
        eventually(lambda: facts(of_real(real), real_ports), WITHIN_S, lambda said: said == after)
        eventually(lambda: of_real(real).replicas, WITHIN_S, lambda count: count == replicas - 1)
        assert of_real(real).epoch > before[0] and of_model(model).epoch > before[1]
