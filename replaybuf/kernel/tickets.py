"""Tickets: who may generate what.

A ticket is leave to generate the group of one prompt index. The book below is what Redis holds of them, in memory;
every method says what changed and leaves storing it to the caller, so the rules can be read and tested without I/O.

Invariants, per adapter: an index below `next_index` is out, due again, failed, or stored; it is never two of these.
`attempt` = 1 + tries of the prompt that failed <= `max_attempts`; `serial` = tickets issued for it so far, so that no
two tickets have one text even where a ticket came back for a reason that is forgiven.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from replaybuf.errors import NotFound

_NUMBER = r"0|[1-9][0-9]{0,17}"
_TICKET = re.compile(
    rf"(?:(?P<adapter>.+)/)?t(?P<generation>{_NUMBER})-(?P<index>{_NUMBER})-(?P<attempt>[1-9][0-9]{{0,8}})"
    r"-(?P<serial>[1-9][0-9]{0,8})",
    re.DOTALL,
)


_SERVERS_AWAY = (
    *("engine_away", "engine_stale", "ref_engine_away", "teacher_engine_away"),
    *("old_engine_away", "old_engine_stale"),
)
FORGIVEN_REASONS = frozenset({"shutdown", "superseded", "lost_lineage", *_SERVERS_AWAY})
"""Reasons that say nothing about the prompt: a ticket given back for one of them is no failed attempt.

Not `engine_timeout`: a prompt that always takes too long would come again for ever. Not `engine_lost`: so would one
that brings engines down.
"""


def is_forgiven(reason: str) -> bool:
    """Say whether a ticket given back for `reason` is no failed attempt; what follows the first `:` is detail."""
    return reason.partition(":")[0].strip() in FORGIVEN_REASONS


class Ticket(NamedTuple):
    """Leave to generate prompt `prompt_index` once.

    `attempt` and `serial` count from 1: failed tries and tickets before this one. `generation` is the run's at issue.
    """

    adapter: str
    generation: int
    prompt_index: int
    attempt: int
    serial: int

    def __str__(self) -> str:
        prefix = f"{self.adapter}/" if self.adapter else ""
        return f"{prefix}t{self.generation}-{self.prompt_index}-{self.attempt}-{self.serial}"

    @property
    def prompt(self) -> tuple[str, int]:
        """Adapter and prompt index."""
        return self.adapter, self.prompt_index


def parse_ticket(text: str) -> Ticket:
    """Read a ticket back. Raises `NotFound` where the text is none of ours."""
    match = _TICKET.fullmatch(text)
    if not match:
        raise NotFound(f"ticket {text!r} is not one this service issued", name="ticket", value=text)
    numbers = (int(match[name]) for name in ("generation", "index", "attempt", "serial"))
    return Ticket(match["adapter"] or "", *numbers)


def prompt_key(adapter: str, prompt_index: int) -> str:
    """Default `group_id` of a ticket's group: `p<prompt_index>`, with the adapter before it where there is one."""
    return f"{adapter}/p{prompt_index}" if adapter else f"p{prompt_index}"


@dataclasses.dataclass(slots=True)
class TicketChange:
    """What a step of the book changed: tickets gone, new deadlines (0 = due again), counters, prompts that failed.

    `done_since_s`: for tickets whose group is stored, when they were issued.
    """

    drop: list[Ticket] = dataclasses.field(default_factory=list)
    deadlines_s: dict[Ticket, float] = dataclasses.field(default_factory=dict)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    issued: list[Ticket] = dataclasses.field(default_factory=list)
    failed: list[Ticket] = dataclasses.field(default_factory=list)
    done_since_s: list[float] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.drop or self.deadlines_s or self.counts)


