"""Ticket book of a run: issue, return, expire and complete tickets, in memory.

A ticket allows a producer to generate the group of one prompt index. Every method returns what it changed; the caller
stores that in Redis.

Invariants, per adapter: each index below `next_index` is out, due again, failed or stored, and only one of these. A
reissue is due after its prompt was stored, by the ledger. `attempt` = 1 + failed tries of the prompt <= `max_attempts`.
`serial` = tickets issued for it so far: two texts differ also where a forgiven return leaves `attempt` as it was.

A ticket belongs to the producer that took it. If that one had sent a heartbeat, storage has its name too, so that the
next leader can take back the tickets of a producer that is gone.

All times are of one clock that does not jump. Storage has deadlines by the clock of Redis instead, which may jump, so
the deadline of a ticket that was loaded is an estimate: its expiry does not count as a failed attempt.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from replaybuf.errors import NotFound
from replaybuf.kernel.state.reissues import Reissues
from replaybuf.kernel.state.return_reasons import is_forgiven

_NUMBER = r"0|[1-9][0-9]{0,17}"
_TICKET = re.compile(
    rf"(?:(?P<adapter>.+)/)?t(?P<generation>{_NUMBER})-(?P<index>{_NUMBER})-(?P<attempt>[1-9][0-9]{{0,8}})"
    r"-(?P<serial>[1-9][0-9]{0,8})(?:-(?P<reissue>[1-9][0-9]{0,8}))?",
    re.DOTALL,
)


class Ticket(NamedTuple):
    """Permission to generate prompt `prompt_index` once; `generation` is the run's at issue.

    `reissue`: how often the prompt was issued again because its group was too stale.
    """

    adapter: str
    generation: int
    prompt_index: int
    attempt: int
    serial: int
    reissue: int = 0

    def __str__(self) -> str:
        prefix = f"{self.adapter}/" if self.adapter else ""
        suffix = f"-{self.reissue}" if self.reissue else ""
        return f"{prefix}t{self.generation}-{self.prompt_index}-{self.attempt}-{self.serial}{suffix}"

    @property
    def prompt(self) -> tuple[str, int]:
        """Adapter and prompt index."""
        return self.adapter, self.prompt_index

    @property
    def key(self) -> str:
        """Default `group_id` of its group."""
        return prompt_key(self.adapter, self.prompt_index, self.reissue)


def parse_ticket(text: str) -> Ticket:
    """Parse the text of a ticket. Raises `NotFound` for text that no ticket has."""
    match = _TICKET.fullmatch(text)
    if not match:
        raise NotFound(f"ticket {text!r} is not one this service issued", name="ticket", value=text)
    numbers = (int(match[name] or 0) for name in ("generation", "index", "attempt", "serial", "reissue"))
    return Ticket(match["adapter"] or "", *numbers)


def _stored_text(ticket: Ticket, producers: Mapping[Ticket, str]) -> str:
    return f"{ticket}@{producers[ticket]}" if ticket in producers else str(ticket)


def reissue_of(text: str | None) -> int:
    """Return the reissue in the text of a ticket; 0 for other text, which a direct writer may store."""
    match = _TICKET.fullmatch(text or "")
    return int(match["reissue"] or 0) if match else 0


def prompt_key(adapter: str, prompt_index: int, reissue: int = 0) -> str:
    """Return the default `group_id` of a ticket's group: `<adapter>/p<prompt_index>-<reissue>`, if there are both."""
    key = f"p{prompt_index}-{reissue}" if reissue else f"p{prompt_index}"
    return f"{adapter}/{key}" if adapter else key


@dataclasses.dataclass(slots=True)
class TicketChange:
    """Changes for the caller to store: tickets removed, issued and due again, increments of counters.

    `failed` holds the last ticket of each prompt that failed, `issue_times_s` the issue times of completed tickets.
    `given_to` and `taken_from`: producers whose names storage has, by issued and by removed ticket. `producers`:
    tickets removed that each producer had.
    """

    drop: list[Ticket] = dataclasses.field(default_factory=list)
    issued: list[Ticket] = dataclasses.field(default_factory=list)
    due: list[Ticket] = dataclasses.field(default_factory=list)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    failed: list[Ticket] = dataclasses.field(default_factory=list)
    issue_times_s: list[float] = dataclasses.field(default_factory=list)
    given_to: dict[Ticket, str] = dataclasses.field(default_factory=dict)
    taken_from: dict[Ticket, str] = dataclasses.field(default_factory=dict)
    producers: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def texts_to_drop(self) -> list[str]:
        """Texts in storage of the tickets to remove."""
        return [_stored_text(ticket, self.taken_from) for ticket in self.drop]

    @property
    def texts_to_add(self) -> list[str]:
        """Texts in storage of the issued tickets."""
        return [_stored_text(ticket, self.given_to) for ticket in self.issued]

    def __bool__(self) -> bool:
        return bool(self.drop or self.issued or self.due or self.counts)


