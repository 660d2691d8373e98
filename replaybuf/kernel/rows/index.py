"""Columns in memory with one row of numbers per group, sorted by group number.

A rebuild reads many stream entries at once, because `ENTRY` has the same bytes as the fixed part of an entry. Freed
rows are removed when they are more than half of all.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.rows.column_bits import ADMITTED_BIT, bits_of_group
from replaybuf.kernel.rows.groups import Groups, read_only
from replaybuf.kernel.rows.groups import Numbers as Numbers
from replaybuf.kernel.rows.groups import Positions as Positions
from replaybuf.wire.group import Float64s, Group, hash_name

ENTRY = np.dtype(
    [
        ("prompt_index", "<i8"),
        ("arrival_s", "<f8"),
        ("policy_version", "<i4"),
        ("policy_version_max", "<i4"),
        ("tokens", "<i4"),
        ("rollouts", "<i4"),
        ("longest_tokens", "<i4"),
        ("frame_bytes", "<i4"),
        ("crc32c", "<u4"),
        ("staleness_at_write", "<i4"),
        ("reward_mean", "<f4"),
        ("reward_std", "<f4"),
        ("advantage_abs_mean", "<f4"),
        ("adapter", "<i4"),
        ("source", "<i4"),
        ("truncated", "<u2"),
        ("columns", "<u2"),
    ]
)
"""Index entry. `adapter`, `source`: hashes of names, the source from `metadata["source"]`, else `metadata["env"]`.
`longest_tokens`: of the longest rollout; `truncated`: rollouts that ended at their token limit; `columns`: bits of the
optional columns and of admission (`column_bits`).
"""

ENTRY_STRUCT = struct.Struct("<qd6iIi3f2i2H")
"""The same layout; to pack one entry takes a tenth of the time of an array."""

LIVE, IN_BATCHES, EVICTED, DEAD, FREED = range(5)
"""State of a row. `IN_BATCHES`: used up, but a resume may need it; `FREED`: only the row is left."""

NO_PROMPT_INDEX = -1
NEVER = -1

STATE_ROW = np.dtype(
    [
        ("number", "<i8"),
        ("state", "u1"),
        ("reason", "u1"),
        ("times_sampled", "<i4"),
        ("last_step", "<i4"),
        ("evicted_at", "<i4"),
        ("evicted_version", "<i4"),
        ("evicted_age_ms", "<i4"),
        ("priority", "<f4"),
    ]
)
"""Part of a row that changes after the group is stored. `evicted_at`: step of the eviction; `evicted_version`: version
of the policy then; `evicted_age_ms`: time from arrival to eviction. A rewind never restores an `EVICTED` row whose
`evicted_at` is `NEVER`: its prompt was issued again.
"""

SPILLED = "spilled"
"""Column of the leader: bytes of the group that are in files. `state.spill` writes it, not the fold of the streams."""
LATE_ROW = np.dtype(
    [
        ("number", "<i8"),
        ("late", "<u2"),
        ("frame_bytes", "<i4"),
        ("reward_mean", "<f4"),
        ("reward_std", "<f4"),
        ("advantage_abs_mean", "<f4"),
    ]
)
"""Part of a row that late columns change. `late`: bits of the columns that came late."""

_ZERO_COLUMNS = ("state", "reason", "times_sampled", "late", SPILLED)
"""Columns that `insert` need not write: a new row has 0 (`LIVE` is 0), and unused rows are kept at 0."""
_NEVER_COLUMNS = ("last_step", "evicted_at", "evicted_version", "evicted_age_ms")
_ENTRY_COLUMNS = [name for name in ENTRY.names or () if name not in ("crc32c", "staleness_at_write")]
_DTYPES = {name: ENTRY[name] for name in _ENTRY_COLUMNS} | {name: STATE_ROW[name] for name in STATE_ROW.names or ()}
_DTYPES |= {"late": LATE_ROW["late"], "truncated": np.dtype(np.int32), SPILLED: np.dtype(np.int32)}
_NO_GROUPS = {name: read_only(np.empty(0, dtype)) for name, dtype in Groups.DTYPES.items()}
"""Columns of every index without groups: a service may have thousands of idle runs."""
_FULL = 7 / 8
"""Share of the capacity from which columns grow one by one."""
_LARGE = 1 << 16
"""Rows up to which all columns grow at once, in a few milliseconds."""

_sum = np.add.reduce

Integers = npt.NDArray[np.integer]


def source_of(group: Group) -> str:
    """Return the source of a group's prompt, by its metadata; "" for none."""
    source = group.metadata.get("source") or group.metadata.get("env")
    return source if isinstance(source, str) else ""