class TicketBook:
    """Tickets that are out, and prompts due again by their next ticket. `counts`: issued, expired, returned tickets.

    `adapters`: the size of the finite supply of each (None = endless), in place of `prompts` of a run without.
    """

    def __init__(
        self, ttl_s: float, max_attempts: int, prompts: int | None, adapters: Mapping[str, int | None] | None = None
    ) -> None:
        self.ttl_s = ttl_s
        self.max_attempts = max_attempts
        self._prompts = prompts
        self._prompts_of = adapters or {}
        self.next_index: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self._out: dict[tuple[str, int], tuple[Ticket, float]] = {}
        self._out_of: Counter[str] = Counter()
        self._earliest_s = math.inf
        self._again: dict[tuple[str, int], Ticket] = {}

    @property
    def out(self) -> int:
        """Count the tickets that are out."""
        return len(self._out)

    def restore(self, tickets: Iterable[tuple[str, float]], counts: dict[str, int]) -> None:
        """Take in what storage holds, in place of what is here: tickets with deadlines in seconds, counters."""
        for table in (self._out, self._out_of, self._again, self.next_index, self.counts):
            table.clear()
        self._earliest_s = math.inf
        for text, deadline_s in tickets:
            ticket = parse_ticket(text)
            if deadline_s:
                self._put_out(ticket, deadline_s)
            else:
                self._again[ticket.prompt] = ticket
        for name, value in counts.items():
            kind, _, adapter = name.partition(":")
            if kind == "next":
                self.next_index[adapter] = value
            elif name in ("issued", "expired", "returned"):
                self.counts[name] = value

    def out_of(self, adapter: str) -> int:
        """Count the tickets of an adapter that are out."""
        return self._out_of[adapter]

    def oldest_deadline_s(self, adapter: str) -> float | None:
        """Tell when the oldest ticket of an adapter that is out expires; None where none is."""
        # One life for all, and what is put out goes to the end: the first one found is the oldest.
        return next((deadline_s for prompt, (_, deadline_s) in self._out.items() if prompt[0] == adapter), None)

    def holds(self, ticket: Ticket) -> bool:
        """Say whether this very ticket is out."""
        entry = self._out.get(ticket.prompt)
        return entry is not None and entry[0] == ticket

    def awaits(self, prompt: tuple[str, int]) -> bool:
        """Say whether the group of a prompt is still to come: its ticket is out, or due again."""
        return prompt in self._out or prompt in self._again

    def used_up(self, adapter: str) -> bool:
        """Say whether the supply has no index left to issue, for now: others' tickets may still come back."""
        prompts = self._prompts_of.get(adapter, self._prompts)
        return (
            prompts is not None
            and self.next_index.get(adapter, 0) >= prompts
            and not any(prompt[0] == adapter for prompt in self._again)
        )

    def pending_prompts(self) -> list[tuple[str, int]]:
        """List the prompts that are out or due again."""
        return [*self._out, *self._again]

    def may_expire(self, now_s: float) -> bool:
        """Say whether a ticket may be past its deadline: True once too often after the earliest one has come back."""
        return now_s >= self._earliest_s

    def issue(self, adapter: str, count: int, generation: int, now_s: float) -> TicketChange:
        """Issue up to `count` tickets: prompts due again first, then new indexes."""
        change = TicketChange()
        prompts = self._prompts_of.get(adapter, self._prompts)
        due = deque(ticket for prompt, ticket in self._again.items() if prompt[0] == adapter)
        deadline_s = now_s + self.ttl_s
        first = index = self.next_index.get(adapter, 0)
        while len(change.issued) < count:
            if due:
                planned = due.popleft()
                del self._again[planned.prompt]
                change.drop.append(planned)
                ticket = planned._replace(generation=generation)
            else:
                if prompts is not None and index >= prompts:
                    break
                ticket = Ticket(adapter, generation, index, attempt=1, serial=1)
                index += 1
            self._put_out(ticket, deadline_s)
            change.deadlines_s[ticket] = deadline_s
            change.issued.append(ticket)
        if index > first:
            self.next_index[adapter] = index
            change.counts[f"next:{adapter}"] += index - first
        self._raise(change, "issued", len(change.issued))
        return change

    def expire(self, now_s: float) -> TicketChange:
        """Take back tickets past their deadline: due again, or failed after the last attempt."""
        change = TicketChange()
        if not self.may_expire(now_s):
            return change
        late = [ticket for ticket, deadline in self._out.values() if deadline <= now_s]
        for ticket in late:
            self._take_back(ticket, change, failed=True)
        self._earliest_s = min((deadline for _, deadline in self._out.values()), default=math.inf)
        self._raise(change, "expired", len(late))
        return change

    def give_back(self, ticket: Ticket, reason: str) -> TicketChange:
        """Take back one ticket: a failed attempt, unless `is_forgiven(reason)`. Raises `NotFound` if it is not out."""
        if not self.holds(ticket):
            raise NotFound(f"ticket {ticket} is not out", name="ticket", value=str(ticket))
        change = TicketChange()
        self._take_back(ticket, change, failed=not is_forgiven(reason))
        self._raise(change, "returned", 1)
        return change

    def done(self, prompts: Iterable[tuple[str, int]]) -> TicketChange:
        """Strike prompts whose group is stored, whichever attempt brought it."""
        change = TicketChange()
        for prompt in prompts:
            entry = self._take_in(prompt)
            if entry:
                change.drop.append(entry[0])
                change.done_since_s.append(entry[1] - self.ttl_s)
            again = self._again.pop(prompt, None)
            if again:
                change.drop.append(again)
        return change

    def _put_out(self, ticket: Ticket, deadline_s: float) -> None:
        self._take_in(ticket.prompt)
        self._out[ticket.prompt] = (ticket, deadline_s)
        self._out_of[ticket.adapter] += 1
        self._earliest_s = min(self._earliest_s, deadline_s)

    def _take_in(self, prompt: tuple[str, int]) -> tuple[Ticket, float] | None:
        """Let the ticket of a prompt be out no more; return it with its deadline, None where none is."""
        entry = self._out.pop(prompt, None)
        if entry:
            self._out_of[prompt[0]] -= 1
        return entry

    def _take_back(self, ticket: Ticket, change: TicketChange, *, failed: bool) -> None:
        self._take_in(ticket.prompt)
        change.drop.append(ticket)
        if failed and ticket.attempt >= self.max_attempts:
            change.failed.append(ticket)
        else:
            planned = ticket._replace(attempt=ticket.attempt + failed, serial=ticket.serial + 1)
            self._again[ticket.prompt] = planned
            change.deadlines_s[planned] = 0.0

    def _raise(self, change: TicketChange, name: str, by: int) -> None:
        if by:
            self.counts[name] += by
            change.counts[name] += by
