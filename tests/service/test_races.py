"""Two things at once on one run, in the order that hurts: a server's parts in this process, on a real Valkey."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, NoReturn, TypeVar
from unittest import mock

import httpx
import msgspec
import pytest
from starlette.requests import ClientDisconnect, Request

from replaybuf.errors import (
    Conflict,
    Fenced,
    InvalidGroups,
    NotFound,
    NotLeader,
    RunFinished,
    ServiceUnavailable,
    WrongStep,
)
from replaybuf.kernel.state.tickets import Ticket, parse_ticket
from replaybuf.service import host as service
from replaybuf.service import turns
from replaybuf.service.bodies.writer import Part
from replaybuf.service.clock import Clock
from replaybuf.service.host import Service
from replaybuf.service.http.body.append_bodies import read_groups
from replaybuf.service.http.body.body_budget import BodyBudget
from replaybuf.service.http.body.decoders import DecoderPool
from replaybuf.service.http.guard.auth import Permission, Tokens
from replaybuf.service.http.routes import application
from replaybuf.service.run.append.group_check import Incoming
from replaybuf.service.run.append.group_commit import APPEND_CHUNK
from replaybuf.service.run.served_run import Run
from replaybuf.service.traffic import Traffic
from replaybuf.store import EmbeddedServer, PendingGroup, Store
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec, TicketSpec
from replaybuf.wire.config_patch import ConfigPatch
from replaybuf.wire.contract import AttachRequest, Tickets, WaitingAnswer
from replaybuf.wire.frame import MEDIA_TYPE, encode_frame, stored_checksum
from replaybuf.wire.group import Group, group_from_json
from replaybuf.wire.ledger import CheckpointRecord
from tests.builders import arriving, rollout, wire_group
from tests.led_run import LEASE_S, append, on_a_run, train
from tests.waiting import until

T = TypeVar("T")
_names = itertools.count()


async def write_directly(store: Store, run: str, group: Group, prompt_key: str = "") -> None:
    """Append a group as a producer that writes to Redis itself does, or another server."""
    frame = encode_frame(group)
    ready = PendingGroup(group, str(group.group_id), prompt_key, frame, stored_checksum(frame))
    await store.groups.append(run, [ready], {"": 0}, time.time())


async def collected(items: AsyncIterator[T]) -> list[T]:
    """Collect what arrives."""
    return [item async for item in items]


def test_a_fetch_overtaken_by_an_attach_assembles_nothing(server: EmbeddedServer) -> None:
    """The history it asked about is gone: made now, its batch would be many steps ahead of the new trainer."""

    async def work(store: Store, run: Run) -> None:
        old = (await run.trainer_calls.attach(AttachRequest())).epoch
        await append(run, "a", "b", "c")
        await train(run, old, range(2))
        async with run.journal.decision():  # both wait for this one, the attach first
            attaching = asyncio.create_task(
                run.trainer_calls.attach(AttachRequest(resume_step=0, on_resume="resample"))
            )
            await asyncio.sleep(0)
            fetching = asyncio.create_task(run.batches.part(2, old, 0, 0.0))
            await asyncio.sleep(0)
        await attaching
        with pytest.raises(Fenced):
            await fetching
        assert run.state.next_step == 0

    on_a_run(server, work)


def test_a_fetch_overtaken_by_an_attach_during_its_read_is_fenced(server: EmbeddedServer) -> None:
    """What it would be given is packed for the ranks of another trainer."""

    async def work(store: Store, run: Run) -> None:
        old = (await run.trainer_calls.attach(AttachRequest(dp_world_size=2))).epoch
        await append(run, "a", "b")
        await train(run, old, range(1))
        run.batches.forget()
        fetching = asyncio.create_task(run.batches.part(0, old, 1, 0.0))
        reading = asyncio.Event()
        frames = store.groups.read_frames

        async def slow_frames(*arguments: Any) -> Any:
            reading.set()
            await run.trainer_calls.attach(AttachRequest(dp_world_size=1))
            return await frames(*arguments)

        store.groups.read_frames = slow_frames  # type: ignore[method-assign, assignment]
        with pytest.raises(Fenced):
            await fetching
        assert reading.is_set()

    on_a_run(server, work)


@pytest.mark.parametrize("leads_when_it_looks", [True, False])
def test_an_older_read_does_not_replace_the_ticket_book_of_a_new_leader(
    server: EmbeddedServer, leads_when_it_looks: bool
) -> None:
    """It read the book, then took over and issued a ticket: what was read is older, also where the lead is lost."""

    async def work(store: Store, leader: Run) -> None:
        follower = await Run.load(leader.name, store)
        assert follower is not None
        (book,), term = await store.tickets.read([leader.name]), follower.journal.terms
        await store.runs.release_lease(leader.name, "here")
        token = (await store.runs.take_lease(leader.name, "there", LEASE_S)).token
        await follower.lead(str(token))
        assert len((await follower.tickets.issue("me", 1, "", 0.0)).tickets) == 1
        if not leads_when_it_looks:
            follower.journal.become_follower(None)
        follower.restore_side_state(book, term)
        assert (follower.book.out, follower.book.next_index) == (1, {"": 1})

    on_a_run(server, work)


def test_a_follower_restores_the_ticket_book_of_the_leader(server: EmbeddedServer) -> None:
    """A ticket that the leader issued is out for the follower too."""

    async def work(store: Store, leader: Run) -> None:
        follower = await Run.load(leader.name, store)
        assert follower is not None
        await leader.tickets.issue("me", 1, "", 0.0)
        (book,) = await store.tickets.read([leader.name])
        follower.restore_side_state(book, follower.journal.terms)
        assert (follower.book.out, follower.book.next_index) == (1, {"": 1})

    on_a_run(server, work)


def test_direct_appends_to_a_new_run_are_read_at_once(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read that waits for news of older runs does not name the streams of this one: it is begun anew."""
    monkeypatch.setattr(service, "FOLLOW_TIMEOUT_S", 60.0)

    async def main() -> None:
        store = await Store.open(server.url)
        followed = Service(store, url="http://here", embedded=True)
        await followed.start()
        try:
            async with followed.working():
                for name in ("older", "newer"):
                    run, _ = await followed.create(f"{name}-{next(_names)}", RunConfig(batch=BatchSpec()))
                    group = group_from_json(wire_group(rollout(), group_id=name))
                    frame = encode_frame(group)
                    ready = PendingGroup(group, name, "", frame, stored_checksum(frame))
                    await store.groups.append(run.name, [ready], {"": 0}, time.time())
                    await stored(run)
        finally:
            await followed.stop()
            await store.close()

    asyncio.run(main())


