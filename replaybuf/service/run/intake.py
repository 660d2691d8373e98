"""Where groups come in: judged (`judge`), stored, taken into the index; and the tickets that let them come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from replaybuf.errors import GroupRejected, Invalid, InvalidGroups, NoRoom, NotLeader, StrategyFault, TooLarge
from replaybuf.kernel.limits import Load, fitting
from replaybuf.kernel.selection import Selector
from replaybuf.kernel.tickets import TicketBook, TicketChange, parse_ticket, prompt_key
from replaybuf.kernel.waiting import waiting
from replaybuf.service.run.admission import Incoming, Judge
from replaybuf.service.run.eviction import Eviction
from replaybuf.service.run.gate import Gate
from replaybuf.service.run.journal import Journal
from replaybuf.store import Appended, Book, IndexChunk, ToAppend, keys
from replaybuf.store.chunks import portions
from replaybuf.store.entries import EntryStrings
from replaybuf.wire.config import RunConfig
from replaybuf.wire.contract import TICKETS_AT_ONCE, Amount, WaitingAnswer
from replaybuf.wire.ledger import TicketRecord

logger = logging.getLogger(__name__)

ADOPTED_AT_ONCE = 2_000
"""Payloads that a new leader makes permanent per tick."""
APPENDED_AT_ONCE = 64
"""Groups that are stored at once. Between two portions, and between judging two groups, others have the event loop: a
body of thousands of groups must not make a trainer wait, nor let the lease run out."""


def _never() -> bool:
    return False


class Door:
    """Appends and tickets of one run. `rejected` counts refused groups by reason, for good.

    The book of tickets is changed first, then storage. Where the outcome of that is not known (connection lost), the
    next decision about tickets first reads them from storage: what was written counts, what was not did not happen.
    """

    def __init__(self, journal: Journal, selector: Selector, book: TicketBook, eviction: Eviction, gate: Gate) -> None:
        self.rejected: Counter[str] = Counter()
        self.duplicates = 0
        self.judge = Judge(journal, book)
        self._journal = journal
        self._selector = selector
        self._book = book
        self._eviction = eviction
        self._gate = gate
        self._to_adopt: deque[tuple[int, int]] = deque()
        self._settling = asyncio.Lock()
        self._permanent: set[int] = set()
        self._unsure = False
        self._entering = Load()

    async def look(self) -> None:
        """Take in what storage holds of tickets and refusals."""
        self.read((await self._journal.store.books([self._journal.name]))[0])

    def read(self, book: Book) -> None:
        """Take in what storage held of tickets and refusals when `book` was read."""
        counts = book.counts
        refused = {k.removeprefix("rejected:"): v for k, v in counts.items() if k.startswith("rejected:")}
        self.duplicates = counts.get("duplicate", 0)
        self.rejected.clear()
        self.rejected.update(refused)
        self._book.restore(book.tickets, counts)
        self._journal.freed(counts.get("freed_through", 0))

    async def restore(self) -> None:
        """Take in the tickets as storage holds them, less those whose prompt has come to its end."""
        await self.look()
        prompts = self._book.prompts_at_hand()
        numbers = await self._journal.store.numbers_of(self._journal.name, [prompt_key(*prompt) for prompt in prompts])
        failed = self._journal.state.failed_prompts
        await self._strike([p for p, n in zip(prompts, numbers, strict=True) if n is not None or p in failed])

    async def open(self) -> None:
        """Get ready to lead. Called while taking over."""
        self._unsure = False
        await self.restore()
        self._to_adopt = deque(self._recent())

    def _recent(self) -> Iterator[tuple[int, int]]:
        """Name, in pieces, the groups that may still have a TTL: their producer may have died before it went."""
        index = self._journal.state.index
        recent = index["number"][index["arrival_s"] > self._journal.clock() - keys.ORPHAN_TTL_S]
        for start in range(0, len(recent), ADOPTED_AT_ONCE):
            piece = recent[start : start + ADOPTED_AT_ONCE]
            yield int(piece[0]), int(piece[-1])

    async def adopt_recent(self) -> None:
        """Make a piece of the payloads permanent that were published before this server led."""
        if self._to_adopt:
            first, last = self._to_adopt[0]
            await self._adopt(await self._journal.store.strings(self._journal.name, first, last))
            self._to_adopt.popleft()

    # ------------------------------------------------------------------ groups

    async def append(self, incoming: Sequence[Incoming]) -> list[dict[str, Any]]:
        """Store groups, portion after portion; one result each.

        Raises `TooLarge`, `InvalidGroups` where none could enter, `NoRoom`, before which some may be stored.
        """
        results: list[dict[str, Any]] = []
        for portion in portions(incoming, _nbytes, APPENDED_AT_ONCE):
            results += await self._append(portion)
        # Last: where there is no room, all is sent again, and counted then.
        await self._count_rejected(Counter(result["reason"] for result in results if result["status"] == "rejected"))
        if all(result["status"] == "rejected" for result in results):
            raise self._refusal(results)
        return results

    async def _append(self, portion: Sequence[Incoming]) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = [{} for _ in portion]
        taken, appended = Load(), []
        try:
            async with self._gate.passing():
                token = self._journal.check_leading()
                ready = await self._judge(portion, results)
                fits, refusal = await self._fitting([item for _, item in ready])
                entering = [item for _, item in ready[:fits]]
                # What they take is held for them until they are in the index.
                taken = sum(map(_load, entering), Load())
                self._entering += taken
                appended = await self._publish(entering, token)
            if appended:
                await self.pull(max(outcome.number for outcome in appended))
        finally:
            self._entering -= taken
        for (position, _), outcome in zip(ready, appended, strict=False):
            results[position] = _answer(outcome)
        if refusal:
            raise refusal
        return results

    async def _judge(self, portion: Sequence[Incoming], results: list[dict[str, Any]]) -> list[tuple[int, ToAppend]]:
        """Return what is let in, with its position; the others get their results."""
        ready: list[tuple[int, ToAppend]] = []
        refused: dict[int, GroupRejected] = {}
        for position, item in enumerate(portion):
            try:
                ready.append((position, self.judge.admit(item)))
            except GroupRejected as rejection:
                refused[position] = rejection
            await asyncio.sleep(0)
        for position, result in zip(refused, await self._answer_refused(portion, refused), strict=True):
            results[position] = result
        return ready

    async def _answer_refused(
        self, portion: Sequence[Incoming], refused: Mapping[int, GroupRejected]
    ) -> list[dict[str, Any]]:
        """Answer for what is not let in: a repeat of a stored group is `duplicate`, whatever the bounds are now."""
        if not refused:
            return []
        journal = self._journal
        with journal.noting_loss():
            repeats = await journal.store.repeats(journal.name, [self.judge.names(portion[k]) for k in refused])
        self.duplicates += sum(repeat is not None for repeat in repeats)
        return [
            _answer(repeat)
            if repeat
            else _rejected(item.group.group_id if (item := portion[position]).group else None, rejection)
            for (position, rejection), repeat in zip(refused.items(), repeats, strict=True)
        ]

    async def _publish(self, items: list[ToAppend], token: str) -> list[Appended]:
        """Store groups under the fencing token by which they were judged."""
        journal = self._journal
        if not items:
            return []
        with journal.noting_loss():
            appended = await journal.store.append(journal.name, items, journal.state.published, journal.clock(), token)
        self.duplicates += sum(not (outcome.stored or outcome.taken) for outcome in appended)
        # Their payloads are permanent by now: to settle them need not see to it again, a quarter of all commands.
        self._permanent.update(outcome.number for outcome in appended if outcome.number > journal.state.stored)
        return appended

    async def _fitting(self, items: Sequence[ToAppend]) -> tuple[int, NoRoom | None]:
        """Count the first of these groups that have room; with the bound that stops the next.

        What is stored already takes no room. By tickets that is known here; of other ids storage is asked, and only
        where it matters.
        """
        fits, refusal = self._fit(items, [self._has_group(item) for item in items])
        if refusal:
            store, name = self._journal.store, self._journal.name
            numbers = await store.numbers_of(name, [item.group_id for item in items])
            fits, refusal = self._fit(
                items, [n is not None or self._has_group(item) for item, n in zip(items, numbers, strict=True)]
            )
        return fits, refusal

    def _fit(self, items: Sequence[ToAppend], stored: Sequence[bool]) -> tuple[int, NoRoom | None]:
        journal, limits = self._journal, self._journal.config.limits
        if limits.max_tokens_live is None and limits.max_bytes_live is None:
            return len(items), None
        held = Load(0, journal.state.live_totals().tokens, journal.state.live_bytes()) + self._entering
        coming = [Load() if there else _load(item) for item, there in zip(items, stored, strict=True)]
        return fitting(held, coming, limits, lambda: self._selector.lacking() - self._entering.groups)

    def _has_group(self, item: ToAppend) -> bool:
        """Say whether the prompt of a ticket's group has its group already."""
        if not item.prompt_key or item.group.prompt_index is None:
            return False
        prompt = item.group.adapter, item.group.prompt_index
        return not self._book.awaits(prompt) and prompt not in self._journal.state.failed_prompts

    async def _count_rejected(self, reasons: Counter[str]) -> None:
        if reasons:
            with self._unsure_on_failure():  # storage may have counted them: it is asked before the next decision
                await self._journal.store.count(
                    self._journal.name, {f"rejected:{name}": n for name, n in reasons.items()}
                )
            self.rejected.update(reasons)

    def _refusal(self, results: list[dict[str, Any]]) -> Invalid | TooLarge:
        if not results:
            return Invalid("groups is empty; at least one group is needed", name="groups", value=0, bound=1)
        first = results[0]
        if all(result["reason"] == "too_large" for result in results):
            return TooLarge(first["detail"], **{key: first.get(key) for key in ("name", "value", "bound")})
        which = "the group was rejected" if len(results) == 1 else f"all {len(results)} groups were rejected; the first"
        return InvalidGroups(
            f"{which}: {first['reason']}: {first['detail']}",
            results,
            name="groups",
            value=first["reason"],
        )

    async def pull(self, through: int | None = None) -> None:
        """Take in what is new in the index stream, whoever wrote it; `through` is the last group that is confirmed."""
        await self._journal.pull(through)
        await self.settle()

    async def follow(self) -> None:
        """Take in what the leader wrote."""
        await self._journal.catch_up()
        await self.settle()
        await self._journal.notify()

    async def settle(self) -> None:
        """Do what arrivals ask for: make payloads permanent; as leader, strike tickets and evict what came too late.

        Arrivals that meet trouble with Redis stay in the queue for the next call.
        """
        arrived = self._journal.arrived
        if not arrived:
            return
        async with self._settling:
            while arrived:
                chunk = arrived[0]
                if chunk.malformed.any():
                    bad = chunk.numbers[chunk.malformed].tolist()
                    logger.error("index entries are none of ours run=%s numbers=%s", self._journal.name, bad)
                numbers = chunk.numbers.tolist()
                came = zip(numbers, chunk.strings, strict=True)
                await self._adopt(strings for number, strings in came if number not in self._permanent)
                self._permanent.difference_update(numbers)
                if self._journal.leading:
                    self._took(await self._strike(prompts_of(chunk)))
                    rates = self._selector.views.rates  # what was stored before it measured is history that was read
                    since = chunk.values["arrival_s"] >= rates.since_s
                    rates.stored(self._journal.clock(), int(since.sum()))
                    await self._eviction.of_arrivals(chunk.numbers)
                arrived.popleft()
        await self._journal.notify()

    async def _adopt(self, entries: Iterable[EntryStrings]) -> None:
        await self._journal.store.adopt([entry.payload_key for entry in entries if entry.payload_key])

    # ------------------------------------------------------------------ tickets

    async def take_tickets(
        self, producer: str, count: int, adapter: str, wait_s: float, gone: Callable[[], bool] = _never
    ) -> dict[str, Any]:
        """Issue up to `count` tickets, waiting up to `wait_s` for the first; where there is none, say why.

        `gone`: whether the caller went away meanwhile. Tickets it never heard of would be out until they expire.
        """
        journal = self._journal
        if count < 1:
            raise Invalid(f"count is {count}; at least 1 is needed", name="count", value=count, bound=1)
        check_adapter(adapter, journal.config)
        outcome = await journal.until(lambda: self._issue(adapter, count, gone), wait_s)
        self._selector.last_asked_s[adapter] = journal.clock()
        answer: dict[str, Any] = {"tickets": [], "published_version": journal.state.published[adapter]}
        if isinstance(outcome, WaitingAnswer):
            return answer | {"waiting": outcome}
        logger.debug("tickets issued run=%s producer=%s count=%d", journal.name, producer, len(outcome.issued))
        answer["tickets"] = [
            {
                "ticket": str(ticket),
                "prompt_index": ticket.prompt_index,
                "attempt": ticket.attempt,
                "expires_in_s": self._book.ttl_s,
            }
            for ticket in outcome.issued
        ]
        return answer

    async def _issue(self, adapter: str, count: int, gone: Callable[[], bool]) -> TicketChange | WaitingAnswer:
        journal, book = self._journal, self._book
        self._selector.last_asked_s[adapter] = journal.clock()
        try:
            async with self._deciding():
                await self._expire()
                have = self._held(adapter)
                if journal.state.state != "running":
                    return waiting(journal.state.state, have, journal.config)
                if book.used_up(adapter):
                    # The supply is used up, though a ticket that is out may still come back.
                    blocked_on = "producers" if book.out_of(adapter) else "nothing"
                    return waiting("finished", have, journal.config, blocked_on=blocked_on)
                capacity = self._selector.capacity(adapter)
                if capacity < 1 or gone():
                    return self._selector.rate_limited(adapter, have)
                count = min(count, capacity, TICKETS_AT_ONCE)
                change = book.issue(adapter, count, journal.state.generation, journal.clock())
                await self._keep(change)
                return change
        except StrategyFault:  # of `admit`: the decision has paused the run with it
            return waiting("paused", self._held(adapter), journal.config)

    def _held(self, adapter: str) -> Amount:
        """Count the groups, of an adapter, that are live or may come by a ticket, and the tokens of the live ones."""
        view = self._selector.views.view(self._journal.state.next_step, adapter=adapter)
        return Amount(view.groups_live + view.tickets_out, view.tokens_live)

    async def return_ticket(self, text: str, reason: str) -> None:
        """Take a ticket back; after `max_attempts` failed ones its prompt is recorded as failed. Raises `NotFound`."""
        ticket = parse_ticket(text)
        async with self._deciding():
            change = self._book.give_back(ticket, reason)
            logger.info("ticket returned run=%s ticket=%s reason=%s", self._journal.name, text, reason)
            await self._keep(change, reason)
        await self._journal.notify()

    async def expire_tickets(self) -> None:
        """Take back tickets past their deadline."""
        if self._unsure or self._book.may_expire(self._journal.clock()):
            async with self._deciding():
                await self._expire()
            await self._journal.notify()

    async def _expire(self) -> None:
        change = self._book.expire(self._journal.clock())
        if change:
            logger.warning("tickets expired run=%s count=%d", self._journal.name, change.counts["expired"])
            await self._keep(change, "expired")

    async def _keep(self, change: TicketChange, reason: str = "") -> None:
        journal = self._journal
        with self._unsure_on_failure():
            # The ledger first: a prompt whose end is not recorded must still be in the set of tickets.
            for ticket in change.failed:
                record = TicketRecord(
                    adapter=ticket.adapter,
                    prompt_index=ticket.prompt_index,
                    outcome="failed",
                    attempts=ticket.attempt,
                    reason=reason,
                    at_s=journal.clock(),
                )
                await journal.append(record)
            await self._store(change)

    async def _strike(self, prompts: Iterable[tuple[str, int]]) -> TicketChange:
        """Strike the tickets of prompts whose group is stored."""
        change = self._book.done(prompts)
        with self._unsure_on_failure():
            # Not durably: who leads next strikes again the prompts whose group is stored.
            await self._store(change, durably=False)
        return change

    def _took(self, change: TicketChange) -> None:
        """Measure how long the groups took whose tickets were struck just now."""
        now_s = self._journal.clock()
        self._selector.views.rates.took(now_s - since_s for since_s in change.done_since_s)

    async def _store(self, change: TicketChange, *, durably: bool = True) -> None:
        if not change:
            return
        journal = self._journal
        try:
            with journal.noting_loss():
                await journal.store.change_tickets(
                    journal.name,
                    journal.token or "",
                    drop=[str(ticket) for ticket in change.drop],
                    deadlines_s={str(ticket): at_s for ticket, at_s in change.deadlines_s.items()},
                    counts=change.counts,
                    durably=durably,
                )
        except NotLeader:
            journal.follow(None)
            raise

    @contextlib.asynccontextmanager
    async def _deciding(self) -> AsyncIterator[None]:
        """Decide about tickets, with what storage holds of them known."""
        async with self._journal.decision():
            if self._unsure:
                with self._unsure_on_failure():
                    self._unsure = False  # first: a strike that fails meanwhile makes it unsure again
                    await self.restore()
            # Groups that are folded and not settled yet: their prompts must neither fail nor be issued again.
            while change := await self._strike(
                prompt for arrivals in self._journal.arrived for prompt in prompts_of(arrivals)
            ):
                self._took(change)
            yield

    @contextlib.contextmanager
    def _unsure_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._unsure = True
            raise


