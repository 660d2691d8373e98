"""What the service keeps of every group in memory: one row of numbers, as columns.

`ENTRY` is the fixed part of an index-stream entry, byte for byte; a rebuild joins these parts and reads them in one go.
Rows are kept in the order of their number (the order of storing), so a number is found by bisection and the same
history gives the same order on any machine. Freed rows are squeezed out when they are half of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.groups import Groups, read_only
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
        ("truncated", "<i4"),
    ]
)
"""Index entry: tokens and rollouts of the group, longest rollout, size and checksum of its frame, reward summary, codes
of its adapter and source (`metadata["source"]`, else `metadata["env"]`), rollouts that ended at their token limit.
"""

LIVE, IN_BATCHES, EVICTED, DEAD, FREED = range(5)
"""State of a row: may be sampled; used up but needed by a resume; evicted; dead letter; nothing left of it."""

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
"""What happens to a group after it was stored; the rest of its row never changes. Where `evicted_at` tells of an
eviction: `evicted_version` of its policy then, `evicted_age_ms` from its arrival on.
"""

_ZERO_COLUMNS = ("state", "reason", "times_sampled")
"""Columns that are 0 in a new row (`LIVE` is 0), as they are kept behind the last one: `insert` does not write them."""
_NEVER_COLUMNS = ("last_step", "evicted_at", "evicted_version", "evicted_age_ms")
_ENTRY_COLUMNS = [name for name in ENTRY.names or () if name not in ("crc32c", "staleness_at_write")]

Numbers = npt.NDArray[np.int64]


def encode_entry(group: Group, frame_bytes: int, crc32c: int, published_version: int, now_s: float) -> bytes:
    """Summarise a group into the bytes of its index entry."""
    lengths, rewards = group.lengths.tolist(), group.rewards
    source = group.metadata.get("source") or group.metadata.get("env")
    reward_mean = _mean(rewards)
    values = {
        "prompt_index": NO_PROMPT_INDEX if group.prompt_index is None else group.prompt_index,
        "arrival_s": now_s,
        "policy_version": group.policy_version,
        "policy_version_max": group.policy_version_max,
        "tokens": sum(lengths),
        "rollouts": len(lengths),
        "longest_tokens": max(lengths),
        "frame_bytes": frame_bytes,
        "crc32c": crc32c,
        "staleness_at_write": published_version - group.policy_version,
        "reward_mean": reward_mean,
        "reward_std": math.sqrt(_mean(np.square(rewards - reward_mean))),
        "adapter": hash_name(group.adapter),
        "source": hash_name(source) if isinstance(source, str) else 0,
        "truncated": group.finish_reasons.count("length"),
        "advantage_abs_mean": 0.0 if group.advantages is None else _mean(np.abs(group.advantages)),
    }
    return np.array(tuple(values[name] for name in ENTRY.names or ()), ENTRY).tobytes()


def _mean(values: Float64s) -> float:
    """Return what `values.mean()` does, in a quarter of the time: groups come by the hundred."""
    return float(np.add.reduce(values)) / len(values)


class Index:
    """Columns of all groups that are not freed, sorted by number.

    Every column is an attribute-like item: `index["tokens"]` is a view of the rows in use.
    """

    def __init__(self) -> None:
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._size = 0
        self._freed = 0
        self._shown: dict[str, npt.NDArray[Any]] = {}
        self._grow(1024)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        return self._columns[column][: self._size]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._columns)

    @property
    def nbytes(self) -> int:
        """Bytes that the columns take."""
        return sum(column.nbytes for column in self._columns.values())

    def reserve(self, rows: int) -> None:
        """Make room for this many more rows at once."""
        if self._size + rows > len(self._columns["number"]):
            self._grow(self._size + rows)

    def insert(self, numbers: Numbers, entries: npt.NDArray[Any]) -> None:
        """Add groups as live. `numbers` ascend and are above every number seen; `entries` has dtype `ENTRY`."""
        start, end = self._size, self._size + len(numbers)
        if end > len(self._columns["number"]):
            self._grow(max(end, len(self._columns["number"]) * 3 // 2))
        self._size = end
        columns, new = self._columns, slice(start, end)
        columns["number"][new] = numbers
        for name in _ENTRY_COLUMNS:
            columns[name][new] = entries[name]
        for name in _NEVER_COLUMNS:
            columns[name][new] = NEVER
        columns["priority"][new] = columns["advantage_abs_mean"][new]

    def rows_of(self, numbers: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Find the rows of these numbers; those that are not here (freed or unknown) are left out."""
        wanted = np.asarray(numbers, np.int64)
        number, size = self._columns["number"], self._size
        if not size:
            return wanted[:0]
        if number[size - 1] - number[0] == size - 1:  # no gap yet: a number tells its row
            rows = wanted - number[0]
            rows = rows[(rows >= 0) & (rows < size)]
        else:
            rows = np.minimum(np.searchsorted(number[:size], wanted), size - 1)
            rows = rows[number[rows] == wanted]
        here: npt.NDArray[np.int64] = rows[self._columns["state"][rows] != FREED]
        return here

    def free(self, rows: npt.NDArray[np.int64]) -> None:
        """Forget these rows."""
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
        """Copy, as `STATE_ROW`, the rows that are not freed and not as `insert` left them."""
        fresh = (self["state"] == LIVE) & (self["times_sampled"] == 0) & (self["last_step"] == NEVER)
        fresh &= (self["evicted_at"] == NEVER) & (self["priority"] == self["advantage_abs_mean"])
        rows = np.flatnonzero(~fresh & (self["state"] != FREED))
        copied = np.empty(len(rows), STATE_ROW)
        for name in STATE_ROW.names or ():
            copied[name] = self[name][rows]
        return copied

    def put(self, changed: npt.NDArray[np.void]) -> None:
        """Set rows, all of which are here, to what `changed` copied."""
        rows = self.rows_of(changed["number"])
        for name in STATE_ROW.names or ():
            self[name][rows] = changed[name]

    def live(self) -> npt.NDArray[np.int64]:
        """Return the rows that may be sampled, in the order they were stored."""
        return np.flatnonzero(self["state"] == LIVE)

    def groups(self, rows: npt.NDArray[np.int64] | None) -> Groups:
        """Show rows as the read-only columns that a strategy sees; None shows all.

        Rows in order without a gap are shown as they are and as they change, others are copied column by column as they
        are read: of a million groups a column takes 3 ms.
        """
        if rows is None or not _without_gap(rows):
            return Groups.view_of(self._shown, self._size, rows)
        shown = {name: column[rows[0] : rows[-1] + 1] for name, column in self._shown.items()}
        return Groups.view_of(shown, len(rows), None)

    def _grow(self, capacity: int) -> None:
        for dtype in (ENTRY, STATE_ROW):
            for name in dtype.names or ():
                if dtype is ENTRY and name not in _ENTRY_COLUMNS:
                    continue
                column = np.zeros(capacity, dtype[name])
                if self._size:
                    column[: self._size] = self[name]
                self._columns[name] = column
        self._shown = {name: read_only(self._columns["number" if name == "row" else name]) for name in Groups.COLUMNS}


def split_by_adapter(adapters: npt.NDArray[np.int32]) -> Iterator[tuple[int, npt.NDArray[np.int64] | slice]]:
    """Yield each hash of an adapter with the positions where it is; one hash alone costs no sort."""
    if not len(adapters):
        return
    if len(adapters) == 1 or (adapters == adapters[0]).all():
        yield int(adapters[0]), slice(None)
        return
    for code in np.unique(adapters).tolist():
        yield code, np.flatnonzero(adapters == code)


def _without_gap(rows: npt.NDArray[np.int64]) -> bool:
    return len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all())
