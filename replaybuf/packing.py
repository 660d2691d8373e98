"""Packing: whole rollouts into micro-batches of `seq_len` tokens, an equal number for every data-parallel rank.

Pure: lengths in, grid out; the same arguments give the same grid on any machine, so it is computed again for another
world size instead of being stored.

- Rows by best-fit decreasing (Johnson 1973) with a sorted list of free rooms: O(n log n). Their number, rounded up to a
  multiple of the ranks, is the number of micro-batches.
- Rollouts go to ranks by estimated cost, longest processing time first (Graham 1969), and every rank packs its own into
  equally filled rows. Cost of a rollout is a·L + b·L²: dense layers are linear in tokens, attention is quadratic.
- Where rows are so full that a rank cannot pack its share, the rows of the whole batch are dealt instead, and rows and
  rollouts exchanged between the costliest and the cheapest ranks.
- A rank's rows stand in the order of their cost, so that the slots of all ranks cost about the same. Rows that are too
  few are split; an empty filler row appears only where there are fewer rollouts than rows.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replaybuf.errors import Invalid

LINEAR_COST = 1.0
QUADRATIC_COST = 1.0 / 12288
"""b/a for a typical dense transformer: attention 4·L·d against 24·d² per token and layer, at d = 2048."""

MAX_RANKS = 4096

EVEN_ENOUGH = 1.001
"""Cost of the costliest rank over the mean at which exchanging stops."""
_MOST_EXCHANGES = 256
_MOST_PARTNERS = 16
_SLACK = (1.01, 1.04, 1.16, math.inf)
"""How much more than its equal share a row may hold, tried in this order."""

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
    costs = rollout_costs(lengths)
    rows = best_fit_decreasing(lengths, seq_len)
    per_rank = max(1, -(-len(rows) // ranks))
    grid = _pack_each_rank(lengths, costs, seq_len, ranks, per_rank)
    if grid is None:
        grid = _deal(_round_up(rows, costs, per_rank * ranks), costs, ranks)
        _even_out(grid, lengths, costs, seq_len)
    return [sorted(rank, key=lambda row: (-_cost(row, costs), row)) for rank in grid]


def best_fit_decreasing(lengths: npt.NDArray[np.int32], seq_len: int) -> list[Row]:
    """Put each rollout, longest first, into the row with the least room that takes it."""
    return _best_fit(_longest_first(lengths), lengths.tolist(), seq_len)


def rollout_costs(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Estimate the cost of each rollout: a·L + b·L²."""
    tokens = lengths.astype(np.float64)
    costs: npt.NDArray[np.float64] = LINEAR_COST * tokens + QUADRATIC_COST * tokens**2
    return costs


def padding_fraction(lengths: npt.NDArray[np.int32], grid: Sequence[Sequence[Row]], seq_len: int) -> float:
    """Unused share of all rows: 1 - tokens / (rows * seq_len)."""
    rows = sum(len(rank) for rank in grid)
    return 1.0 - float(lengths.sum()) / (rows * seq_len) if rows else 0.0


def _longest_first(lengths: npt.NDArray[np.int32]) -> Row:
    order: Row = np.argsort(-lengths.astype(np.int64), kind="stable").tolist()
    return order


def _best_fit(items: Row, sizes: list[int], capacity: int) -> list[Row]:
    rows: list[Row] = []
    rooms: list[tuple[int, int]] = []  # (room left, row), ascending
    for item in items:
        size = sizes[item]
        at = bisect.bisect_left(rooms, (size, -1))
        if at == len(rooms):
            rows.append([item])
            bisect.insort(rooms, (capacity - size, len(rows) - 1))
        else:
            room, row = rooms.pop(at)
            rows[row].append(item)
            bisect.insort(rooms, (room - size, row))
    return rows


def _cost(row: Row, costs: npt.NDArray[np.float64]) -> float:
    return float(costs[row].sum()) if row else 0.0


def _pack_each_rank(
    lengths: npt.NDArray[np.int32], costs: npt.NDArray[np.float64], seq_len: int, ranks: int, per_rank: int
) -> list[list[Row]] | None:
    """Share the rollouts out by cost, then pack each rank on its own; None where one cannot be packed."""
    sizes = lengths.tolist()
    shares: list[Row] = [[] for _ in range(ranks)]
    cheapest = [(0.0, rank) for rank in range(ranks)]
    for item in _longest_first(lengths):
        total, rank = cheapest[0]
        shares[rank].append(item)
        heapq.heapreplace(cheapest, (total + float(costs[item]), rank))
    grid = []
    for share in shares:
        rows = _pack_evenly(share, sizes, seq_len, per_rank)
        needless_filler = len(share) < per_rank and len(sizes) >= ranks * per_rank
        if rows is None or needless_filler:
            return None
        grid.append(_round_up(rows, costs, per_rank))
    return grid


