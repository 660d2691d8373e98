"""Bytes of each group in files of the spill folder: the run's leader fills this column of the index, not the fold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.rows.index import FREED, SPILLED
from replaybuf.kernel.state.run_state import RunState


class SpillUse(NamedTuple):
    """Bytes of groups in Redis; groups with bytes in files that are not freed, and those bytes."""

    in_memory: int = 0
    groups: int = 0
    bytes: int = 0


class SpillState:
    """How many bytes of each group are in files, as the run's leader knows."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._use: tuple[int, int, SpillUse] | None = None

    def load(self, spilled: Mapping[int, int]) -> None:
        """Replace what is in files: bytes by group."""
        self._state.index[SPILLED][:] = 0
        self.mark(spilled)

    def sizes_of(self, numbers: npt.ArrayLike) -> dict[int, int]:
        """Return the bytes of groups, frames and late columns, in files or not; freed groups are left out."""
        index = self._state.index
        rows = index.rows_of(numbers)
        return dict(zip(index["number"][rows].tolist(), index["frame_bytes"][rows].tolist(), strict=True))

    def list_spilled(self, numbers: npt.ArrayLike) -> set[int]:
        """List those of these groups that have bytes in files."""
        index = self._state.index
        rows = index.rows_of(numbers)
        return set(index["number"][rows[index[SPILLED][rows] > 0]].tolist())

    def mark(self, spilled: Mapping[int, int]) -> None:
        """Record how many bytes of these groups are in files now; ignore groups that are freed."""
        self._state.index.assign(SPILLED, spilled)
        self._use = None

    @property
    def use(self) -> SpillUse:
        """Count what is in memory and what is spilled; after appends only the new groups are counted."""
        state, index = self._state, self._state.index
        if self._use is None or self._use[0] != state.entries:
            held, moved = index["state"] != FREED, index[SPILLED]
            in_files = sum_bytes(moved[held])
            in_memory = sum_bytes(index["frame_bytes"][held]) - in_files
            use = SpillUse(in_memory, int(np.count_nonzero(moved[held])), in_files)
            self._use = state.entries, state.stored, use
        elif self._use[1] != state.stored:
            arrived_bytes = index["frame_bytes"][int(np.searchsorted(index["number"], self._use[1], "right")) :]
            use = self._use[2]._replace(in_memory=self._use[2].in_memory + sum_bytes(arrived_bytes))
            self._use = state.entries, state.stored, use
        return self._use[2]


def sum_bytes(values: npt.NDArray[np.int32]) -> int:
    """Add up bytes, whose sum may need 64 bits."""
    return int(values.sum(dtype=np.int64))
