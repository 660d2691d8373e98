"""Packing: whole rollouts into micro-batches of `seq_len` tokens, an equal number for every data-parallel rank.

Pure: lengths in, grid out; the same arguments give the same grid on any machine, so it is computed again for another
world size instead of being stored.

- Rows by best-fit decreasing (Johnson 1973) with a sorted list of free rooms: O(n log n).
- The number of rows is rounded up to a multiple of the ranks by splitting the costliest rows; an empty filler row
  appears only where there are fewer rollouts than rows.
- Rows go to ranks by estimated cost, longest processing time first (Graham 1969) with equal counts. Cost of a row is
  the sum over its rollouts of a·L + b·L²: dense layers are linear in tokens, attention is quadratic per rollout.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replaybuf.errors import Invalid

LINEAR_COST = 1.0
QUADRATIC_COST = 1.0 / 12288
"""b/a for a typical dense transformer: attention 4·L·d against 24·d² per token and layer, at d = 2048."""

MAX_RANKS = 4096

Row = list[int]
"""Positions of the rollouts of one micro-batch."""


def pack(lengths: npt.NDArray[np.int32], seq_len: int, ranks: int) -> list[list[Row]]:
    """Arrange rollouts with these lengths (tokens) into `grid[rank][micro-batch]`.

    Raises `Invalid` where a rollout is longer than `seq_len` or `ranks` is not in 1..4096.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise Invalid(
            f"dp_world_size is {ranks}; it must be in 1..{MAX_RANKS}",
            name="dp_world_size",
            value=ranks,
            bound=MAX_RANKS,
        )
    if len(lengths) and int(lengths.max()) > seq_len:
        longest = int(lengths.max())
        raise Invalid(
            f"a rollout has {longest} tokens; a micro-batch has room for seq_len = {seq_len}",
            name="seq_len",
            value=longest,
            bound=seq_len,
        )
    rows = best_fit_decreasing(lengths, seq_len)
    costs = rollout_costs(lengths)
    rows = _round_up(rows, costs, max(1, -(-len(rows) // ranks)) * ranks)
    return _deal(rows, costs, ranks)


def best_fit_decreasing(lengths: npt.NDArray[np.int32], seq_len: int) -> list[Row]:
    """Put each rollout, longest first, into the row with the least room that takes it."""
    order = np.argsort(-lengths.astype(np.int64), kind="stable").tolist()
    sizes = lengths.tolist()
    rows: list[Row] = []
    rooms: list[tuple[int, int]] = []  # (room left, row), ascending
    for item in order:
        size = sizes[item]
        at = bisect.bisect_left(rooms, (size, -1))
        if at == len(rooms):
            rows.append([item])
            bisect.insort(rooms, (seq_len - size, len(rows) - 1))
        else:
            room, row = rooms.pop(at)
            rows[row].append(item)
            bisect.insort(rooms, (room - size, row))
    return rows


def rollout_costs(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Estimate the cost of each rollout: a·L + b·L²."""
    tokens = lengths.astype(np.float64)
    costs: npt.NDArray[np.float64] = LINEAR_COST * tokens + QUADRATIC_COST * tokens**2
    return costs


def padding_fraction(lengths: npt.NDArray[np.int32], grid: Sequence[Sequence[Row]], seq_len: int) -> float:
    """Unused share of all rows: 1 - tokens / (rows * seq_len)."""
    rows = sum(len(rank) for rank in grid)
    return 1.0 - float(lengths.sum()) / (rows * seq_len) if rows else 0.0


def _round_up(rows: list[Row], costs: npt.NDArray[np.float64], wanted: int) -> list[Row]:
    """Split the costliest rows until there are `wanted`; only then add empty ones."""
    heap = [(-float(costs[row].sum()), number) for number, row in enumerate(rows) if len(row) > 1]
    heapq.heapify(heap)
    rows = [list(row) for row in rows]
    while len(rows) < wanted and heap:
        _, number = heapq.heappop(heap)
        # Alternating over the row's rollouts, longest first, halves its cost closely enough.
        row = rows[number]
        rows[number], half = row[::2], row[1::2]
        rows.append(half)
        for at in (number, len(rows) - 1):
            if len(rows[at]) > 1:
                heapq.heappush(heap, (-float(costs[rows[at]].sum()), at))
    return rows + [[] for _ in range(wanted - len(rows))]


def _deal(rows: list[Row], costs: npt.NDArray[np.float64], ranks: int) -> list[list[Row]]:
    per_rank = len(rows) // ranks
    row_costs = [float(costs[row].sum()) if row else 0.0 for row in rows]
    grid: list[list[Row]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for number in sorted(range(len(rows)), key=lambda n: (-row_costs[n], n)):
        total, rank = heapq.heappop(heap)
        grid[rank].append(rows[number])
        if len(grid[rank]) < per_rank:
            heapq.heappush(heap, (total + row_costs[number], rank))
    return grid
