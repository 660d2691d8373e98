"""A simulated producer: takes tickets, lets some expire, gives some back, sends groups late and again."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque

import msgspec

from replaybuf.kernel.state.tickets import prompt_key
from replaybuf.wire.contract import Tickets
from replaybuf.wire.group import Group
from tests.chaos.content import make_group
from tests.chaos.history import UNAVAILABLE, Event, GroupSent, TicketReturned, TicketsTaken
from tests.simulation.producer_calls import ProducerCalls
from tests.simulation.world import World

KEPT_GROUPS = 32


class TicketedGroup(GroupSent, frozen=True, kw_only=True):
    """A group with the ticket that it was sent with, "" without one."""

    ticket: str = ""


class Sent(msgspec.Struct):
    """A group on its way: its effective name, and when it may go."""

    name: str
    group: Group
    prompt_index: int | None
    due_s: float = 0.0


async def take(calls: ProducerCalls, producer: str, count: int, adapter: str, history: list[Event]) -> Tickets | None:
    """Take tickets and record it."""
    taken = await calls.take(producer, count, adapter)
    tickets = taken.result.tickets if taken.result else []
    named = [(ticket.ticket, ticket.prompt_index, ticket.attempt) for ticket in tickets]
    waiting = msgspec.to_builtins(taken.result.waiting) if taken.result else None
    history.append(TicketsTaken(**taken.seen, adapter=adapter, tickets=named, waiting=waiting))
    return taken.result


async def send(calls: ProducerCalls, groups: list[Sent], history: list[Event], *, frames: bool) -> list[str]:
    """Append groups and record it; return the outcome of each. `frames`: as frames, not as JSON."""
    done = await calls.append([sent.group for sent in groups], frames=frames)
    outcomes = []
    for sent, result in itertools.zip_longest(groups, done.result or []):
        outcome = result.status if result else str(done.seen["outcome"])
        reason = result.reason if result else None
        history.append(
            TicketedGroup(
                **(done.seen | {"outcome": outcome}),
                group_id=sent.name,
                prompt_index=sent.prompt_index,
                policy_version=sent.group.policy_version,
                adapter=sent.group.adapter,
                reason=reason,
                ticket=sent.group.ticket or "",
            )
        )
        outcomes.append(outcome)
    return outcomes


class Producer:
    """Feeds one run; `_late` groups are sent later, `_answered` ones may be sent again."""

    def __init__(self, world: World, calls: ProducerCalls, name: str, history: list[Event], ttl_s: float) -> None:
        self._calls, self._name = calls, name
        self._history, self._ttl_s, self._world, self._rng = history, ttl_s, world, world.rng
        self._late: list[Sent] = []
        self._answered: deque[Sent] = deque(maxlen=KEPT_GROUPS)
        self._count = itertools.count()
        # With many rewinds long: groups are on their way when their version is taken back.
        self._generating_s = 2.0 if world.mix.rewinds else 0.6

    async def work(self, stopping: asyncio.Event) -> None:
        """Produce until `stopping` is set."""
        while not stopping.is_set():
            groups = await self._from_tickets() + self._without_tickets()
            now_s = self._world.now_s()
            groups += [sent for sent in self._late if sent.due_s <= now_s]
            self._late = [sent for sent in self._late if sent.due_s > now_s]
            if self._answered and self._rng.random() < 0.2:
                groups.append(self._rng.choice(self._answered))
            await asyncio.sleep(self._rng.uniform(0.02, self._generating_s))
            if groups:
                await self._append(groups)

    async def _from_tickets(self) -> list[Sent]:
        count, adapter = self._rng.randint(1, 4), self._rng.choice(self._world.mix.policies)
        taken = await take(self._calls, self._name, count, adapter, self._history)
        if taken is None:
            await asyncio.sleep(0.2)
            return []
        made = []
        for ticket in taken.tickets:
            fate = self._rng.random()
            if fate < 0.06:
                await self._give_back(ticket.ticket)
                continue
            named = self._rng.random() < 0.1
            name = self._own_name() if named else prompt_key(adapter, ticket.prompt_index)
            version = max(0, taken.published_version - self._rng.choice((0, 0, 0, 1)))
            group = make_group(name, version, named=named, ticket=ticket.ticket, adapter=adapter)
            sent = Sent(name, group, ticket.prompt_index)
            if fate < 0.12:  # too late: the ticket is out again by then
                sent.due_s = self._world.now_s() + self._ttl_s * self._rng.uniform(1.0, 2.5)
                self._late.append(sent)
            else:
                made.append(sent)
        return made

    def _without_tickets(self) -> list[Sent]:
        if not self._answered or self._rng.random() > 0.05:
            return []
        name, last = self._own_name(), self._answered[-1].group
        return [Sent(name, make_group(name, last.policy_version, named=True, adapter=last.adapter), None)]

    def _own_name(self) -> str:
        return f"{self._name}-{next(self._count)}"

    async def _give_back(self, ticket: str) -> None:
        returned = await self._calls.give_back(ticket)
        self._history.append(TicketReturned(**returned.seen, ticket=ticket))

    async def _append(self, groups: list[Sent]) -> None:
        frames = self._rng.random() < 0.5
        outcomes = await send(self._calls, groups, self._history, frames=frames)
        for sent, outcome in zip(groups, outcomes, strict=True):
            if outcome in ("stored", "duplicate"):
                self._answered.append(sent)
            elif outcome in (*UNAVAILABLE, "not-durable"):  # a producer keeps the group and sends it again
                sent.due_s = self._world.now_s() + self._rng.uniform(0.0, 1.0)
                self._late.append(sent)
            elif sent.group.ticket and self._rng.random() < 0.5:
                await self._give_back(sent.group.ticket)
