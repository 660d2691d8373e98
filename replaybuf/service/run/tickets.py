"""Tickets of one run: issue, give back, expire, and complete when the group is stored."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import NamedTuple

from replaybuf.errors import Invalid, StrategyFault
from replaybuf.kernel.decide.config import decide_failed_share
from replaybuf.kernel.decide.intake import count_held, decide_tickets
from replaybuf.kernel.decide.prompts import decide_failed_prompt
from replaybuf.kernel.decide.records import check_adapter
from replaybuf.kernel.state.return_reasons import is_failure
from replaybuf.kernel.state.tickets import Ticket, TicketChange, parse_ticket, prompt_key, reissue_of
from replaybuf.kernel.strategy.rates import Rates
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.kernel.strategy.waiting_answer import waiting
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.long_polls import Gone, LongPolls, Round, Waiter
from replaybuf.service.run.side_state import SideState
from replaybuf.store import IndexChunk
from replaybuf.wire import contract
from replaybuf.wire.contract import WaitingAnswer

logger = logging.getLogger(__name__)


class _Wish(NamedTuple):
    """A producer and the number of tickets that it asks for."""

    producer: str
    wanted: int


_Issued = list[Ticket] | WaitingAnswer
_Producer = Waiter[_Wish, _Issued]
"""A producer that waits for tickets."""


class Tickets:
    """Decides about the tickets of one run and makes each decision durable."""

    def __init__(self, journal: Journal, side_state: SideState, selector: Selector, rates: Rates) -> None:
        self._journal = journal
        self._side_state = side_state
        self._book = side_state.book
        self._selector = selector
        self._rates = rates
        self._polls = LongPolls(journal)
        self._producers = journal.presence.producers
        self._to_take_back: set[str] = set()

    @property
    def rejected(self) -> Mapping[str, int]:
        """Rejected appends by reason, since the run was created."""
        return self._side_state.rejected

    async def issue(
        self,
        producer: str,
        count: int,
        adapter: str,
        wait_s: float,
        gone: Gone | None = None,
        max_tokens: int | None = None,
    ) -> contract.Tickets:
        """Issue up to `count` tickets; wait up to `wait_s` for the first one, then answer why there is none.

        Producers are served in the order of their requests. `gone` raises when the caller leaves: its tickets would be
        out until they expire. `max_tokens`: most tokens that the caller samples per rollout.
        """
        journal, last_asked_s = self._journal, self._selector.last_asked_s
        if count < 1:
            raise Invalid(f"count is {count}; the minimum is 1", name="count", value=count, bound=1)
        check_adapter(adapter, journal.config)
        inputs = self._selector.inputs
        inputs.max_tokens = max(inputs.max_tokens, max_tokens or 0)
        last_asked_s[adapter] = journal.clock.monotonic()
        serve = functools.partial(self._serve, adapter)
        question = self._polls.question(adapter, serve, lambda: (journal.changes, self._selector.moment))
        outcome = await question.answer(_Wish(producer, count), wait_s, gone)
        last_asked_s[adapter] = journal.clock.monotonic()
        published = journal.state.published[adapter]
        if isinstance(outcome, WaitingAnswer):
            waits = journal.presence.name_missing(outcome, attached=bool(journal.state.epoch))
            return contract.Tickets(tickets=[], published_version=published, waiting=waits)
        logger.debug("tickets issued run=%s producer=%s count=%d", journal.name, producer, len(outcome))
        tickets = [
            contract.Ticket(
                ticket=str(ticket),
                prompt_index=ticket.prompt_index,
                attempt=ticket.attempt,
                reissue=ticket.reissue,
                expires_in_s=self._book.ttl_s,
            )
            for ticket in outcome
        ]
        return contract.Tickets(tickets=tickets, published_version=published)

    async def _serve(self, adapter: str, producers: Iterable[_Producer]) -> Round[_Wish, _Issued]:
        """Issue tickets to as many of the waiting producers as possible, by one decision."""
        journal = self._journal
        self._selector.last_asked_s[adapter] = journal.clock.monotonic()
        try:
            async with journal.decision():
                # Before the look at Redis, whose reply may be late: who asks later may know of groups that it lacks.
                asked = list(itertools.islice(producers, contract.TICKETS_AT_ONCE))
                await self._expire(await self.refresh())
                with self._polls.pace.work():
                    first = [producer for producer in asked if not producer.answer.done()]
                    wanted = sum(producer.request.wanted for producer in first)
                    now_s = journal.clock.monotonic()
                    change = decide_tickets(journal.state, self._book, self._selector, adapter, wanted, now_s)
                if isinstance(change, WaitingAnswer):
                    return Round([], change)
                shares = _share(change.issued, first)
                self._assign(change, shares)
                await self._save(change)
                for ticket in [issued for producer, share in shares if producer.answer.done() for issued in share]:
                    # The producer left meanwhile: nobody would use its ticket until that expires.
                    if self._book.holds(ticket):  # no group of the prompt was stored meanwhile
                        await self._save(self._book.give_back(ticket, "shutdown"))
                return Round(shares)
        except StrategyFault:  # `admit` failed: the decision has paused the run
            return Round([], waiting("paused", count_held(journal.state, self._selector, adapter), journal.state))

    def _assign(self, change: TicketChange, shares: Iterable[tuple[_Producer, list[Ticket]]]) -> None:
        """Record which producer got which ticket; it calls, so it is not gone."""
        known, now_s = self._producers, self._journal.clock.monotonic()
        for waiter, tickets in shares:
            producer = known.see(waiter.request.producer, now_s)
            self._book.assign(change, tickets, producer.name, named=producer.announced)

    async def give_back(self, text: str, reason: str) -> None:
        """Take a ticket back; its prompt has failed after `max_attempts` failed tickets. Raises `NotFound`."""
        ticket = parse_ticket(text)
        async with self._deciding(taking_back=True):
            change = self._book.give_back(ticket, reason)
            logger.info("ticket returned run=%s ticket=%s reason=%s", self._journal.name, text, reason)
            await self._save(change, reason)
            if is_failure(reason):
                self._count_faults(change)
        self._journal.notify()

    async def expire(self) -> None:
        """Take back tickets past their deadline."""
        if self._side_state.must_reload or self._book.may_expire(self._journal.clock.monotonic()):
            async with self._deciding() as seen_s:
                await self._expire(seen_s)
            self._journal.notify()

    async def _expire(self, seen_s: float) -> None:
        change = self._book.expire(seen_s)
        if change:
            logger.warning("tickets expired run=%s count=%d", self._journal.name, change.counts["expired"])
            await self._save(change, "expired")
            self._count_faults(change)

    async def take_back(self, *, heard: bool) -> None:
        """Take back the tickets of producers that are gone; `heard`: this server could have answered them."""
        journal = self._journal
        heartbeat_s = journal.config.tickets.heartbeat_s
        for name in self._producers.listen(journal.clock.monotonic(), heartbeat_s, heard=heard):
            held, message = self._book.out_with(name), "producer is gone run=%s producer=%s silent_s=%g tickets=%d"
            logger.log(logging.WARNING if held else logging.INFO, message, journal.name, name, heartbeat_s, held)
            self._to_take_back.add(name)
        if not self._to_take_back:
            return
        async with self._deciding(taking_back=True):
            gone = {producer.name for producer in self._producers.list_gone()}
            self._to_take_back &= {name for name in gone if self._book.out_with(name)}
            change = self._book.take_back(self._to_take_back, contract.TICKETS_AT_ONCE)
            if change:
                await self._save(change, "producer_gone")
                self._count_faults(change)
        journal.notify()

    def _count_faults(self, change: TicketChange) -> None:
        for name, count in change.producers.items():
            if producer := self._producers.find(name):
                producer.faults += count

    def start_over(self) -> None:
        """Let all producers count as seen now: this server has just begun to lead."""
        now_s = self._journal.clock.monotonic()
        self._producers.start_over(now_s)
        self._producers.announce(self._book.named_producers, now_s)

    async def _save(self, change: TicketChange, reason: str = "") -> None:
        journal = self._journal
        with self._side_state.uncertain_on_failure():
            # The ledger first: if we die between, the ticket of a failed prompt is still there and fails again.
            for ticket in change.failed:
                await journal.append(decide_failed_prompt(journal.state, ticket, reason, journal.clock.wall()))
            await self._side_state.save(change)
        if change.failed:
            await self._apply_failed_rule()

    async def apply_failed_rule(self) -> None:
        """Apply the rule for failed prompts: a crash may have come between a failure and what follows from it."""
        if decide_failed_share(self._journal.state, 0.0):
            async with self._deciding():
                await self._apply_failed_rule()
            self._journal.notify()

    async def _apply_failed_rule(self) -> None:
        journal = self._journal
        record = decide_failed_share(journal.state, journal.clock.wall())
        if record:
            logger.error("run %s run=%s reason=%s", record.state, journal.name, record.reason)
            await journal.append(record)

    def complete(self, chunks: Iterable[IndexChunk]) -> None:
        """Remove the tickets of stored groups and measure how long they took."""
        prompts = [(prompt, reissue) for chunk in chunks for prompt, reissue in _prompts_of(chunk)]
        if not prompts:
            return
        change = self._remove([prompt for prompt, _ in prompts], {prompt: n for prompt, n in prompts if n})
        now_s = self._journal.clock.monotonic()
        self._rates.record_durations(now_s - issued_s for issued_s in change.issue_times_s)
        for name, count in change.producers.items():
            if name in self._producers:
                self._producers.record_groups(name, count, now_s)

    def _remove(self, prompts: Iterable[tuple[str, int]], reissues: Mapping[tuple[str, int], int]) -> TicketChange:
        change = self._book.complete(prompts, reissues)
        self._side_state.remove_later(change.texts_to_drop)
        return change

    def follow_config(self) -> None:
        """Apply a change of the adapters: prompts of new ones, and no tickets of removed ones."""
        config = self._journal.config
        self._book.supplies = config.supplies
        removed, pending = {*config.adapter_names} - {*config.kept_adapters}, self._book.pending_prompts()
        self._remove([prompt for prompt in pending if prompt[0] in removed], pending)

    async def reload(self) -> None:
        """Replace the book with the one in Redis, less the prompts that are stored or failed.

        Groups that other servers have just stored are read too: nobody awaits them, so the next batch must see them.
        """
        with self._side_state.uncertain_on_failure():
            await self._side_state.reload()
            journal, pending = self._journal, self._book.pending_prompts()
            keys = [prompt_key(*prompt, reissue) for prompt, reissue in pending.items()]
            numbers = await journal.store.groups.find_numbers(journal.name, keys)
            failed = journal.state.failed.prompts
            self._remove([p for p, n in zip(pending, numbers, strict=True) if n is not None or p in failed], pending)
            self.follow_config()
            if max((n for n in numbers if n is not None), default=0) > journal.state.stored:
                await journal.pull()

    @contextlib.asynccontextmanager
    async def _deciding(self, *, taking_back: bool = False) -> AsyncIterator[float]:
        """Decide about tickets, with Redis and all groups taken into account that were stored by the time it yields."""
        async with self._journal.decision():
            yield await self.refresh(taking_back=taking_back)

    async def refresh(self, *, taking_back: bool = False) -> float:
        """Bring the book up to Redis and to all groups stored by now; return this time. Called within a decision."""
        now_s = self._journal.clock.monotonic()
        if self._side_state.must_reload:
            await self.reload()
        due = any(self._book.due_of(name) for name in self._journal.config.kept_adapters)
        if taking_back or due or self._book.may_expire(now_s):
            # Other servers store groups: their prompts must neither fail nor be issued again.
            await self._journal.pull()
        # Prompts of stored but unsettled groups must neither fail, nor be issued again, nor hold up a batch.
        self.complete(self._journal.unsettled)
        self._book.reissue(self._journal.state.reissues)
        return now_s


def _share(tickets: list[Ticket], producers: Iterable[_Producer]) -> list[tuple[_Producer, list[Ticket]]]:
    """Share tickets among producers: each gets what it asked for, until none is left."""
    shares: list[tuple[_Producer, list[Ticket]]] = []
    for producer in producers:
        if not tickets:
            break
        shares.append((producer, tickets[: producer.request.wanted]))
        tickets = tickets[producer.request.wanted :]
    return shares


def _prompts_of(chunk: IndexChunk) -> list[tuple[tuple[str, int], int]]:
    """List (adapter, prompt index) and reissue of the groups that came by a ticket."""
    groups = zip(chunk.strings, chunk.values["prompt_index"].tolist(), strict=True)
    return [((strings.adapter, index), reissue_of(strings.ticket)) for strings, index in groups if index >= 0]
