"""Events of one run, sorted for the checks."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from replaybuf.wire.ledger import AdapterStep, AnyRecord, BatchEntry, BatchRecord, FailedPromptRecord
from tests.chaos.history import (
    AnyEvent,
    Attached,
    Attacked,
    BatchAsked,
    Call,
    CursorMoved,
    CursorRead,
    Drained,
    Faulted,
    Folded,
    GroupSeen,
    GroupSent,
    Healed,
    LedgerSeen,
    LossAccepted,
    OlderRedis,
    PayloadRead,
    Prompt,
    RanksWaited,
    Restored,
    StateSeen,
    TicketReturned,
    TicketsTaken,
    TrainerWrote,
    of_type,
)

RECOVERY_S = 5.0
"""How long a server that answers again, or Valkey, may need until it serves everybody."""


class Stored(NamedTuple):
    """A group that is stored, by all that was seen of it."""

    group_id: str
    adapter: str
    prompt_index: int | None
    policy_version: int

    @property
    def prompt(self) -> Prompt | None:
        """Which prompt it is the group of, if of any."""
        return None if self.prompt_index is None else (self.adapter, self.prompt_index)


def _stored(group: GroupSeen | BatchEntry) -> Stored:
    return Stored(group.group_id, group.adapter, group.prompt_index, group.policy_version)


def _times_hurt(faults: Sequence[AnyEvent], states: Sequence[StateSeen]) -> Iterator[tuple[float, float]]:
    """Yield when a server or Valkey was away or recovering.

    A server that was started again is back with its first answer: on a busy machine it takes many seconds to start.
    """
    hurt: dict[str, Faulted] = {}
    for event in faults:
        if isinstance(event, Faulted) and event.role in ("leader", "standby", "valkey"):
            hurt.setdefault(event.process, event)
        elif isinstance(event, Healed) and event.process in hurt:
            fault = hurt.pop(event.process)
            answers = (seen.at_s for seen in states if seen.server == fault.server and seen.sent_s >= event.at_s)
            yield fault.at_s, next(answers, event.at_s) + RECOVERY_S
    for fault in hurt.values():
        yield fault.at_s, float("inf")


class RunHistory:
    """Events of one run, sorted for each check; `faults` are the events of no run: what was hurt, and when."""

    def __init__(self, events: Sequence[AnyEvent], faults: Sequence[AnyEvent] = ()) -> None:
        self.sent: list[GroupSent] = of_type(events, GroupSent)
        self.tickets: list[TicketsTaken] = of_type(events, TicketsTaken)
        self.returned: list[TicketReturned] = of_type(events, TicketReturned)
        self.older: list[OlderRedis] = of_type(events, OlderRedis)
        self.ranks_waited: list[RanksWaited] = of_type(events, RanksWaited)
        self.cursor: list[CursorRead | CursorMoved] = [
            event for event in events if isinstance(event, (CursorRead, CursorMoved))
        ]
        self.restored: list[Restored] = of_type(events, Restored)
        self.losses: list[LossAccepted] = of_type(events, LossAccepted)
        self.attacked: list[Attacked] = of_type(events, Attacked)
        self.producers_killed = [
            fault.at_s for fault in of_type(faults, Faulted) if fault.role == "producer" and fault.kind == "kill"
        ]
        """A call that gave a ticket back may be missing in the history of a killed producer."""
        self.attached: list[Attached] = of_type(events, Attached)
        self.asked: list[BatchAsked] = of_type(events, BatchAsked)
        self.wrote: list[TrainerWrote] = of_type(events, TrainerWrote)
        self.states: list[StateSeen] = of_type(events, StateSeen)
        self._hurt = list(_times_hurt(faults, self.states))
        self.groups: list[GroupSeen] = of_type(events, GroupSeen)
        self.payloads: list[PayloadRead] = of_type(events, PayloadRead)
        self.folded: list[Folded] = of_type(events, Folded)
        self.drained: list[Drained] = of_type(events, Drained)
        self.calls: list[Call] = [event for event in events if isinstance(event, Call)]
        self.ledger_seen: list[LedgerSeen] = of_type(events, LedgerSeen)
        first = {seen.entry: seen.record for seen in reversed(self.ledger_seen)}
        self.ledger: list[tuple[int, AnyRecord]] = [
            (entry, msgspec.convert(first[entry], AnyRecord, str_keys=True)) for entry in sorted(first)
        ]
        self.batches = {record.batch_id: record for _, record in self.ledger if isinstance(record, BatchRecord)}
        self.bodies = [asked for asked in self.asked if asked.body]
        rest_s = min((drained.at_s for drained in self.drained), default=float("inf"))
        self.sent_again = [sent for sent in self.sent if sent.at_s > rest_s]
        """Groups sent again at rest, because the service has trimmed their history."""
        self._epochs = sorted((attached.at_s, attached.epoch) for attached in self.attached if attached.epoch)

    def hurt(self, from_s: float, until_s: float) -> bool:
        """Return whether a server or Redis was away or recovering in that time."""
        return any(since_s < until_s and from_s < back_s for since_s, back_s in self._hurt)

    def epoch_before(self, instant_s: float) -> int:
        """Return the newest epoch that had been answered by then."""
        known = bisect.bisect_left(self._epochs, (instant_s, 0))
        return max((epoch for _, epoch in self._epochs[:known]), default=0)

    def part(self, asked: BatchAsked, adapter: str) -> AdapterStep | None:
        """Tell the part of an adapter in the batch that was served; None where it has none."""
        record = self.batches.get(asked.body.batch_id) if asked.body else None
        return record.adapters.get(adapter) if record else None

    def stored_groups(self) -> dict[int, Stored]:
        """Name every group that was seen, in a listing or in a batch, by number."""
        groups = {group.number: _stored(group) for group in self.groups}
        for record in self.batches.values():
            for held in record.groups:
                groups.setdefault(held.number, _stored(held))
        return groups

    def issued(self) -> set[Prompt]:
        """Name every prompt that had a ticket."""
        return {(taken.adapter, prompt_index) for taken in self.tickets for _, prompt_index, _ in taken.tickets}

    def failed(self) -> set[Prompt]:
        """Name every prompt that is recorded as failed."""
        return {
            (record.adapter, record.prompt_index) for _, record in self.ledger if isinstance(record, FailedPromptRecord)
        }