class _OutTicket(NamedTuple):
    """A ticket that is out; `loaded`: from storage; `named`: storage has the name of its producer."""

    ticket: Ticket
    deadline_s: float
    loaded: bool = False
    producer: str = ""
    named: bool = False


class TicketBook:
    """Tickets that are out and prompts that are due again. `counts`: issued, expired and returned tickets.

    `supplies`: prompts of each adapter; None or absent = endless. A run without adapters has the one adapter "".
    """

    def __init__(self, ttl_s: float, max_attempts: int, supplies: Mapping[str, int | None]) -> None:
        self.ttl_s = ttl_s
        self.max_attempts = max_attempts
        self.supplies = supplies
        self.next_index: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self._out: dict[tuple[str, int], _OutTicket] = {}
        self._out_of: Counter[str] = Counter()
        self._out_with: Counter[str] = Counter()
        self._earliest_s = math.inf
        self._due: dict[tuple[str, int], Ticket] = {}
        # Ascending without sorting: an index enters once, when it is the highest. A plain dict would search its
        # beginning for the first key that is left.
        self._awaited: defaultdict[str, OrderedDict[int, None]] = defaultdict(OrderedDict)

    @property
    def out(self) -> int:
        """Count the tickets that are out."""
        return len(self._out)

    def restore(self, tickets: Iterable[tuple[str, float | None]], counts: dict[str, int], now_s: float) -> None:
        """Replace the content with that of storage: counters, tickets with the seconds they have left (None = due).

        A ticket that was known keeps its deadline. Any other gets the time left in storage, from 0 to `ttl_s`.
        """
        known, out = dict(self._out), []
        for table in (self._out, self._out_of, self._out_with, self._due, self._awaited, self.next_index, self.counts):
            table.clear()
        self._earliest_s = math.inf
        for text, left_s in tickets:
            text, _, producer = text.partition("@")
            ticket = parse_ticket(text)
            before = known.get(ticket.prompt)
            if left_s is None:
                self._due[ticket.prompt] = ticket
            elif before and before.ticket == ticket:
                out.append(before)
            else:
                deadline_s = now_s + min(max(left_s, 0.0), self.ttl_s)
                out.append(_OutTicket(ticket, deadline_s, True, producer, bool(producer)))
        for entry in sorted(out, key=lambda entry: entry.deadline_s):
            self._put_out(entry)
        for adapter, index in sorted(self.pending_prompts()):
            self._awaited[adapter][index] = None
        for name, value in counts.items():
            kind, _, adapter = name.partition(":")
            if kind == "next":
                self.next_index[adapter] = value
            elif name in ("issued", "expired", "returned"):
                self.counts[name] = value

    def forget_issued(self) -> None:
        """Forget what this book has issued, before `restore`: what storage lacks another leader may have issued."""
        for entry in [entry for entry in self._out.values() if not entry.loaded]:
            self._pop_out(entry.ticket.prompt)

    def out_of(self, adapter: str) -> int:
        """Count the tickets of an adapter that are out."""
        return self._out_of[adapter]

    def due_of(self, adapter: str) -> int:
        """Count the prompts of an adapter that are due again."""
        return len(self._awaited[adapter]) - self._out_of[adapter]

    def first_awaited(self, adapter: str, most: int) -> tuple[int, ...]:
        """Return the lowest indexes of an adapter that are out or due again, ascending, at most so many."""
        return tuple(itertools.islice(self._awaited[adapter], most))

    def out_with(self, producer: str) -> int:
        """Count the tickets that a producer has."""
        return self._out_with[producer]

    @property
    def named_producers(self) -> set[str]:
        """Return the producers whose names storage has: they sent heartbeats when they took a ticket."""
        return {entry.producer for entry in self._out.values() if entry.named}

    def oldest_deadline_s(self, adapter: str) -> float | None:
        """Return when the oldest ticket of an adapter that is out expires; None = no ticket is out."""
        # All tickets live equally long and new ones go to the end, so the first match is the oldest.
        return next((entry.deadline_s for prompt, entry in self._out.items() if prompt[0] == adapter), None)

    def holds(self, ticket: Ticket) -> bool:
        """Return whether exactly this ticket is out."""
        entry = self._out.get(ticket.prompt)
        return entry is not None and entry.ticket == ticket

    def age_s(self, ticket: Ticket, now_s: float) -> float | None:
        """Return for how many seconds a ticket has been out; None if it is not, or was loaded from storage."""
        entry = self._out.get(ticket.prompt)
        known = entry is not None and entry.ticket == ticket and not entry.loaded
        return now_s - (entry.deadline_s - self.ttl_s) if entry and known else None

    def may_have_issued(self, ticket: Ticket) -> bool:
        """Return whether `ticket` can be one of this book, also an earlier one that expired or was returned.

        Of a prompt that is stored or failed nothing is kept but its index.
        """
        if ticket.prompt_index >= self.next_index.get(ticket.adapter, 0) or ticket.attempt > self.max_attempts:
            return False
        entry, due = self._out.get(ticket.prompt), self._due.get(ticket.prompt)
        newest = entry.ticket if entry else due
        if newest and newest.reissue != ticket.reissue:
            return ticket.reissue < newest.reissue
        if newest is None or ticket.serial >= newest.serial:
            return newest is None or self.holds(ticket)
        later = newest.serial - ticket.serial  # tickets since then; each may be one failed attempt
        return ticket.generation <= newest.generation and 0 <= newest.attempt - ticket.attempt <= later

    def awaits(self, prompt: tuple[str, int]) -> bool:
        """Return whether the ticket of a prompt is out or due again."""
        return prompt in self._out or prompt in self._due

    def prompts_exhausted(self, adapter: str) -> bool:
        """Return whether no prompt can be issued now; a ticket that is out may still become due again."""
        supply = self.supplies.get(adapter)
        return supply is not None and self.next_index.get(adapter, 0) >= supply and not self.due_of(adapter)

    def pending_prompts(self) -> dict[tuple[str, int], int]:
        """Return the prompts that are out or due again, with the reissue of each."""
        tickets = itertools.chain((entry.ticket for entry in self._out.values()), self._due.values())
        return {ticket.prompt: ticket.reissue for ticket in tickets}

    def reissue(self, reissues: Reissues) -> None:
        """Make the prompts due again that wait for a reissue."""
        prompts = [prompt for prompt in reissues.waiting if not self.awaits(prompt)]
        for prompt in prompts:
            self._due[prompt] = Ticket(prompt[0], 0, prompt[1], attempt=1, serial=1, reissue=reissues.count(prompt))
        for adapter in {adapter for adapter, _ in prompts}:
            indexes = {*self._awaited[adapter], *(index for own, index in prompts if own == adapter)}
            self._awaited[adapter] = OrderedDict.fromkeys(sorted(indexes))

    def may_expire(self, now_s: float) -> bool:
        """Return whether a ticket may be past its deadline; True by mistake after the earliest one was returned."""
        return now_s >= self._earliest_s

    def issue(self, adapter: str, count: int, generation: int, now_s: float) -> TicketChange:
        """Issue up to `count` tickets: prompts due again first, the lowest index first, then new indexes."""
        due = sorted((due for due in self._due.values() if due.adapter == adapter), key=lambda due: due.prompt_index)
        change = TicketChange(drop=due[:count])
        change.issued = [ticket._replace(generation=generation) for ticket in change.drop]
        first, supply = self.next_index.get(adapter, 0), self.supplies.get(adapter)
        end = first + count - len(change.drop)
        end = end if supply is None else max(first, min(end, supply))
        change.issued += [Ticket(adapter, generation, index, attempt=1, serial=1) for index in range(first, end)]
        deadline_s = now_s + self.ttl_s
        for ticket in change.issued:
            self._due.pop(ticket.prompt, None)
            self._put_out(_OutTicket(ticket, deadline_s))
        self._awaited[adapter].update(dict.fromkeys(range(first, end)))
        if end > first:
            self.next_index[adapter] = end
            change.counts[f"next:{adapter}"] += end - first
        self._count(change, "issued", len(change.issued))
        return change

    def assign(self, change: TicketChange, tickets: Iterable[Ticket], producer: str, *, named: bool) -> None:
        """Record who got tickets that `change` issued; `named`: storage keeps the name."""
        for ticket in tickets:
            self._put_out(self._out[ticket.prompt]._replace(producer=producer, named=named))
            if named:
                change.given_to[ticket] = producer

    def expire(self, now_s: float) -> TicketChange:
        """Remove tickets past their deadline; each prompt is due again, or failed after its last attempt."""
        change = TicketChange()
        if not self.may_expire(now_s):
            return change
        late = [entry for entry in self._out.values() if entry.deadline_s <= now_s]
        for entry in late:
            self._retry_or_fail(entry, change, attempt_failed=not entry.loaded)
        self._earliest_s = min((entry.deadline_s for entry in self._out.values()), default=math.inf)
        self._count(change, "expired", len(late))
        return change

    def give_back(self, ticket: Ticket, reason: str) -> TicketChange:
        """Return one ticket: a failed attempt, unless `is_forgiven(reason)`. Raises `NotFound` if it is not out."""
        if not self.holds(ticket):
            raise NotFound(f"ticket {ticket} is not out", name="ticket", value=str(ticket))
        change = TicketChange()
        self._retry_or_fail(self._out[ticket.prompt], change, attempt_failed=not is_forgiven(reason))
        self._count(change, "returned", 1)
        return change

    def take_back(self, producers: Collection[str], most: int) -> TicketChange:
        """Remove up to `most` tickets of producers that are gone; they count as expired.

        A lost connection may be the cause, so a lost ticket is a failed attempt only after `max_attempts` tickets of
        the prompt. A prompt that ends every producer fails with its ticket `2 * max_attempts`.
        """
        change = TicketChange()
        lost = list(itertools.islice((entry for entry in self._out.values() if entry.producer in producers), most))
        for entry in lost:
            self._retry_or_fail(entry, change, attempt_failed=entry.ticket.serial > self.max_attempts)
        self._count(change, "expired", len(lost))
        return change

    def complete(
        self, prompts: Iterable[tuple[str, int]], reissues: Mapping[tuple[str, int], int] | None = None
    ) -> TicketChange:
        """Remove the tickets of prompts whose group is stored, by any attempt; a later reissue keeps its ticket.

        `reissues`: of the stored groups; 0 for those that are not in it.
        """
        change = TicketChange()
        for prompt in prompts:
            ticket = self._out[prompt].ticket if prompt in self._out else self._due.get(prompt)
            if ticket and ticket.reissue > (reissues or {}).get(prompt, 0):
                continue
            self._awaited[prompt[0]].pop(prompt[1], None)
            entry = self._pop_out(prompt)
            if entry:
                self._drop(entry, change)
                if not entry.loaded:
                    change.issue_times_s.append(entry.deadline_s - self.ttl_s)
            due = self._due.pop(prompt, None)
            if due:
                change.drop.append(due)
        return change

    def _put_out(self, entry: _OutTicket) -> None:
        prompt = entry.ticket.prompt
        self._pop_out(prompt)
        self._out[prompt] = entry
        self._out_of[prompt[0]] += 1
        self._out_with[entry.producer] += 1
        self._earliest_s = min(self._earliest_s, entry.deadline_s)

    def _pop_out(self, prompt: tuple[str, int]) -> _OutTicket | None:
        entry = self._out.pop(prompt, None)
        if entry:
            self._out_of[prompt[0]] -= 1
            self._out_with[entry.producer] -= 1
            if not self._out_with[entry.producer]:
                del self._out_with[entry.producer]
        return entry

    def _drop(self, entry: _OutTicket, change: TicketChange) -> None:
        change.drop.append(entry.ticket)
        change.producers[entry.producer] += 1
        if entry.named:
            change.taken_from[entry.ticket] = entry.producer

    def _retry_or_fail(self, entry: _OutTicket, change: TicketChange, *, attempt_failed: bool) -> None:
        ticket = entry.ticket
        self._pop_out(ticket.prompt)
        self._drop(entry, change)
        if attempt_failed and ticket.attempt >= self.max_attempts:
            self._awaited[ticket.adapter].pop(ticket.prompt_index)
            change.failed.append(ticket)
        else:
            due = ticket._replace(attempt=ticket.attempt + attempt_failed, serial=ticket.serial + 1)
            self._due[ticket.prompt] = due
            change.due.append(due)

    def _count(self, change: TicketChange, name: str, by: int) -> None:
        if by:
            self.counts[name] += by
            change.counts[name] += by
