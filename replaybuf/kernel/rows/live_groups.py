"""Sums over the live groups of each adapter."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.rows.index import LIVE, Index, Integers, split_by_adapter
from replaybuf.wire.group import hash_name

NO_BYTES = np.empty(0, np.int32)
_SUMMED = ("tokens", "times_sampled", "frame_bytes")


class LiveTotals(NamedTuple):
    """Sums over live groups: groups, tokens, groups never used, uses, bytes of frames."""

    groups: int = 0
    tokens: int = 0
    fresh: int = 0
    uses: int = 0
    frame_bytes: int = 0

    @classmethod
    def of(cls, tokens: Integers, uses: Integers, frame_bytes: Integers = NO_BYTES) -> LiveTotals:
        """Sum up groups by their tokens, uses and bytes, [groups] each."""
        fresh = len(uses) - int(np.count_nonzero(uses))
        return cls(len(uses), _sum(tokens), fresh, _sum(uses), _sum(frame_bytes))

    def plus(self, other: LiveTotals) -> LiveTotals:
        """Add up two sums."""
        return LiveTotals(*map(operator.add, self, other))


NO_LIVE = LiveTotals()


class LiveGroups:
    """Sums over the live groups in an index: kept while groups only arrive, computed again after `forget`."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._by_adapter: dict[int, LiveTotals] | None = None

    def totals(self, adapter: str | None = None) -> LiveTotals:
        """Sum up the live groups of an adapter, or of the run."""
        if self._by_adapter is None:
            rows = self._index.live_slice()
            adapters, *columns = (self._index[name][rows] for name in ("adapter", *_SUMMED))
            split = split_by_adapter(adapters)
            self._by_adapter = {code: LiveTotals.of(*(column[at] for column in columns)) for code, at in split}
        if adapter is not None:
            return self._by_adapter.get(hash_name(adapter), NO_LIVE)
        return LiveTotals(*map(sum, zip(NO_LIVE, *self._by_adapter.values(), strict=True)))

    def mask(self, adapter: str) -> npt.NDArray[np.bool_]:
        """Return which rows are live groups of an adapter."""
        live: npt.NDArray[np.bool_] = self._index["state"] == LIVE
        return live & (self._index["adapter"] == hash_name(adapter)) if adapter else live

    def count_sources(self, adapter: str, sources: Sequence[int]) -> tuple[int, ...]:
        """Count the live groups of an adapter by source, for each of these hashes: 1 ms per hash and million groups."""
        if not sources:
            return ()
        live, column = self.mask(adapter), self._index["source"]
        return tuple(int(np.count_nonzero(live & (column == source))) for source in sources)

    def forget(self) -> None:
        """Drop the sums: live groups are about to change."""
        self._by_adapter = None

    def add(self, code: int, tokens: Integers, frame_bytes: Integers) -> None:
        """Add new groups of the adapter with this hash, by their tokens and bytes [groups]."""
        if self._by_adapter is not None:
            groups, live_tokens, fresh, uses, live_bytes = self._by_adapter.get(code, NO_LIVE)
            count, added_tokens, added_bytes = len(tokens), sum(tokens.tolist()), sum(frame_bytes.tolist())
            added = groups + count, live_tokens + added_tokens, fresh + count, uses, live_bytes + added_bytes
            self._by_adapter[code] = LiveTotals(*added)

    def add_bytes(self, code: int, frame_bytes: int) -> None:
        """Add bytes to live groups of the adapter with this hash."""
        if self._by_adapter is not None:
            self._by_adapter[code] = self._by_adapter[code].plus(LiveTotals(frame_bytes=frame_bytes))


def _sum(column: Integers) -> int:
    """Return `column.sum(dtype=np.int64)` without its overhead, which is most of its time for one group."""
    return int(np.add.reduce(column, dtype=np.int64))