async def stored(run: Run) -> None:
    """Wait until a group is known."""
    await until(lambda: run.state.stored, poll_s=0.01)


@pytest.mark.parametrize("on_resume", ["redeliver", "resample"])
def test_a_group_checked_before_a_rewind_does_not_survive_it(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, on_resume: Literal["redeliver", "resample"]
) -> None:
    """Else it would be trained as the work of the version of that number which is still to come."""

    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=1))).epoch
        await append(run, "a", "b")
        await train(run, epoch, range(2))
        checked, rewinding = asyncio.Event(), asyncio.Event()
        publish = store.groups.append

        async def held(*arguments: Any) -> Any:
            checked.set()
            await rewinding.wait()
            return await publish(*arguments)

        monkeypatch.setattr(store.groups, "append", held)
        late = asyncio.create_task(append(run, "late", version=2))
        await checked.wait()
        attach = AttachRequest(dp_world_size=1, resume_step=1, on_resume=on_resume)
        await run.trainer_calls.attach(attach)
        rewinding.set()
        with pytest.raises(InvalidGroups, match="version_above_published"):
            await late
        assert (run.state.published[""], run.state.stored) == (1, 2)

    on_a_run(server, work)


def test_a_rewind_reaches_a_group_that_another_server_has_just_stored(server: EmbeddedServer) -> None:
    """The leader has not read it yet; Redis notes the newest group in the entry of the rewind."""

    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest())).epoch
        await append(run, "a", "b")
        await train(run, epoch, range(2))
        other = await Run.load(run.name, store)
        assert other is not None
        await append(other, "early", version=2)
        assert run.state.stored == 2
        await run.trainer_calls.attach(AttachRequest(resume_step=1))
        assert (run.state.stored, run.state.totals.evicted) == (3, {"lost_lineage": 1})
        await other.arrivals.read_streams()
        assert other.state.totals.evicted == {"lost_lineage": 1}

    on_a_run(server, work)


