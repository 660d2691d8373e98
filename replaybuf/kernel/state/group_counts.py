"""Counts of the groups of an adapter by what became of them: those of guarantee 3, uses, and histograms."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter

from replaybuf.kernel.figures.histograms import Counts, GroupHistograms
from replaybuf.wire.ledger import BatchRecord


@dataclasses.dataclass(slots=True)
class AdapterCounts(Counts):
    """Groups by what became of them.

    `tokens_used`, `used_staleness` and `histograms` count every use, also one that a rewind voids later.
    """

    stored: int = 0
    retired: int = 0
    tokens_used: int = 0
    used_staleness: Counter[int] = dataclasses.field(default_factory=Counter)
    evicted: Counter[str] = dataclasses.field(default_factory=Counter)
    dead_lettered: Counter[str] = dataclasses.field(default_factory=Counter)
    histograms: GroupHistograms = dataclasses.field(default_factory=GroupHistograms)

    @property
    def groups_used(self) -> int:
        """Groups in all batches, each use counted."""
        return self.used_staleness.total()


def count_staleness(record: BatchRecord) -> Counter[tuple[str, int]]:
    """Count the groups of a batch by adapter and staleness."""
    if record.adapters:
        return Counter(map(operator.attrgetter("adapter", "staleness"), record.groups))
    ages = Counter(map(operator.attrgetter("staleness"), record.groups))  # half the time without pairs
    return Counter({("", age): uses for age, uses in ages.items()})
