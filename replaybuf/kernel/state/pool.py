"""Groups of a run by state: index rows, why they were dropped or freed, and the counts of each adapter.

::

    stored ──► live ──batch──► in_batches ──checkpoint──► retired
                │  ◄─resample─┘
                ├──evict──► evicted          (undone by a resample to an earlier step)
                └──broken─► dead_lettered    (from in_batches too: its batch cannot be served again)

    stored = live + in_batches + retired + sum(evicted) + dead_lettered       (guarantee 3, per adapter and run)
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.figures.histograms import ages_ms
from replaybuf.kernel.rows.column_table import ColumnTable
from replaybuf.kernel.rows.index import (
    DEAD,
    EVICTED,
    IN_BATCHES,
    LIVE,
    NEVER,
    NO_PROMPT_INDEX,
    Index,
    Integers,
    Numbers,
    Positions,
    split_by_adapter,
)
from replaybuf.kernel.rows.live_groups import LiveGroups
from replaybuf.kernel.state.group_counts import AdapterCounts, count_staleness
from replaybuf.wire.group import hash_name
from replaybuf.wire.ledger import AddedColumns, BatchRecord

RETIRED: Final = "retired"
PURGED = 128
"""Bit of a code in `freed_as`: the group was a dead letter."""
_EVICTION_COLUMNS = ("evicted_at", "evicted_version", "evicted_age_ms")

NO_COUNTS = AdapterCounts()
"""Counts of a run without groups. One for all: a service may have thousands of idle runs."""
COUNTED_LATE = 16_384
"""Most stored groups that the histograms lack; the next reader counts them, in about 2 ms."""


class GroupPool:
    """Rows, reasons and counts of the groups of one run.

    - `live`: sums over the live groups; before `use`, `void_use`, `evict`, `restore` and `change_max_uses` the caller
      forgets them, as `RunState.apply` does
    - `stored`: number of the last folded group; `trimmed`: of the last one whose history is trimmed
    - `freed_as`: one code per freed group above `trimmed`, at `number - trimmed`: position in `reasons`, with the bit
      `PURGED` for a dead letter; 0 = not freed
    - `counts`: by hash of the adapter; their histograms hold the groups up to number `counted`. Later groups are added
      before somebody reads or changes them, because one call for many groups is cheaper than one call per group.
    - `sizes`: stored groups by rollouts, by hash of the adapter
    - `stale_adapters`: hashes of the adapters that lost live groups as too stale since the last batch
    """

    def __init__(self) -> None:
        self.index = Index()
        self.stored = 0
        self.trimmed = 0
        self.max_uses: int | None = 1
        self.reasons: list[str] = ["", RETIRED]
        self.freed_as = bytearray(1)
        self.counts: dict[int, AdapterCounts] = {}
        self.counted = 0
        self.sizes: dict[int, Counter[int]] = {}
        self.stale_adapters: set[int] = set()
        self.columns = ColumnTable(self.index)
        self.live = LiveGroups(self.index)

    # ------------------------------------------------------------------ counts

    def counts_of(self, adapter: str) -> AdapterCounts:
        """Return the counts of an adapter."""
        self._update_histograms()
        return self.counts.get(hash_name(adapter), NO_COUNTS)

    def stored_of(self, adapter: str) -> int:
        """Count the stored groups of an adapter."""
        return self.counts.get(hash_name(adapter), NO_COUNTS).stored

    def total(self) -> AdapterCounts:
        """Add up the counts of all adapters; the counts of the only adapter are returned as they are."""
        self._update_histograms()
        return functools.reduce(operator.add, self.counts.values()) if self.counts else NO_COUNTS

    def _split(self, rows: Positions) -> Iterator[tuple[AdapterCounts, Positions | slice]]:
        """Yield the counts of each adapter that has some of these rows, with the positions of its rows."""
        for adapter_hash, positions in split_by_adapter(self.index["adapter"][rows]):
            yield self._counts(adapter_hash), positions

    def _counts(self, adapter_hash: int) -> AdapterCounts:
        if adapter_hash not in self.counts:  # not `setdefault`: building seven histograms takes 10 µs per stored group
            self.counts[adapter_hash] = AdapterCounts()
        return self.counts[adapter_hash]

    def _update_histograms(self) -> None:
        if self.counted < self.stored:
            numbers = self.index["number"]
            rows = np.arange(int(np.searchsorted(numbers, self.counted, "right")), len(numbers))
            for counts, positions in self._split(rows):
                counts.histograms.store(self.index, rows[positions])
            self.counted = self.stored

    def count_stored(self, adapters: npt.NDArray[np.int32], rollouts: npt.NDArray[np.int32]) -> None:
        """Count groups as stored, by the hashes of their adapters, and by their rollouts."""
        for adapter_hash, positions in split_by_adapter(adapters):
            self._count_stored(adapter_hash, rollouts[positions])

    def _count_stored(self, adapter_hash: int, rollouts: npt.NDArray[np.int32]) -> None:
        (self.counts.get(adapter_hash) or self._counts(adapter_hash)).stored += len(rollouts)
        sizes = self.sizes.get(adapter_hash)
        if sizes is None:
            sizes = self.sizes[adapter_hash] = Counter()
        for size in rollouts.tolist():
            sizes[size] += 1

    def count_partial(self, group_size: int | None, adapter: str | None = None) -> int:
        """Count the groups of an adapter, or of the run, that were stored with fewer rollouts than `group_size`."""
        adapter_hash = None if adapter is None else hash_name(adapter)
        tables = (table for own, table in self.sizes.items() if adapter_hash in (None, own))
        return sum(count for table in tables for size, count in table.items() if 0 < size < (group_size or 0))

    def _count_evicted(self, rows: Positions, sign: int) -> None:
        """Count evicted rows by reason and age, or take them back with `sign` -1."""
        codes = self.index["reason"][rows]
        for code in np.unique(codes).tolist():
            own_rows = rows[codes == code]
            versions, ages = self.index["evicted_version"][own_rows], self.index["evicted_age_ms"][own_rows]
            self._count_dropped("evicted", self.reasons[code], own_rows, versions, ages, sign)

    def _count_dropped(
        self, kind: str, reason: str, rows: Positions, versions: Integers, ages: Integers, sign: int = 1
    ) -> None:
        """Count rows as `evicted` or `dead_lettered` at these versions and ages in ms [rows]."""
        self._update_histograms()
        for counts, positions in self._split(rows):
            getattr(counts, kind)[reason] += sign * len(rows[positions])
            counts.histograms.drop(self.index, rows[positions], reason, versions[positions], ages[positions], sign)

    # ------------------------------------------------------------------ life of a group

    def store(
        self, numbers: Numbers, entries: npt.NDArray[np.void], malformed: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.void]:
        """Add groups as live and return their entries; `malformed` and impossible ones become dead letters, blank."""
        unfit = _find_unfit(entries, malformed)
        if unfit is not None:
            blank = np.zeros(1, entries.dtype)
            blank["prompt_index"] = NO_PROMPT_INDEX
            entries = np.where(unfit, blank, entries)
        self.index.insert(numbers, entries)
        for adapter_hash, at in split_by_adapter(entries["adapter"]):
            rollouts = entries["rollouts"][at]
            untrimmed = rollouts if numbers[0] > self.trimmed else rollouts[numbers[at] > self.trimmed]
            self._count_stored(adapter_hash, untrimmed)
            self.live.add(adapter_hash, entries["tokens"][at], entries["frame_bytes"][at])
        self.stored = max(self.stored, int(numbers[-1]))
        self.freed_as.extend(bytes(self.stored - self.trimmed + 1 - len(self.freed_as)))
        if self.stored - self.counted > COUNTED_LATE:
            self._update_histograms()
        if unfit is not None:
            # The stream may be read at any ledger entry, so the age of the drop is unknown: version 0, no time.
            self.dead_letter(self.index.rows_of(numbers[unfit]), "bad_index_entry", None, 0.0)
        return entries

    def add_columns(self, groups: Sequence[AddedColumns]) -> None:
        """Record late columns of groups."""
        for added in groups:
            self.columns.add(added)
            rows = self.index.rows_of([added.number])
            if len(rows) and self.index["state"][rows[0]] == LIVE:
                self.live.add_bytes(int(self.index["adapter"][rows[0]]), added.frame_bytes)

    def settle(self, rows: Positions) -> None:
        """Make rows live, or used up, by their uses."""
        used_up = np.zeros(len(rows), bool)
        if self.max_uses is not None:
            used_up = self.index["times_sampled"][rows] >= self.max_uses
        self.index["state"][rows] = np.where(used_up, IN_BATCHES, LIVE)

    def change_max_uses(self, max_uses: int | None) -> None:
        """Settle every group anew that is neither evicted nor dropped."""
        self.max_uses = max_uses
        states = self.index["state"]
        self.settle(np.flatnonzero((states == IN_BATCHES) & (self.index["evicted_at"] == NEVER) | (states == LIVE)))

    def use(self, numbers: Numbers, record: BatchRecord) -> dict[int, int]:
        """Use groups in a batch; return the last step before it of those used before, by number."""
        index, rows = self.index, self.index.rows_of(numbers)
        used = rows[index["last_step"][rows] != NEVER]
        earlier = dict(zip(index["number"][used].tolist(), index["last_step"][used].tolist(), strict=True))
        index["times_sampled"][rows] += 1
        index["last_step"][rows] = record.step
        self.stale_adapters = set()
        self._update_histograms()
        for counts, positions in self._split(rows):
            counts.tokens_used += int(index["tokens"][rows[positions]].sum(dtype=np.int64))
            counts.histograms.use(index, rows[positions], record.at_s)
        for (adapter, age), uses in count_staleness(record).items():
            self._counts(hash_name(adapter)).used_staleness[age] += uses
        self.settle(rows)
        return earlier

    def void_use(self, numbers: Numbers, earlier: dict[int, int]) -> None:
        """Undo `use`."""
        index, rows = self.index, self.index.rows_of(numbers)
        index["times_sampled"][rows] -= 1
        for counts, positions in self._split(rows):
            counts.histograms.void_use(index, rows[positions])
        index["last_step"][rows] = NEVER
        index.assign("last_step", earlier)
        evicted = index["evicted_at"][rows] != NEVER
        self._drop_unused(rows[evicted])
        self.settle(rows[~evicted & (index["state"][rows] != DEAD)])

    def evict(self, rows: Positions, reason: str, step: int, versions: Integers, at_s: float) -> int:
        """Evict rows at `step`, when their adapters had these versions [rows]; used ones stay for their batches.

        Return how many are dropped: no batch used them.
        """
        index = self.index
        states = index["state"][rows]
        evictable = ((states == LIVE) | (states == IN_BATCHES)) & (index["evicted_at"][rows] == NEVER)
        rows, versions = rows[evictable], versions[evictable]
        if reason == "too_stale":
            live = rows[index["state"][rows] == LIVE]
            self.stale_adapters |= {adapter_hash for adapter_hash, _ in split_by_adapter(index["adapter"][live])}
        index["state"][rows] = IN_BATCHES  # no longer live; `_drop_unused` finds those that no batch used
        index["reason"][rows] = self._code_of(reason)
        index["evicted_at"][rows] = step
        index["evicted_version"][rows] = versions
        index["evicted_age_ms"][rows] = ages_ms(index["arrival_s"][rows], at_s)
        return self._drop_unused(rows)

    def _drop_unused(self, rows: Positions) -> int:
        """Count evicted rows as evicted that no batch of the surviving history used; return how many."""
        unused = rows[(self.index["times_sampled"][rows] == 0) & (self.index["state"][rows] == IN_BATCHES)]
        self.index["state"][unused] = EVICTED
        self._count_evicted(unused, 1)
        return len(unused)

    def restore(self, rows: Positions) -> None:
        """Undo evictions."""
        self._count_evicted(rows[self.index["state"][rows] == EVICTED], -1)
        self.index["reason"][rows] = 0
        for column in _EVICTION_COLUMNS:
            self.index[column][rows] = NEVER
        self.settle(rows)

    def dead_letter(self, rows: Positions, reason: str, versions: Integers | None, at_s: float) -> int:
        """Drop rows for good, also those in batches; `versions` [rows] of their adapters, None = all 0.

        Return how many were not dropped before.
        """
        index = self.index
        droppable = np.isin(index["state"][rows], (LIVE, IN_BATCHES))
        versions = np.zeros(len(rows), np.int64) if versions is None else versions
        rows, versions = rows[droppable], versions[droppable]
        self.live.forget()
        index["state"][rows] = DEAD
        for column in _EVICTION_COLUMNS:  # else a rewind would bring them back
            index[column][rows] = NEVER
        index["reason"][rows] = self._code_of(reason)
        self._count_dropped("dead_lettered", reason, rows, versions, ages_ms(index["arrival_s"][rows], at_s))
        return len(rows)

    def freeable(self, oldest: int) -> npt.NDArray[np.bool_]:
        """Return which rows no resume at step `oldest` or later needs."""
        index = self.index
        used_up = (index["state"] == IN_BATCHES) & (index["last_step"] < oldest)
        freeable: npt.NDArray[np.bool_] = (used_up | (index["state"] == EVICTED)) & (index["evicted_at"] <= oldest)
        return freeable

    def retire(self, oldest: int, kept_after: int | None = None, kept_from: int | None = None) -> Numbers:
        """Free what no resume at step `oldest` or later needs, and no cursor; return the numbers.

        Cursors need the groups of numbers above `kept_after`, and those used at step `kept_from` or later.
        """
        index, freeable = self.index, self.freeable(oldest)
        if kept_after is not None:
            freeable &= index["number"] <= kept_after
        if kept_from is not None:
            freeable &= index["last_step"] < kept_from
        rows = np.flatnonzero(freeable & (index["state"] == IN_BATCHES))
        evicted_numbers = index["number"][freeable & (index["state"] == EVICTED)]
        for counts, positions in self._split(rows):
            counts.retired += len(rows[positions])
        retired = self.free(rows, RETIRED)
        # Positions have moved if `free` removed freed ones.
        return np.concatenate([retired, self.free(self.index.rows_of(evicted_numbers))])

    def free(self, rows: Positions, reason: str | None = None, *, purged: bool = False) -> Numbers:
        """Free rows and keep why: `reason`, or the reason of each row. Return the numbers."""
        numbers: Numbers = self.index["number"][rows].copy()
        codes = np.full(len(rows), self._code_of(reason), np.uint8) if reason else self.index["reason"][rows]
        codes = codes | PURGED if purged else codes
        kept = numbers > self.trimmed
        np.frombuffer(self.freed_as, np.uint8)[numbers[kept] - self.trimmed] = codes[kept]
        self.index.free(rows)
        return numbers

    def trim(self, groups: int) -> None:
        """Forget why groups up to number `groups` were freed."""
        del self.freed_as[: max(0, groups - self.trimmed)]
        self.freed_as[0] = 0
        self.trimmed = max(self.trimmed, groups)

    def _code_of(self, reason: str) -> int:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason)


def _find_unfit(entries: npt.NDArray[np.void], malformed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_] | None:
    """Mark the entries that are malformed or impossible; None if all are fit."""
    if len(entries) == 1:  # of an append of one group: a dozen calls of numpy take ten times as long
        _, _, oldest, newest, tokens, rollouts, *_ = entries.tolist()[0]
        if 0 <= oldest <= newest and tokens >= 1 and rollouts >= 1 and not malformed.tolist().count(True):
            return None
    unfit: npt.NDArray[np.bool_] = (entries["tokens"] < 1) | (entries["rollouts"] < 1) | (entries["policy_version"] < 0)
    unfit |= entries["policy_version_max"] < entries["policy_version"]
    unfit[: len(malformed)] |= malformed
    return unfit if unfit.any() else None
