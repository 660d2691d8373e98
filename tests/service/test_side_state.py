"""Tickets and counters that Redis keeps beside the streams."""

from __future__ import annotations

import itertools
import time

from replaybuf.kernel.state.tickets import TicketBook, parse_ticket
from replaybuf.service.clock import Clock
from replaybuf.service.run.append.group_check import Incoming
from replaybuf.service.run.served_run import Run
from replaybuf.service.run.side_state import SideState
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.config import TicketSpec
from replaybuf.wire.group import group_from_json
from tests.builders import arriving, rollout, wire_group
from tests.led_run import on_a_run

TTL_S = 600.0


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
        await store.tickets.change(run.name, run.journal.token, left_s=dict.fromkeys(dict(stored.tickets), TTL_S))
        store.connection.process_id = "of the next process"
        await run.tick()
        await run.tick()
        assert await texts(store, run) == [before[1].ticket]

    on_a_run(server, work)


def test_a_prompt_that_is_stored_as_its_ticket_is_returned_leaves_no_ticket(server: EmbeddedServer) -> None:
    """Its late group arrives after the decision to issue it again, and before that is written."""

    async def work(store: Store, run: Run) -> None:
        (issued,) = (await run.tickets.issue("p", 1, "", 0.0)).tickets
        ticket, side_state = parse_ticket(issued.ticket), run.side_state
        returned = side_state.book.give_back(ticket, "engine_timeout")
        side_state.remove_later(side_state.book.complete([ticket.prompt]).texts_to_drop)
        await side_state.save(returned)
        assert await texts(store, run) == []

    on_a_run(server, work)


def test_a_loaded_ticket_keeps_its_time_whatever_the_clock_of_the_server_says(server: EmbeddedServer) -> None:
    """The next leader, or a former one again, may have a clock that jumped."""

    async def work(store: Store, run: Run) -> None:
        (issued,) = (await run.tickets.issue("p", 1, "", 0.0)).tickets
        for wall_s in (0.0, 2.0 * time.time()):
            run.journal.clock = Clock(wall=itertools.repeat(wall_s).__next__)
            loaded = SideState(run.journal, TicketBook(TTL_S, 3, {}))
            await loaded.reload()
            deadline_s = loaded.book.oldest_deadline_s("")
            assert deadline_s is not None and TTL_S / 2 < deadline_s - run.journal.clock.monotonic() <= TTL_S
            assert loaded.book.holds(parse_ticket(issued.ticket))

    on_a_run(server, work, tickets=TicketSpec(ttl_s=TTL_S))


async def texts(store: Store, run: Run) -> list[str]:
    """Return the texts of the tickets in Redis."""
    return [text for text, _ in (await store.tickets.read_one(run.name)).tickets]
