"""Which late columns the groups of a run have, as bits in the index."""

from __future__ import annotations

from collections.abc import Iterable

import numpy.typing as npt

from replaybuf.kernel.rows.column_bits import bits_of, names_of
from replaybuf.kernel.rows.index import Index
from replaybuf.wire.late_columns import FIXED_NAMES
from replaybuf.wire.ledger import AddedColumns

SCORES = ("reward_mean", "reward_std", "advantage_abs_mean")
"""Columns of the index that late rewards and advantages change."""


class ColumnTable:
    """Late columns of the groups in `index`.

    `late_names`: columns that came late for any group, in the order of the first time.
    """

    def __init__(self, index: Index) -> None:
        self.late_names: list[str] = []
        self._index = index

    @property
    def late_parts(self) -> list[str]:
        """Reward parts that came late for any group, in the order of the first time."""
        return [name for name in self.late_names if name not in FIXED_NAMES]

    def bits_of(self, names: Iterable[str]) -> int:
        """Return the bits of columns, as the index has them in `columns` and `late`."""
        return bits_of(names, self.late_parts)

    def late_of(self, numbers: npt.ArrayLike) -> dict[int, list[str]]:
        """Return the late columns of those of these groups that have any, by number."""
        if not self.late_names:
            return {}
        index, rows, parts = self._index, self._index.rows_of(numbers), self.late_parts
        rows = rows[index["late"][rows] != 0]
        pairs = zip(index["number"][rows].tolist(), index["late"][rows].tolist(), strict=True)
        return {number: names_of(bits, parts) for number, bits in pairs}

    def add(self, added: AddedColumns) -> None:
        """Record the late columns of one group; a freed group keeps none."""
        index, rows = self._index, self._index.rows_of([added.number])
        self.late_names += [name for name in added.crc32c if name not in self.late_names]
        if not len(rows):
            return
        for column in ("columns", "late"):
            index[column][rows] |= self.bits_of(added.crc32c)
        index["frame_bytes"][rows] += added.frame_bytes
        for column in SCORES:
            index[column][rows] = getattr(added, column)
        index["priority"][rows] = added.advantage_abs_mean