def test_a_direct_append_above_the_published_version_is_lost_lineage(
    server: EmbeddedServer,
) -> None:
    """By a producer that writes to Redis itself and had not heard of a rewind; also before it is settled."""

    async def work(store: Store, run: Run) -> None:
        mixed = rollout(completion_ids=[1, 2], inference_logprobs=[-0.5, -0.5], version_spans=[(0, 0, 1), (3, 1, 2)])
        group = group_from_json(wire_group(mixed, group_id="early"))
        assert (group.policy_version, group.policy_version_max) == (0, 3)
        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=1))).epoch
        await write_directly(store, run.name, group)
        await run.journal.pull()
        assert isinstance(await run.batches.part(0, epoch, 0, 0.0), WaitingAnswer)
        assert run.state.totals.evicted == {"lost_lineage": 1}

    on_a_run(server, work)


@pytest.mark.parametrize("also_by_http", [False, True])
def test_direct_appends_are_found_as_they_come(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, also_by_http: bool
) -> None:
    """After an append over HTTP the check of the ends, once a second, finds the first one; no trainer waits again."""

    async def main() -> None:
        name = f"direct-{next(_names)}"
        store, producer = await Store.open(server.url), await Store.open(server.url)
        host = Service(store, url="http://t", embedded=True)
        await host.start()
        run, _ = await host.create(name, RunConfig(batch=BatchSpec(groups_per_batch=1)))
        async with host.working():
            if also_by_http:
                await append(run, "by-http")
                await write_directly(producer, name, group_from_json(wire_group(rollout(), group_id="first")))
                await until(lambda: run.state.stored == 2, poll_s=0.01)
            monkeypatch.setattr(run, "check_ends", stopped)
            await write_directly(producer, name, group_from_json(wire_group(rollout(), group_id="second")))
            await until(lambda: run.state.stored == 1 + 2 * also_by_http, poll_s=0.01)
        await host.stop()
        await store.close()
        await producer.close()

    async def stopped(_: object) -> None: ...

    asyncio.run(main())


