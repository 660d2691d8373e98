"""What is seen of a run: its state, ledger and groups at every server, while the load runs and at rest."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from replaybuf.kernel.state.group_query import GroupQuery
from replaybuf.kernel.state.tickets import prompt_key
from replaybuf.service.host import Service
from replaybuf.service.http.call.browse import describe_group, list_groups
from replaybuf.service.report.status import group_counts
from replaybuf.service.run.journal import Journal
from replaybuf.store import Store, keys
from replaybuf.store.ledger import _reaching as reaching
from replaybuf.store.redis.connection import Connection, text
from replaybuf.wire.answer.browse import GroupPage
from replaybuf.wire.answer.run_status import RunStatus
from replaybuf.wire.contract import AttachRequest
from replaybuf.wire.ledger import decode_record
from tests.chaos.content import checksum, make_group
from tests.chaos.history import (
    UNAVAILABLE,
    AnyEvent,
    Drained,
    Event,
    Folded,
    GroupSeen,
    LedgerSeen,
    PayloadRead,
    StateSeen,
)
from tests.chaos.run_history import RunHistory
from tests.simulation.producer_calls import ServiceCalls
from tests.simulation.producing import Sent, send, take
from tests.simulation.redis_model.commands import zcard
from tests.simulation.redis_model.redis import Redis
from tests.simulation.servers import Client, Gone, Server
from tests.simulation.training import ask, attach
from tests.simulation.world import World

PERIOD_S = 0.7
PAGE = 1000
DRAIN_S = 60.0
WORLD_SIZE = 2
SENT_AGAIN = 12
TRIES = 10


class Observer:
    """Follows one run at one server: its state, and new entries of ledger and index."""

    def __init__(self, world: World, client: Client, run: str, server: Server, history: list[Event]) -> None:
        self._world, self._client, self._run, self._server, self._history = world, client, run, server, history
        self._entry = self._number = 0

    async def work(self, stopping: asyncio.Event) -> None:
        """Look now and then until `stopping` is set."""
        while not stopping.is_set():
            await asyncio.sleep(PERIOD_S)
            await self.look()

    async def look(self, moment: str = "") -> StateSeen | None:
        """Record the state and all new entries; return the state."""

        async def work(service: Service, gone: Gone) -> RunStatus:
            return (await service.run(self._run)).describe()

        seen = await self._client.observe(self._run, work, only=None if moment else self._server)
        if seen.result is None:
            return None
        state = StateSeen(**seen.seen, state=msgspec.to_builtins(seen.result), moment=moment)
        self._history.append(state)
        await self._follow_ledger()
        await self.follow_groups()
        return state

    async def _follow_ledger(self) -> None:
        async def work(service: Service, gone: Gone) -> list[tuple[int, dict[str, object]]]:
            run = await service.run(self._run)
            return [
                (entry, msgspec.to_builtins(record, str_keys=True))
                async for entry, record in run.journal.records(self._entry, PAGE)
            ]

        page = (await self._client.observe(self._run, work, only=self._server)).result or []
        for entry, record in page:
            seen = LedgerSeen(
                at_s=self._world.now_s(), run=self._run, server=self._server.url, entry=entry, record=record
            )
            self._history.append(seen)
            self._entry = entry

    async def follow_groups(self, *, last: bool = False) -> None:
        """Record new groups; with `last`, all groups."""

        async def work(service: Service, gone: Gone) -> GroupPage:
            run = await service.run(self._run)
            if last:
                await run.read_streams()  # a follower that was stopped until now answers with what it knew
            return await list_groups(run, GroupQuery(), None if last else self._number or None, PAGE)

        page = (await self._client.observe(self._run, work, only=self._server)).result
        for group in page.groups if page else ():
            self._number = group.number
            seen = GroupSeen.of(group, at_s=self._world.now_s(), run=self._run, server=self._server.url, last=last)
            self._history.append(seen)


class Rest:
    """Brings a run to rest after the faults, and looks at it closely, before and after a last restart."""

    def __init__(self, world: World, client: Client, run: str, redis: Redis, history: list[Event]) -> None:
        self._world, self._client, self._run, self._redis, self._history = world, client, run, redis, history
        self._calls = ServiceCalls(client, run)
        self._epoch = 0

    async def drain(self) -> None:
        """Append the group of every prompt that is due, until no ticket is out and no prompt is due."""
        ends_s = self._world.now_s() + DRAIN_S
        while (left := self._tickets_left()) and self._world.now_s() < ends_s:
            for adapter in self._world.mix.policies:
                await self._append_due(adapter)
            await asyncio.sleep(0.3)
        stood = f"{left} tickets are left" if left else ""
        self._history.append(Drained(at_s=self._world.now_s(), run=self._run, drained=not left, stood=stood))

    async def _append_due(self, adapter: str) -> None:
        taken = await take(self._calls, "rest", 4, adapter, self._history)
        version = taken.published_version if taken else 0
        for ticket in taken.tickets if taken else ():
            name = prompt_key(adapter, ticket.prompt_index)
            group = make_group(name, version, named=False, ticket=ticket.ticket, adapter=adapter)
            for _ in range(TRIES):
                sent = [Sent(name, group, ticket.prompt_index)]
                (outcome,) = await send(self._calls, sent, self._history, frames=True)
                if outcome not in UNAVAILABLE:
                    break
                await asyncio.sleep(0.2)

    def _tickets_left(self) -> int:
        name = keys.tickets(self._run)
        return zcard(self._redis.server_of(name).values, [name.encode()])

    async def attach(self) -> None:
        """Attach at the current step, to ask for a batch before and after the restart."""
        for _ in range(10):
            got, _ = await attach(self._client, self._run, AttachRequest(dp_world_size=WORLD_SIZE), self._history)
            if got:
                self._epoch = got.epoch
                return

    async def look(self, observer: Observer, moment: str) -> None:
        """Record the state, and the newest batch that is still kept."""
        seen = await observer.look(moment)
        if seen is None:
            raise TimeoutError(f"run {self._run} has no state {moment} the restart")
        step = seen.state["step"] - 1
        for rank in range(WORLD_SIZE if step >= seen.state["oldest_step"] else 0):
            await ask(self._client, self._run, step, (self._epoch, WORLD_SIZE), rank, self._history)

    async def send_again(self) -> None:
        """Send groups again that are stored: some, and all that nobody has seen, as their history may be trimmed."""
        self.fill_ledger()  # it may say that a prompt of these has failed
        events = RunHistory(of_history([event for event in self._history if event.run == self._run]))
        answered = {
            sent.group_id: (sent.adapter, sent.prompt_index) for sent in events.sent if sent.outcome == "stored"
        }
        stored = events.stored_groups().values()
        ids, prompts = {group.group_id for group in stored}, {group.prompt for group in stored}
        again = dict(list(answered.items())[:: len(answered) // SENT_AGAIN + 1])
        again |= {name: prompt for name, prompt in answered.items() if name not in ids}
        unseen = sorted(events.issued() - prompts - events.failed())
        if self._world.mix.changes_adapters:  # prompts end with an adapter that is removed; the first one stays
            unseen = [prompt for prompt in unseen if prompt[0] == self._world.mix.policies[0]]
        again |= {prompt_key(*prompt): prompt for prompt in unseen}
        for name, (adapter, prompt_index) in again.items():
            group = Sent(name, make_group(name, 0, named=True, adapter=adapter), prompt_index)
            await send(self._calls, [group], self._history, frames=False)

    async def read_payloads(self) -> None:
        """Read the groups that may still be needed."""
        for state in ("live", "in_batches"):

            async def listed(service: Service, gone: Gone, state: str = state) -> list[dict[str, object]]:
                run = await service.run(self._run)
                page = await list_groups(run, GroupQuery(state=state), None, PAGE)
                return [await describe_group(run, group.group_id, None) for group in page.groups]

            for group in (await self._client.observe(self._run, listed)).result or []:
                self._history.append(self._payload(group))

    def _payload(self, group: dict[str, object]) -> PayloadRead:
        rollouts: list[dict[str, list[int]]] | None = group["rollouts"]  # type: ignore[assignment]
        sums = None
        if rollouts is not None:
            sums = [checksum([*one["prompt_ids"], *one["completion_ids"]]) for one in rollouts]
        return PayloadRead(
            at_s=self._world.now_s(),
            run=self._run,
            group_id=str(group["group_id"]),
            prompt_id=str(group["prompt_id"]),
            rollouts=sums,
        )

    def fill_ledger(self) -> None:
        """Record the entries that were trimmed before an observer saw them, as Redis got them."""
        seen = {event.entry for event in self._history if isinstance(event, LedgerSeen) and event.run == self._run}
        written = self._redis.records.get(keys.fence(self._run).encode(), {})
        for entry in sorted(written.keys() - seen):
            if entry < max(seen):
                raw, newest_group = written[entry]
                record = msgspec.to_builtins(reaching(decode_record(raw), text(newest_group)), str_keys=True)
                at_s = self._world.now_s()
                self._history.append(LedgerSeen(at_s=at_s, run=self._run, server="redis", entry=entry, record=record))

    async def fold(self) -> None:
        """Fold the streams anew, without any service."""
        store = Store(Connection(self._redis.url))
        journal = Journal(self._run, store)
        await journal.load()
        counts = group_counts(journal.state)
        self._history.append(Folded(at_s=self._world.now_s(), run=self._run, groups=counts))
        await store.close()


def of_history(history: list[Event]) -> list[AnyEvent]:
    """Sort events by time, as the checker needs them."""
    ordered: list[Any] = sorted(history, key=lambda event: event.at_s)
    return ordered
