"""Packing: whole rollouts into micro-batches of `seq_len` tokens, an equal number for every data-parallel rank.

Pure: lengths in, grid out. All sums are of integers and the earlier position wins every tie. So the same arguments give
the same grid on any machine, and the grid is computed again, also for another world size, instead of being stored.

1. Try the least number of rows first: tokens / seq_len, or the number of rollouts above half a row if that is larger.
   Round it up to a multiple of the ranks and use the added rows. Row r goes to rank r % ranks.
2. Give each row a target cost (`level`): the same for all rows of a rank, except rows whose longest rollout alone costs
   more. The targets make ranks equal in total and slot by slot.
3. Spread the rollouts, longest first: in rounds, the largest to the cheapest row; short ones by best fit up to the
   target; the last ones to the rank that is furthest below its target (list scheduling, Graham 1969).
4. If a rollout finds no row, use best-fit decreasing (Johnson 1973) to find the number of rows. Then deal rows of
   similar cost to the ranks, the costliest to the cheapest rank.
5. Even out the rest by exchanges (`replaybuf.packing.exchange`).

Each adapter has its own rows. A filler, a row without rollouts, appears only if there are fewer rollouts than rows.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replaybuf.errors import Invalid, counted
from replaybuf.packing.cost import TYPICAL, whole_costs
from replaybuf.packing.exchange import Rollouts, even_out
from replaybuf.wire.config import MAX_RANKS, Cost

_BY_BEST_FIT = 3
"""Shortest rollouts per row that are placed by best fit. More fill rows better, fewer are faster."""
_MOST_RANKS = 8
_BY_RANK = 4
"""Shortest rollouts per rank that even out ranks."""
_HOPELESS, _EASY = 0.001, 0.01
"""Unused share of rows below which spreading is not tried, and above which best fit of one per row is enough."""

Row = list[int]
"""Positions of the rollouts of one micro-batch, longest first."""
Ints = npt.NDArray[np.int64]


def pack(
    lengths: npt.NDArray[np.int32],
    seq_len: int,
    ranks: int,
    cost: Cost = TYPICAL,
    adapters: npt.NDArray[np.int32] | None = None,
) -> list[list[Row]]:
    """Arrange rollouts into `grid[rank][micro-batch]`; the rows of a rank are ordered by cost.

    `lengths` [n] in tokens; `adapters` [n] codes: rollouts of two adapters never share a row (None: one adapter).
    Raises `Invalid` if a rollout is longer than `seq_len` or `ranks` is not in 1..4096.
    """
    _check(lengths, seq_len, ranks)
    if not len(lengths):
        return [[[]] for _ in range(ranks)]
    costs = whole_costs(lengths, cost)
    sizes = lengths.astype(np.int64)
    order = _order(seq_len - sizes, seq_len)
    parts = [order] if adapters is None else [order[adapters[order] == code] for code in np.unique(adapters).tolist()]
    if ranks == 1:
        return _of_one_rank(parts, sizes, costs, seq_len)
    grid, totals = _grid(parts, sizes, costs, seq_len, ranks)
    even_out(grid, totals, Rollouts(sizes, costs, adapters), seq_len)
    return grid


def best_fit_decreasing(lengths: npt.NDArray[np.int32], seq_len: int) -> list[Row]:
    """Put each rollout, longest first, into the fullest row that has space for it."""
    sizes = lengths.astype(np.int64)
    return _best_fit_decreasing(_order(seq_len - sizes, seq_len), sizes, sizes, seq_len)[0]


def padding_fraction(lengths: npt.NDArray[np.int32], grid: Sequence[Sequence[Row]], seq_len: int) -> float:
    """Return the unused share of all rows: 1 - tokens / (rows * seq_len)."""
    rows = sum(len(rank) for rank in grid)
    return 1.0 - float(lengths.sum(dtype=np.int64)) / (rows * seq_len) if rows else 0.0


def fillers(grid: Sequence[Sequence[Row]]) -> int:
    """Count the rows without rollouts, of all ranks."""
    return sum(not row for rank in grid for row in rank)


def _check(lengths: npt.NDArray[np.int32], seq_len: int, ranks: int) -> None:
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
            f"a rollout has {counted(longest, 'token')}; the maximum is seq_len, {seq_len}",
            name="seq_len",
            value=longest,
            bound=seq_len,
        )


def _grid(parts: list[Ints], sizes: Ints, costs: Ints, seq_len: int, ranks: int) -> tuple[list[list[Row]], Ints]:
    """Build the fewest rows that are a multiple of `ranks` and assign them to ranks; also return rank costs, [ranks].

    `parts`: positions that may share rows, longest first.
    """
    fewest = [_fewest(sizes[part], seq_len) for part in parts]
    best_fit: dict[int, tuple[list[Row], Ints]] = {}
    while True:
        total = max(1, -(-sum(fewest) // ranks)) * ranks
        counts = _share_out(parts, fewest, costs, total)
        levels = _levels(parts, counts, costs, ranks)
        rows: list[Row] = []
        loads: list[Ints] = []
        in_place = True
        for number, (part, level) in enumerate(zip(parts, levels, strict=True)):
            made = _spread(part, sizes, costs, seq_len, level, ranks)
            if made is None:
                if number not in best_fit:
                    best_fit[number] = _best_fit_decreasing(part, sizes, costs, seq_len)
                fitted, load = best_fit[number]
                if len(fitted) > counts[number]:
                    fewest[number] = len(fitted)
                    break
                made = _split(fitted, load, costs, counts[number])
                in_place = False
            rows += made[0]
            loads.append(made[1])
        else:
            empty = total - len(rows)
            load = np.concatenate([*loads, np.zeros(empty, np.int64)])
            rows += [[] for _ in range(empty)]
            return _by_number(rows, load, ranks) if in_place else _deal(rows, load, ranks)


def _of_one_rank(parts: list[Ints], sizes: Ints, costs: Ints, seq_len: int) -> list[list[Row]]:
    """Fill rows by best fit: a single rank needs the fewest rows, not even ones."""
    made = [_best_fit_decreasing(part, sizes, costs, seq_len) for part in parts]
    rows = [row for fitted, _ in made for row in fitted]
    load = np.concatenate([load for _, load in made])
    return [[rows[at] for at in np.argsort(-load, kind="stable").tolist()]]


def _fewest(sizes: Ints, seq_len: int) -> int:
    """Bound the number of rows from below."""
    return max(-(-int(sizes.sum()) // seq_len), int((sizes * 2 > seq_len).sum()))


def _share_out(parts: list[Ints], fewest: list[int], costs: Ints, total: int) -> list[int]:
    """Give each remaining row to the part with the costliest rows that still has a rollout for it."""
    if len(parts) == 1:
        return [min(total, len(parts[0]))]
    counts = list(fewest)
    left = total - sum(counts)
    cost = [int(costs[part].sum()) for part in parts]
    heap = [(-cost[n] / counts[n], n) for n, part in enumerate(parts) if counts[n] < len(part)]
    heapq.heapify(heap)
    while left and heap:
        _, n = heapq.heappop(heap)
        counts[n] += 1
        left -= 1
        if counts[n] < len(parts[n]):
            heapq.heappush(heap, (-cost[n] / counts[n], n))
    return counts


def _levels(parts: list[Ints], counts: list[int], costs: Ints, ranks: int) -> list[Ints]:
    """Return the target cost of each row of each part, so that ranks cost the same; row r goes to rank r % ranks.

    A row costs at least its first rollout, the r-th longest. The other rows of its rank get less by what that exceeds
    the part's mean row.
    """
    firsts = np.concatenate([costs[part[:count]] for part, count in zip(parts, counts, strict=True)])
    means = np.repeat(
        [int(costs[part].sum()) // max(1, count) for part, count in zip(parts, counts, strict=True)], counts
    )
    rank = np.arange(len(firsts)) % ranks
    dear = firsts >= means
    excess, others = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    np.add.at(excess, rank, np.maximum(firsts, means))
    np.add.at(others, rank[~dear], 1)
    excess -= int(means.sum()) // ranks
    level = np.where(dear, firsts, means - (excess // np.maximum(others, 1))[rank])
    return np.split(level, np.cumsum(counts)[:-1])


def _free_rows(free: Ints, rank: int, ranks: int) -> list[tuple[int, int]]:
    """List free tokens and number of the rows of a rank that are not full, fullest first."""
    of_rank = free[rank::ranks].tolist()
    return sorted((left, rank + at * ranks) for at, left in enumerate(of_rank) if left > 0)


class _Spread:
    """Places the rollouts of one part into rows with target costs `level`; positions are those in the part."""

    def __init__(self, part: Ints, sizes: Ints, costs: Ints, seq_len: int, level: Ints) -> None:
        self.size, self.cost = sizes[part], costs[part]
        self.seq_len = seq_len
        self.level = level
        self.row_of = np.full(len(part), -1, np.int64)
        self.filled, self.load = np.zeros(len(level), np.int64), np.zeros(len(level), np.int64)

    def by_rounds(self, upto: int) -> int:
        """Give rollouts, longest first, to the rows furthest below target, one per row and round; return how many."""
        at = 0
        while at < upto:
            lacks = self.level - self.load
            takes = (self.filled <= self.seq_len - self.size[at]) & ((lacks >= self.cost[at]) | (self.load == 0))
            rows = np.flatnonzero(takes)
            if not len(rows):
                break
            rows = rows[np.argsort(self.load[rows], kind="stable")][: upto - at]
            self._place(np.arange(at, at + len(rows)), rows)
            at += len(rows)
        return at

    def by_best_fit(self, items: Ints, *, to_level: bool) -> Ints:
        """Fill rows to their target or to capacity; return the rollouts without a row."""
        if not len(items):
            return items
        free = self.seq_len - self.filled
        if to_level:
            tokens_per_cost = int(self.size[items].sum()) / max(1, int(self.cost[items].sum()))
            free = np.minimum(free, ((self.level - self.load) * tokens_per_cost).astype(np.int64))
        return self._place(items, _best_fit(self.size[items], free))

    def by_rank(self, items: Ints, ranks: int) -> Ints:
        """Give each rollout, by best fit, to the rank furthest below target with space; return those without a row."""
        if not len(items):
            return items
        over = np.zeros(ranks, np.int64)
        np.add.at(over, np.arange(len(self.level)) % ranks, self.load - self.level)
        lacking = list(zip(over.tolist(), range(ranks), strict=True))
        heapq.heapify(lacking)
        free = self.seq_len - self.filled
        free_rows: dict[int, list[tuple[int, int]]] = {}
        rows = []
        for size, cost in zip(self.size[items].tolist(), self.cost[items].tolist(), strict=True):
            passed: list[tuple[int, int]] = []
            row = -1
            while lacking and len(passed) < _MOST_RANKS:
                so_far, rank = lacking[0]
                if rank not in free_rows:
                    free_rows[rank] = _free_rows(free, rank, ranks)
                of_rank = free_rows[rank]
                at = bisect.bisect_left(of_rank, (size, -1))
                if at < len(of_rank):
                    left, row = of_rank.pop(at)
                    bisect.insort(of_rank, (left - size, row))
                    heapq.heapreplace(lacking, (so_far + cost, rank))
                    break
                passed.append(heapq.heappop(lacking))
            for entry in passed:
                heapq.heappush(lacking, entry)
            rows.append(row)
        return self._place(items, np.array(rows, np.int64))

    def _place(self, items: Ints, rows: Ints) -> Ints:
        placed, left = items[rows >= 0], items[rows < 0]
        rows = rows[rows >= 0]
        self.row_of[placed] = rows
        np.add.at(self.filled, rows, self.size[placed])
        np.add.at(self.load, rows, self.cost[placed])
        return left


def _spread(
    part: Ints, sizes: Ints, costs: Ints, seq_len: int, level: Ints, ranks: int
) -> tuple[list[Row], Ints] | None:
    """Spread rollouts over rows with target costs `level`, row r of rank r % ranks; None if a rollout does not fit."""
    count = len(level)
    unused = 1 - int(sizes[part].sum()) / (count * seq_len)
    if unused < _HOPELESS:
        return None
    spread = _Spread(part, sizes, costs, seq_len, level)
    placed = spread.by_rounds(max(min(count, len(part)), len(part) - (_BY_BEST_FIT if unused < _EASY else 1) * count))
    last = max(placed, len(part) - min(_BY_RANK * ranks, len(part) // 16))
    rest = spread.by_best_fit(np.arange(placed, last), to_level=True)
    rest = spread.by_rank(np.concatenate([rest, np.arange(last, len(part))]), ranks)
    rest = spread.by_best_fit(rest, to_level=False)
    return None if len(rest) else (_collect(part, spread.row_of, count), spread.load)


def _best_fit_decreasing(part: Ints, sizes: Ints, costs: Ints, seq_len: int) -> tuple[list[Row], Ints]:
    """Open rows as needed; return the rows and their costs."""
    row_of = _best_fit(sizes[part], np.empty(0, np.int64), new_free=seq_len)
    load = np.zeros(int(row_of.max(initial=-1)) + 1, np.int64)
    np.add.at(load, row_of, costs[part])
    return _collect(part, row_of, len(load)), load


def _best_fit(sizes: Ints, free: Ints, new_free: int | None = None) -> Ints:
    """Find for each size in turn the fullest row with space for it: its number, -1 for none.

    If no row has space and `new_free` is given, open a row with that many free tokens.
    """
    # One integer per row, free tokens above row number: bisects twice as fast as tuples.
    bits = (len(free) + len(sizes)).bit_length()
    mask = (1 << bits) - 1
    some = np.flatnonzero(free > 0)
    fullest_first = some[np.argsort(free[some], kind="stable")]
    keys: list[int] = ((free[fullest_first] << bits) | fullest_first).tolist()
    rows, opened = len(keys), len(free)
    best: Row = []
    add, find, pop, insert = best.append, bisect.bisect_left, keys.pop, keys.insert
    for needed in (sizes << bits).tolist():
        at = find(keys, needed)
        if at < rows:
            key = pop(at)
        elif new_free is not None:
            key = new_free << bits | opened
            opened += 1
            rows += 1
        else:
            add(-1)
            continue
        add(key & mask)
        key -= needed
        insert(find(keys, key, 0, at), key)
    return np.array(best, np.int64)


def _collect(part: Ints, row_of: Ints, count: int) -> list[Row]:
    by_row = part[_order(row_of, count)].tolist()
    ends = np.cumsum(np.bincount(row_of, minlength=count)).tolist()
    return [by_row[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _order(values: Ints, bound: int) -> npt.NDArray[np.intp]:
    """Sort positions by values in 0..bound, ties by position."""
    # numpy sorts 16-bit integers by radix, several times faster.
    return np.argsort(values.astype(np.uint16) if bound < 1 << 16 else values, kind="stable")


def _split(fitted: list[Row], load: Ints, costs: Ints, wanted: int) -> tuple[list[Row], Ints]:
    """Split the costliest rows until there are `wanted` rows or no row has two rollouts; also return row costs."""
    rows, each = list(fitted), load.tolist()
    heap = [(-each[number], number) for number, row in enumerate(rows) if len(row) > 1 and len(rows) < wanted]
    heapq.heapify(heap)
    while len(rows) < wanted and heap:
        _, number = heapq.heappop(heap)
        # Every second rollout, longest first, is close enough to half the cost.
        row = rows[number]
        rows[number], half = row[::2], row[1::2]
        rows.append(half)
        each.append(0)
        for at in (number, len(rows) - 1):
            each[at] = int(costs[rows[at]].sum())
            if len(rows[at]) > 1:
                heapq.heappush(heap, (-each[at], at))
    return rows, np.array(each, np.int64)


def _by_number(rows: list[Row], load: Ints, ranks: int) -> tuple[list[list[Row]], Ints]:
    """Give row r to rank r % ranks."""
    if len(rows) == ranks:
        return [[row] for row in rows], load
    of_rank = load.reshape(-1, ranks).T
    order = np.argsort(-of_rank, axis=1, kind="stable")
    grid = [[rows[slot * ranks + rank] for slot in slots] for rank, slots in enumerate(order.tolist())]
    return grid, of_rank.sum(axis=1)


def _deal(rows: list[Row], load: Ints, ranks: int) -> tuple[list[list[Row]], Ints]:
    """Deal rows of similar cost, one to every rank, the costliest to the cheapest rank so far."""
    dearest_first = np.argsort(-load, kind="stable").tolist()
    each = load.tolist()
    grid: list[list[Row]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(rows), ranks):
        cheapest_first = sorted(range(ranks), key=totals.__getitem__)
        for rank, at in zip(cheapest_first, dearest_first[start : start + ranks], strict=True):
            grid[rank].append(rows[at])
            totals[rank] += each[at]
    return grid, np.array(totals)
