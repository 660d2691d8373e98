"""Tickets and counters that Redis keeps beside the streams."""

from __future__ import annotations

from replaybuf.service.run.append.admission import Incoming
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.group import group_from_json
from tests.builders import arriving, rollout, wire_group
from tests.led_run import on_a_run


def test_a_removed_ticket_that_a_restart_of_redis_brings_back_is_removed_again(server: EmbeddedServer) -> None:
    """Its removal is not durable. Followers read tickets from Redis, and would show it until the next leader."""

    async def work(store: Store, run: Run) -> None:
        before = (await run.tickets.issue("p", 2, "", 0.0)).tickets
        stored = await store.tickets.read_one(run.name)
        (text,) = [text for text, _ in stored.tickets if text == before[0].ticket]
        group = group_from_json(wire_group(rollout(), group_id=None, ticket=text))
        await run.appends.append(arriving([Incoming(group)]))
        await run.tick()
        assert await texts(store, run) == [before[1].ticket]
        await store.tickets.change(run.name, run.journal.token, deadlines_s=dict(stored.tickets))
        store.connection.process_id = "of the next process"
        await run.tick()
        await run.tick()
        assert await texts(store, run) == [before[1].ticket]

    on_a_run(server, work)


async def texts(store: Store, run: Run) -> list[str]:
    """Return the texts of the tickets in Redis."""
    return [text for text, _ in (await store.tickets.read_one(run.name)).tickets]