def encode_entry(
    group: Group,
    frame_bytes: int,
    crc32c: int,
    published_version: int,
    now_s: float,
    *,
    source: str = "",
    admitted: bool = False,
    lengths: Sequence[int] | None = None,
) -> bytes:
    """Return the bytes of the index entry of a group.

    `source`: that of `source_of`. `admitted`: the service stores it, no direct writer. `lengths`: tokens of each
    rollout, if the caller has them.
    """
    lengths = group.lengths.tolist() if lengths is None else lengths
    scores = summarize_scores(group)
    return ENTRY_STRUCT.pack(
        NO_PROMPT_INDEX if group.prompt_index is None else group.prompt_index,
        now_s,
        group.policy_version,
        group.policy_version_max,
        sum(lengths),
        len(lengths),
        max(lengths),
        frame_bytes,
        crc32c,
        published_version - group.policy_version,
        scores["reward_mean"],
        scores["reward_std"],
        scores["advantage_abs_mean"],
        hash_name(group.adapter),
        hash_name(source),
        group.finish_reasons.count("length"),
        bits_of_group(group) | (ADMITTED_BIT if admitted else 0),
    )


def summarize_scores(group: Group) -> dict[str, float]:
    """Return the columns of an index entry that rewards and advantages determine."""
    rewards, advantages = group.rewards, group.advantages
    count = len(rewards)
    reward_mean = float(_sum(rewards)) / count  # as `mean_of`, of which three calls are most of the time
    return {
        "reward_mean": reward_mean,
        "reward_std": math.sqrt(float(_sum(np.square(rewards - reward_mean))) / count),
        "advantage_abs_mean": 0.0 if advantages is None else float(_sum(np.abs(advantages))) / len(advantages),
    }


def mean_of(values: Float64s) -> float:
    """Return `values.mean()`, to the bit, without its overhead: for the few rewards of a group most of its time."""
    return float(_sum(values)) / len(values)