def _pack_evenly(share: Row, sizes: list[int], seq_len: int, most: int) -> list[Row] | None:
    """Pack into at most `most` rows, none much fuller than the others; None where they do not suffice."""
    tokens = sum(sizes[item] for item in share)
    longest = sizes[share[0]] if share else 0
    for slack in _SLACK:
        capacity = int(min(seq_len, max(longest, tokens * slack / most)))
        rows = _best_fit(share, sizes, capacity)
        if len(rows) <= most:
            return rows
    return None


def _round_up(rows: list[Row], costs: npt.NDArray[np.float64], wanted: int) -> list[Row]:
    """Split the costliest rows until there are `wanted`; only then add empty ones."""
    heap = [(-_cost(row, costs), number) for number, row in enumerate(rows) if len(row) > 1]
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
                heapq.heappush(heap, (-_cost(rows[at], costs), at))
    return rows + [[] for _ in range(wanted - len(rows))]


def _deal(rows: list[Row], costs: npt.NDArray[np.float64], ranks: int) -> list[list[Row]]:
    """Deal rows of like cost, one to every rank, the costliest to the rank that has least so far."""
    dearest_first = sorted(rows, key=lambda row: (-_cost(row, costs), row))
    grid: list[list[Row]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for start in range(0, len(rows), ranks):
        cheapest_first = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for row, rank in zip(dearest_first[start : start + ranks], cheapest_first, strict=True):
            grid[rank].append(row)
            totals[rank] += _cost(row, costs)
    return grid


class _Exchange(NamedTuple):
    """Rollouts that row `heavy_row` gives for those of `light_row`; `cost` moves to the lighter rank."""

    cost: float
    heavy_row: int
    light_row: int
    given: Row
    taken: Row


def _even_out(
    grid: list[list[Row]], lengths: npt.NDArray[np.int32], costs: npt.NDArray[np.float64], seq_len: int
) -> None:
    """Exchange rows or rollouts, always away from the costliest rank, until ranks are even enough or nothing helps."""
    sizes, each = lengths.tolist(), costs.tolist()
    totals = np.array([sum(_cost(row, costs) for row in rank) for rank in grid])
    goal = EVEN_ENOUGH * float(totals.mean())
    for _ in range(_MOST_EXCHANGES):
        heavy = int(totals.argmax())
        if totals[heavy] <= goal:
            return
        for light in np.argsort(totals, kind="stable")[:_MOST_PARTNERS].tolist():
            gap = float(totals[heavy] - totals[light])
            found = _find_exchange(grid[heavy], grid[light], sizes, each, seq_len, gap)
            if found:
                break
        else:
            return
        heavy_row, light_row = grid[heavy][found.heavy_row], grid[light][found.light_row]
        grid[heavy][found.heavy_row] = [i for i in heavy_row if i not in found.given] + found.taken
        grid[light][found.light_row] = [i for i in light_row if i not in found.taken] + found.given
        totals[heavy] -= found.cost
        totals[light] += found.cost


def _find_exchange(
    heavy: list[Row], light: list[Row], sizes: list[int], costs: list[float], seq_len: int, gap: float
) -> _Exchange | None:
    """Find what comes closest to moving half the gap: two rows, two rollouts, or one rollout that moves."""
    best: _Exchange | None = None
    off = gap / 2 * (1 - 1e-6)  # moving nothing, or the whole gap, is no gain

    def consider(found: _Exchange) -> None:
        nonlocal best, off
        if abs(found.cost - gap / 2) < off:
            best, off = found, abs(found.cost - gap / 2)

    light_costs = [sum(costs[i] for i in row) for row in light]
    for p, row in enumerate(heavy):
        cost = sum(costs[i] for i in row)
        for q, other in enumerate(light_costs):
            consider(_Exchange(cost - other, p, q, row, light[q]))
    rooms = [seq_len - sum(sizes[i] for i in row) for row in light]
    partners = sorted((costs[j], q, j) for q, row in enumerate(light) for j in row)
    for p, row in enumerate(heavy):
        for i in row:
            if len(row) > 1:
                q = max(range(len(light)), key=rooms.__getitem__)
                if sizes[i] <= rooms[q]:
                    consider(_Exchange(costs[i], p, q, [i], []))
            at = bisect.bisect_left(partners, (costs[i] - gap / 2, -1, -1))
            for other, q, j in partners[max(0, at - 3) : at + 3]:
                if sizes[i] - sizes[j] <= rooms[q]:
                    consider(_Exchange(costs[i] - other, p, q, [i], [j]))
    return best
