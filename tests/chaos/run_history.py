"""The events of one run, sorted into what the checks need."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import msgspec

from replaybuf.ledger import AnyRecord, BatchRecord
from tests.chaos.history import (
    AnyEvent,
    Attached,
    BatchAsked,
    Call,
    Drained,
    Folded,
    GroupSeen,
    GroupSent,
    LedgerSeen,
    PayloadRead,
    StateSeen,
    TicketsTaken,
    TrainerWrote,
    of_type,
)


class RunHistory:
    """The events of one run, sorted into what each check needs."""

    def __init__(self, events: Sequence[AnyEvent]) -> None:
        self.sent: list[GroupSent] = of_type(events, GroupSent)
        self.tickets: list[TicketsTaken] = of_type(events, TicketsTaken)
        self.attached: list[Attached] = of_type(events, Attached)
        self.asked: list[BatchAsked] = of_type(events, BatchAsked)
        self.wrote: list[TrainerWrote] = of_type(events, TrainerWrote)
        self.states: list[StateSeen] = of_type(events, StateSeen)
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
        """What was sent at rest, to learn whether it is still known: groups whose history the service has trimmed."""
        self._epochs = sorted((attached.at_s, attached.epoch) for attached in self.attached if attached.epoch)

    def epoch_before(self, instant_s: float) -> int:
        """Return the newest epoch that had been answered by then."""
        known = bisect.bisect_left(self._epochs, (instant_s, 0))
        return max((epoch for _, epoch in self._epochs[:known]), default=0)

    def stored_groups(self) -> dict[int, tuple[str, int | None, int]]:
        """Name every group that was seen, in a listing or in a batch, by number: (id, prompt index, version)."""
        found = {group.number: (group.group_id, group.prompt_index, group.policy_version) for group in self.groups}
        for record in self.batches.values():
            for held in record.groups:
                found.setdefault(held.number, (held.group_id, held.prompt_index, held.policy_version))
        return found