class Index:
    """Columns of all groups that are not freed, sorted by number; `index["tokens"]` is a view of a column."""

    def __init__(self) -> None:
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._size = 0
        self._freed = 0
        self._shown: dict[str, npt.NDArray[Any]] = {}
        """Read-only views of the columns that strategies see, once somebody asked for them."""
        self._capacity = 0
        self._grow(1024)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        return self._columns[column][: self._size]

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        return tuple(self._columns)

    @property
    def nbytes(self) -> int:
        """Return the bytes that the columns take."""
        return sum(column.nbytes for column in self._columns.values())

    def reserve(self, rows: int) -> None:
        """Allocate space for this many more rows at once."""
        wanted = int((self._size + rows) / _FULL) + 1
        if wanted > self._capacity:
            self._grow(wanted)

    def insert(self, numbers: Numbers, entries: npt.NDArray[Any]) -> None:
        """Add groups as live. `numbers` ascend from above every number so far; `entries` has dtype `ENTRY`."""
        start, end = self._size, self._size + len(numbers)
        self._make_room(end)
        self._size = end
        columns, inserted = self._columns, slice(start, end)
        columns["number"][inserted] = numbers
        for name in _ENTRY_COLUMNS:
            columns[name][inserted] = entries[name]
        for name in _NEVER_COLUMNS:
            columns[name][inserted] = NEVER
        columns["priority"][inserted] = columns["advantage_abs_mean"][inserted]

    def rows_of(self, numbers: npt.ArrayLike) -> Positions:
        """Return the rows of these numbers, without those of freed and unknown groups."""
        wanted = np.asarray(numbers, np.int64)
        number, size = self._columns["number"], self._size
        if not size:
            return wanted[:0]
        if number[size - 1] - number[0] == size - 1:  # no gap yet: rows follow from numbers
            rows = wanted - number[0]
            rows = rows[(rows >= 0) & (rows < size)]
        else:
            rows = np.minimum(np.searchsorted(number[:size], wanted), size - 1)
            rows = rows[number[rows] == wanted]
        here: Positions = rows[self._columns["state"][rows] != FREED]
        return here

    def assign(self, column: str, values: Mapping[int, float]) -> None:
        """Set a column of groups, by number; freed and unknown groups are skipped."""
        numbers, own = np.fromiter(values, np.int64, len(values)), self._columns[column]
        rows = self.rows_of(numbers)
        has_row = np.isin(numbers, self._columns["number"][rows])
        own[rows] = np.fromiter(values.values(), own.dtype, len(values))[has_row]

    def free(self, rows: Positions) -> None:
        """Mark rows as freed, and remove freed rows when they are more than half of all."""
        self["state"][rows] = FREED
        self._freed += len(rows)
        if self._freed * 2 > self._size and self._size > 1024:
            keep = np.flatnonzero(self["state"] != FREED)
            for name, column in self._columns.items():
                column[: len(keep)] = self[name][keep]
            for name in _ZERO_COLUMNS:
                self[name][len(keep) :] = 0
            self._size, self._freed = len(keep), 0

    def changed(self) -> npt.NDArray[np.void]:
        """Return, as `STATE_ROW`, the rows that changed since `insert` and are not freed."""
        fresh = (self["state"] == LIVE) & (self["times_sampled"] == 0) & (self["last_step"] == NEVER)
        fresh &= (self["evicted_at"] == NEVER) & (self["priority"] == self["advantage_abs_mean"])
        rows = np.flatnonzero(~fresh & (self["state"] != FREED))
        copied = np.empty(len(rows), STATE_ROW)
        for name in STATE_ROW.names or ():
            copied[name] = self[name][rows]
        return copied

    def put(self, changed: npt.NDArray[np.void]) -> None:
        """Restore rows that `changed` returned; none of them may be freed."""
        rows = self.rows_of(changed["number"])
        for name in STATE_ROW.names or ():
            self[name][rows] = changed[name]

    def late_rows(self) -> npt.NDArray[np.void]:
        """Return, as `LATE_ROW`, the rows with late columns that are not freed."""
        rows = np.flatnonzero((self["late"] != 0) & (self["state"] != FREED))
        copied = np.empty(len(rows), LATE_ROW)
        for name in LATE_ROW.names or ():
            copied[name] = self[name][rows]
        return copied

    def put_late(self, late: npt.NDArray[np.void]) -> None:
        """Restore rows that `late_rows` returned, before `put`: later priorities are in the changed rows."""
        rows = self.rows_of(late["number"])
        for name in LATE_ROW.names or ():
            self[name][rows] = late[name]
        self["columns"][rows] |= late["late"]
        self["priority"][rows] = late["advantage_abs_mean"]

    def live(self) -> Positions:
        """Return the live rows, in the order of storing."""
        return np.flatnonzero(self["state"] == LIVE)

    def live_slice(self) -> Positions | slice:
        """Return the live rows, as a slice if they have no gap: columns are then viewed, not copied."""
        rows = self.live()
        return slice(int(rows[0]), int(rows[-1]) + 1) if _without_gap(rows) else rows

    def groups(self, rows: Positions | None) -> Groups:
        """Return rows as the read-only columns that a strategy sees; None = all rows.

        Ascending rows without a gap are views. Others are copied when a column is read: 3 ms for a million groups.
        """
        if not self._size:
            return Groups.view_of(_NO_GROUPS, 0, None)
        if not self._shown:
            names = {("row" if name == "number" else name): column for name, column in self._columns.items()}
            self._shown = {name: read_only(column) for name, column in names.items() if name in Groups.COLUMNS}
        if rows is None or not _without_gap(rows):
            return Groups.view_of(self._shown, self._size, rows)
        shown = {name: column[rows[0] : rows[-1] + 1] for name, column in self._shown.items()}
        return Groups.view_of(shown, len(rows), None)

    def _make_room(self, size: int) -> None:
        """Grow before `size` rows reach the capacity, one column at each call: all take 0.1 s for a million rows."""
        if size > self._capacity:
            self._grow(max(size, self._capacity * 3 // 2))
        elif size > _FULL * self._capacity and size > _LARGE:
            wanted = self._capacity * 3 // 2
            small = [name for name, column in self._columns.items() if len(column) < wanted]
            self._grow_column(small[0], wanted)
            if len(small) == 1:
                self._capacity = wanted

    def _grow(self, capacity: int) -> None:
        for name in _DTYPES:
            if name not in self._columns or len(self._columns[name]) < capacity:
                self._grow_column(name, capacity)
        self._capacity = capacity

    def _grow_column(self, name: str, capacity: int) -> None:
        # Only these are read before they are written. Zeros would be written at once, 90 MB for a million rows.
        column = (np.zeros if name in _ZERO_COLUMNS else np.empty)(capacity, _DTYPES[name])
        if self._size:
            column[: self._size] = self[name]
        self._columns[name] = column
        self._shown = {}


def split_by_adapter(adapters: npt.NDArray[np.int32]) -> Iterator[tuple[int, Positions | slice]]:
    """Yield each hash of an adapter with its positions; a single hash needs no sort."""
    if not len(adapters):
        return
    if len(adapters) == 1 or (adapters == adapters[0]).all():
        yield int(adapters[0]), slice(None)
        return
    for code in np.unique(adapters).tolist():
        yield code, np.flatnonzero(adapters == code)


def _without_gap(rows: Positions) -> bool:
    return len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all())