def test_a_server_that_loses_its_lease_during_the_check_stores_by_the_rules_of_the_next_leader(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it checked is stored as long as nothing has changed; else it checks again."""

    async def work(store: Store, run: Run) -> None:
        admit = run.group_check.check

        def overtaken(item: Incoming) -> PendingGroup:
            run.journal.become_follower("http://other")
            return admit(item)

        monkeypatch.setattr(run.group_check, "check", overtaken)
        leader = await Run.load(run.name, store)
        assert leader is not None
        await leader.lead(str((await store.runs.take_lease(run.name, "other", LEASE_S, force=True)).token))
        await append(run, "kept")
        await leader.patch(ConfigPatch(state="finished"))
        with pytest.raises(RunFinished):
            await append(run, "too late")
        await leader.journal.pull()
        assert (leader.state.stored, run.state.entries) == (1, leader.state.entries)

    on_a_run(server, work)


async def taking_over(
    store: Store, run: str, held: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Run, Callable[[], Awaitable[None]]]:
    """Load a run and take it over up to the call `held` of one of its parts; return it, and what lets it go on."""
    successor = await Run.load(run, store)
    assert successor is not None
    part, _, name = held.partition(".")
    reached, going = asyncio.Event(), asyncio.Event()
    call = getattr(getattr(successor, part), name)

    async def waiting() -> None:
        reached.set()
        await going.wait()
        await call()

    monkeypatch.setattr(getattr(successor, part), name, waiting)
    token = str((await store.runs.take_lease(run, "successor", LEASE_S, force=True)).token)
    leading = asyncio.create_task(successor.lead(token))
    await reached.wait()

    async def go_on() -> None:
        going.set()
        await leading

    return successor, go_on


def with_ticket(text: str) -> AsyncIterator[Incoming]:
    """Return the group of a ticket, as it arrives."""
    return arriving([Incoming(group_from_json(wire_group(rollout(), ticket=text)))])


def test_a_server_that_takes_over_rejects_no_group_by_the_tickets_of_before(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the end of the takeover, which reads them, and checks again."""

    async def work(store: Store, leader: Run) -> None:
        successor, go_on = await taking_over(store, leader.name, "tickets.reload", monkeypatch)
        with pytest.raises(NotLeader):
            await leader.tickets.issue("me", 1, "", 0.0)
        ticket = Ticket("", 0, 0, attempt=1, serial=1)
        counts = {"next:": 1, "issued": 1}
        await store.tickets.change(leader.name, successor.journal.token, left_s={str(ticket): 600.0}, counts=counts)
        appending = asyncio.create_task(successor.appends.append(with_ticket(str(ticket))))
        await asyncio.wait({appending}, timeout=0.2)
        await go_on()
        assert [result.status for result in await appending] == ["stored"]

    on_a_run(server, work)


def test_groups_that_come_during_a_takeover_complete_their_tickets(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come after the tickets were compared with the stored groups, and before this server leads."""

    async def work(store: Store, leader: Run) -> None:
        (ticket,) = (await leader.tickets.issue("me", 1, "", 0.0)).tickets
        successor, go_on = await taking_over(store, leader.name, "cursors.take_over", monkeypatch)
        await successor.appends.append(with_ticket(ticket.ticket))
        await go_on()
        await successor.arrivals.settle()
        assert successor.book.out == 0

    on_a_run(server, work)


@pytest.mark.parametrize("reason", ["shutdown", "engine_error"])
def test_a_prompt_whose_group_another_server_stored_is_not_issued_again(server: EmbeddedServer, reason: str) -> None:
    """The leader has not heard of the group when the ticket comes back; after a failure the prompt counts as stored."""

    async def work(store: Store, leader: Run) -> None:
        (ticket,) = (await leader.tickets.issue("me", 1, "", 0.0)).tickets
        other = await Run.load(leader.name, store)
        assert other is not None
        if reason == "shutdown":
            await leader.tickets.give_back(ticket.ticket, reason)
        await other.appends.append(with_ticket(ticket.ticket))
        if reason != "shutdown":
            with pytest.raises(NotFound):
                await leader.tickets.give_back(ticket.ticket, reason)
        await leader.tickets.issue("me", 1, "", 0.0)
        prompt = ("", 0)
        assert (leader.state.stored, leader.book.awaits(prompt), prompt in leader.state.failed.prompts) == (
            1,
            False,
            False,
        )

    on_a_run(server, work, tickets=TicketSpec(max_attempts=1))


def test_a_ticket_does_not_expire_while_the_look_at_stored_groups_is_older(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to the look is late: meanwhile another server stores the group, and the ticket passes its deadline."""

    async def work(store: Store, leader: Run) -> None:
        stored, returned = (await leader.tickets.issue("me", 2, "", 0.0)).tickets
        await leader.tickets.give_back(returned.ticket, "shutdown")
        other = await Run.load(leader.name, store)
        assert other is not None
        pull, ahead_s = leader.journal.pull, [0.0]
        monkeypatch.setattr(leader.journal, "clock", Clock(time.time, lambda: time.monotonic() + ahead_s[0]))

        async def look_late() -> None:
            await pull()
            if not ahead_s[0]:
                ahead_s[0] = 2 * stored.expires_in_s
                await other.appends.append(with_ticket(stored.ticket))

        monkeypatch.setattr(leader.journal, "pull", look_late)
        (again,) = (await leader.tickets.issue("me", 1, "", 0.0)).tickets
        assert (stored.prompt_index, again.prompt_index) == (0, returned.prompt_index)

    on_a_run(server, work)


def test_who_asks_during_the_look_at_stored_groups_waits_for_the_next(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reply is late: this producer may know of a group that was stored meanwhile. Who asked first has left."""

    async def work(store: Store, leader: Run) -> None:
        (ticket,) = (await leader.tickets.issue("me", 1, "", 0.0)).tickets
        other = await Run.load(leader.name, store)
        assert other is not None
        await leader.tickets.give_back(ticket.ticket, "shutdown")
        pull, leaving, later = leader.journal.pull, asyncio.Event(), list[asyncio.Task[Tickets]]()

        async def gone() -> NoReturn:
            await leaving.wait()
            raise ClientDisconnect

        async def look_late() -> None:
            await pull()
            if not later:
                await other.appends.append(with_ticket(ticket.ticket))
                later.append(asyncio.create_task(leader.tickets.issue("later", 1, "", 5.0)))
                leaving.set()
                with pytest.raises(ClientDisconnect):
                    await first

        monkeypatch.setattr(leader.journal, "pull", look_late)
        first = asyncio.create_task(leader.tickets.issue("first", 1, "", 5.0, gone))
        await asyncio.wait({first})
        (issued,) = (await later[0]).tickets
        assert issued.prompt_index == ticket.prompt_index + 1

    on_a_run(server, work)


def test_the_removal_of_a_ticket_does_not_overtake_its_issue(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of a new ticket is late, and its group is stored meanwhile: the tick removes what is not there yet."""

    async def work(store: Store, leader: Run) -> None:
        change, sent, arrives = leader.journal.store.tickets.change, asyncio.Event(), asyncio.Event()

        async def change_late(*arguments: Any, **options: Any) -> None:
            if options["left_s"]:
                sent.set()
                await arrives.wait()
            await change(*arguments, **options)

        monkeypatch.setattr(leader.journal.store.tickets, "change", change_late)
        issuing = asyncio.create_task(leader.tickets.issue("me", 1, "", 5.0))
        await sent.wait()
        await leader.appends.append(with_ticket(str(Ticket("", 0, 0, attempt=1, serial=1))))
        removing = asyncio.create_task(leader.side_state.write_removed())
        await asyncio.wait({removing}, timeout=0.2)
        arrives.set()
        await asyncio.gather(issuing, removing)
        assert (await store.tickets.read_one(leader.name)).tickets == []

    on_a_run(server, work)


def test_the_prompt_of_a_producer_that_left_may_be_stored_already(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another attempt stores its group while the new ticket is written: there is nothing to give back for it."""

    async def work(store: Store, leader: Run) -> None:
        change, sent, leaving, arrives = (leader.journal.store.tickets.change, *(asyncio.Event() for _ in range(3)))

        async def gone() -> NoReturn:
            await leaving.wait()
            raise ClientDisconnect

        async def change_late(*arguments: Any, **options: Any) -> None:
            sent.set()
            await arrives.wait()
            await change(*arguments, **options)

        monkeypatch.setattr(leader.journal.store.tickets, "change", change_late)
        left = asyncio.create_task(leader.tickets.issue("left", 1, "", 5.0, gone))
        stays = asyncio.create_task(leader.tickets.issue("stays", 1, "", 5.0))
        await sent.wait()
        leaving.set()
        with pytest.raises(ClientDisconnect):
            await left
        await leader.appends.append(with_ticket(str(Ticket("", 0, 0, attempt=1, serial=1))))
        arrives.set()
        assert [ticket.prompt_index for ticket in (await stays).tickets] == [1]

    on_a_run(server, work)


def test_a_write_that_arrives_after_the_next_read_only_delays(server: EmbeddedServer) -> None:
    """Redis that stood still reads its connections in any order; the write of a closed one may come last."""

    async def work(store: Store, run: Run) -> None:
        late = CheckpointRecord(step=0, keep=1)
        await store.ledger.append(run.name, run.journal.token, run.state.entries + 1, late)
        with pytest.raises(ServiceUnavailable, match="arrived late"):
            await run.trainer_calls.attach(AttachRequest())
        assert (await run.trainer_calls.attach(AttachRequest())).epoch == 1

    on_a_run(server, work)


def test_a_server_that_has_lost_the_lead_rejects_nothing(server: EmbeddedServer) -> None:
    """The state of its successor may accept the group, and producers drop what is rejected."""

    async def work(store: Store, run: Run) -> None:
        with pytest.raises(InvalidGroups):
            await append(run, "early", version=5)
        assert (await store.runs.take_lease(run.name, "successor", LEASE_S, force=True)).token
        with pytest.raises(NotLeader):
            await append(run, "early", version=5)
        assert (await store.counters.read(run.name))["rejected:version_above_published"] == 1

    on_a_run(server, work)


def test_a_server_that_has_lost_the_lead_refuses_no_trainer(server: EmbeddedServer) -> None:
    """Its successor may know the step or the epoch. A refusal writes nothing that would show the newer token."""
    calls: list[Callable[[Run], Awaitable[object]]] = [
        lambda run: run.trainer_calls.attach(AttachRequest(resume_step=3)),
        lambda run: run.trainer_calls.ack(0, 7, {}),
        lambda run: run.trainer_calls.publish(9, 1, None, ""),
        lambda run: run.trainer_calls.checkpoint(3, 1, 1),
        lambda run: run.batches.part(5, 1, 0, 0.0),
    ]

    async def work(store: Store, run: Run) -> None:
        await run.trainer_calls.attach(AttachRequest())
        for refused in calls:
            with pytest.raises((WrongStep, Fenced, Conflict)):
                await refused(run)
        token = run.journal.token
        assert (await store.runs.take_lease(run.name, "successor", LEASE_S, force=True)).token
        for refused in calls:
            run.journal.token, run.journal.leading = token, True
            with pytest.raises(NotLeader):
                await refused(run)
            assert not run.journal.leading

    on_a_run(server, work)


def test_a_server_that_loses_the_lead_during_a_decision_records_nothing(server: EmbeddedServer) -> None:
    """A stopped server learns of its successor during a decision, and then writes its record."""

    async def work(store: Store, run: Run) -> None:
        record, entries = CheckpointRecord(step=0, keep=1), run.state.entries
        async with run.journal.decision():
            successor = await store.runs.take_lease(run.name, "successor", LEASE_S, force=True)
            run.journal.become_follower("http://successor")
            with pytest.raises(NotLeader):
                await run.journal.append(record)
        assert await store.streams.read_end(run.name) == run.journal.ends
        await store.ledger.append(run.name, str(successor.token), entries + 1, record)

    on_a_run(server, work)


def test_an_append_of_many_groups_yields_between_chunks(server: EmbeddedServer) -> None:
    """A trainer that asks during a large append waits for one chunk at most."""

    async def work(store: Store, run: Run) -> None:
        seen = []

        async def watch() -> None:
            while True:
                seen.append(run.state.stored)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await append(run, *(f"g{number}" for number in range(10 * APPEND_CHUNK)))
        watching.cancel()
        seen.append(run.state.stored)
        assert max(later - earlier for earlier, later in itertools.pairwise(seen)) <= APPEND_CHUNK

    on_a_run(server, work)


@pytest.mark.parametrize("kind", ["application/json", MEDIA_TYPE])
def test_a_body_of_many_groups_is_decoded_one_by_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have the event loop after each."""
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    wires = [wire_group(rollout(), group_id=f"g{number}") for number in range(100)]
    frames = b"".join(encode_frame(group_from_json(wire)) for wire in wires)
    body = frames if kind == MEDIA_TYPE else msgspec.json.encode({"groups": wires})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def main() -> None:
        request = Request({"type": "http", "headers": [(b"content-type", kind.encode())]}, receive)
        request.state.body_share = BodyBudget(1 << 30, Traffic()).share()
        request.state.permission = Permission(Tokens(None), None, frozenset(), None, lists_runs=False)
        reading = asyncio.create_task(collected(read_groups(request, 1 << 20, DecoderPool())))
        count = 0
        while not reading.done():
            count += 1
            await asyncio.sleep(0)
        assert [item.group.group_id for item in reading.result() if item.group] == [wire.group_id for wire in wires]
        assert count >= len(wires)

    asyncio.run(main())


def test_a_failed_return_of_a_ticket_does_not_lose_its_prompt(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ticket that the failed change was to remove must not be removed by a later one."""

    async def work(store: Store, run: Run) -> None:
        (ticket,) = (await run.tickets.issue("me", 1, "", 0.0)).tickets
        change, failing = store.tickets.change, True

        async def fail_once(*arguments: Any, **options: Any) -> None:
            nonlocal failing
            if failing:
                failing = False
                raise ServiceUnavailable("redis is away", name="redis")
            await change(*arguments, **options)

        monkeypatch.setattr(store.tickets, "change", fail_once)
        with pytest.raises(ServiceUnavailable):
            await run.tickets.give_back(ticket.ticket, "too late")
        await run.tick()
        await run.tickets.issue("me", 1, "", 0.0)
        assert not failing
        again = await Run.load(run.name, store)
        assert again is not None and again.book.awaits(("", ticket.prompt_index))

    on_a_run(server, work)


def test_payloads_are_freed_once_while_the_counters_are_reloaded(server: EmbeddedServer) -> None:
    """Redis counts the first checkpoint as freed before the reply comes: the payloads of the second must go too."""

    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest())).epoch
        await append(run, "a", "b")
        for step in range(2):
            await train(run, epoch, range(step, step + 1))
            await run.trainer_calls.checkpoint(step + 1, epoch, 1)
        free = store.groups.free_payloads

        async def reloaded(*arguments: Any) -> None:
            await free(*arguments)
            await run.side_state.reload()

        store.groups.free_payloads = reloaded  # type: ignore[method-assign, assignment]
        await run.journal.free_payloads(run.spill.forget)
        assert not run.journal.owes_payloads
        keys_left = [key async for key in store.connection.client.scan_iter(f"rb:p:{{{run.name}:*")]
        assert keys_left == []

    on_a_run(server, work)


def test_groups_that_a_cut_decision_left_too_old_make_room_for_others(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch was recorded and its answer failed: the group beside it stayed live, and no other was admitted."""

    async def work(_: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=1))).epoch
        await append(run, "a", "b")
        with monkeypatch.context() as cut, pytest.raises(ServiceUnavailable):
            cut.setattr(run.batches, "_pack", mock.AsyncMock(side_effect=ServiceUnavailable("away")))
            await run.batches.part(0, epoch, 0, 0.0)
        await train(run, epoch, range(1))
        assert isinstance(await run.batches.part(1, epoch, 0, 0.0), WaitingAnswer)
        assert dict(run.state.totals.evicted) == {"too_stale": 1}
        assert len((await run.tickets.issue("p", 1, "", 0.0)).tickets) == 1

    on_a_run(server, work, strategy=StrategySpec("on-policy"))


def test_rules_that_a_cut_change_did_not_apply_are_applied_before_the_next_batch(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(_: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=1))).epoch
        await append(run, "a", "b")
        change = msgspec.convert({"filters": [{"name": "zero-variance"}]}, ConfigPatch)
        with monkeypatch.context() as cut, pytest.raises(ServiceUnavailable):
            cut.setattr(run.eviction, "evict_all", mock.AsyncMock(side_effect=ServiceUnavailable("away")))
            await run.patch(change)
        assert isinstance(await run.batches.part(0, epoch, 0, 0.0), WaitingAnswer)
        assert run.state.totals.evicted.total() == 2

    on_a_run(server, work)


async def lose_certainty(store: Store, run: Run, ends: tuple[int, int]) -> None:
    """Let the leader read its tickets anew, as after trouble with Redis."""
    run.side_state.uncertain = True


async def lead_again(store: Store, run: Run, ends: tuple[int, int]) -> None:
    """Lead anew, with these ends of the streams when the token was given."""
    run.journal.become_follower(None)
    await run.lead(str((await store.runs.take_lease(run.name, "here", LEASE_S)).token), ends)


@pytest.mark.parametrize("read_tickets_anew", [lose_certainty, lead_again])
def test_exact_slots_wait_for_a_group_that_only_redis_has_yet(
    server: EmbeddedServer, read_tickets_anew: Callable[[Store, Run, tuple[int, int]], Awaitable[None]]
) -> None:
    """Tickets are read anew without those of stored prompts; another server has stored the first one meanwhile."""

    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=1))).epoch
        first, *later = (await run.tickets.issue("p", 3, "", 0.0)).tickets
        for number, ticket in enumerate(later):
            group = group_from_json(wire_group(rollout(), group_id=f"later-{number}", ticket=ticket.ticket))
            await run.appends.append(arriving([Incoming(group)]))
        ends = run.state.entries, run.state.stored
        group = group_from_json(wire_group(rollout(), group_id="first", prompt_index=0))
        await write_directly(store, run.name, group, parse_ticket(first.ticket).key)
        await read_tickets_anew(store, run, ends)
        assert isinstance(await run.batches.part(0, epoch, 0, 0.0), Part)
        assert run.state.records[0].numbers.tolist() == [3, 1], "the first prompt arrived last"

    strategy = StrategySpec("one-step-off-policy", {"exact_slots": True})
    on_a_run(server, work, strategy=strategy, batch=BatchSpec(groups_per_batch=2))