def check_adapter(adapter: str, config: RunConfig) -> None:
    """Raise `Invalid` where a run has no policy of that name, naming those it has."""
    if adapter not in config.policies:
        told = f"the run has adapters {sorted(config.adapters)}" if config.adapters else "the run has no adapters"
        known = sorted(config.adapters)
        raise Invalid(f"adapter is {adapter!r}; {told}", name="adapter", value=adapter, bound=known)


def _answer(outcome: Appended) -> dict[str, Any]:
    """Say what became of a group that storage was given."""
    if outcome.taken:
        detail = f"group {outcome.group_id!r} is stored and is not of this ticket's prompt; take another group_id"
        return _rejected(outcome.group_id, GroupRejected("group_id_taken", detail))
    return {"group_id": outcome.group_id, "status": "stored" if outcome.stored else "duplicate"}


def _rejected(group_id: str | None, rejection: GroupRejected) -> dict[str, Any]:
    result = {"group_id": group_id, "status": "rejected", "reason": rejection.reason, "detail": rejection.detail}
    told = {"name": rejection.name, "value": rejection.value, "bound": rejection.bound}
    return result if rejection.name is None else result | told


def _nbytes(item: Incoming) -> int:
    return item.group.nbytes if item.group else 0


def _load(item: ToAppend) -> Load:
    return Load(1, item.group.tokens, len(item.frame))


def prompts_of(arrivals: IndexChunk) -> list[tuple[str, int]]:
    """List the prompts whose groups came in."""
    indexes = arrivals.values["prompt_index"].tolist()
    return [(strings.adapter, i) for strings, i in zip(arrivals.strings, indexes, strict=True) if i >= 0]