def test_a_ticket_of_an_earlier_term_lives_as_long_as_its_last_issue(server: EmbeddedServer) -> None:
    """Another leader issued it while this server was cut off, and before Redis had heard of the first issue."""

    async def work(store: Store, run: Run) -> None:
        ends, ttl_s = (run.state.entries, run.state.stored), run.journal.config.tickets.ttl_s
        (issued,) = (await run.tickets.issue("p", 1, "", 0.0)).tickets
        run.journal.clock = Clock(monotonic=lambda: time.monotonic() + ttl_s)
        await store.tickets.change(run.name, run.journal.token, left_s={issued.ticket: ttl_s})
        await lead_again(store, run, ends)
        await run.tickets.expire()
        assert run.book.out_of("") == 1

    on_a_run(server, work)


def test_a_server_that_loses_the_lead_as_it_takes_it_does_not_lead(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else Redis would refuse all that it writes, and nobody would lead while it holds the lease."""

    async def work(store: Store, run: Run) -> None:
        async def fenced() -> None:
            await store.runs.take_lease(run.name, "successor", LEASE_S, force=True)
            with pytest.raises(NotLeader):
                await run.side_state.count_rejected(Counter(["missing_logprobs"]))

        monkeypatch.setattr(run.eviction, "take_over", fenced)
        with pytest.raises(NotLeader):
            await lead_again(store, run, (0, 0))
        assert not run.journal.leading

    on_a_run(server, work)


def test_a_late_refusal_of_an_older_token_does_not_end_a_newer_lead(server: EmbeddedServer) -> None:
    """The server lost the lead and has it again: what it wrote before is refused, not what it writes now."""

    async def work(store: Store, run: Run) -> None:
        older = run.journal.token
        for holder in ("other", "here"):
            lease = await store.runs.take_lease(run.name, holder, LEASE_S, force=True)
        await run.lead(str(lease.token))
        with pytest.raises(NotLeader), run.journal.recording_refusals():
            await store.counters.add(run.name, {}, older)
        assert run.journal.leading

    on_a_run(server, work)


def test_a_run_that_is_dropped_while_its_leader_is_looked_up_is_a_refusal(server: EmbeddedServer) -> None:
    """Not an internal error, which clients take for a bug: the run is read again with the next call."""

    async def main() -> None:
        store = await Store.open(server.url)
        host = Service(store, url="http://t", embedded=True)
        transport = httpx.ASGITransport(application(host, Tokens(None)))
        refusal = NotLeader("led elsewhere", name="leader", value="http://leader")
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            with mock.patch.object(host, "run", mock.AsyncMock(side_effect=refusal)):
                answer = await http.get("/v1/runs/r")
        await store.close()
        assert (answer.status_code, answer.json()["detail"]) == (refusal.status, "led elsewhere")

    asyncio.run(main())


def test_a_call_that_the_end_of_the_service_cuts_off_is_to_be_sent_again(server: EmbeddedServer) -> None:
    """As `uvicorn` cancels it while Redis does not answer; clients take 500 for a bug, and end."""

    async def main() -> None:
        store = await Store.open(server.url)
        host = Service(store, url="http://t", embedded=True)
        transport = httpx.ASGITransport(application(host, Tokens(None)))
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            started = asyncio.Event()

            async def hang(*_: object) -> None:
                started.set()
                await asyncio.Event().wait()

            with mock.patch.object(host, "run", hang):
                asked = asyncio.create_task(http.get("/v1/runs/r"))
                await started.wait()
                asked.cancel("timeout graceful shutdown exceeded")
                answer = await asked
        await store.close()
        assert answer.status_code == 503 and answer.headers["retry-after"] and "send it again" in answer.text

    asyncio.run(main())
