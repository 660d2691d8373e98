"""Compare packing with first fit, first-fit decreasing and the lower bound: rows, unused share, balance, time.

    python benchmarks/packing.py --rollouts 512 4096 65536 --ranks 1 8 64 256 512 4096 --repeats 9

Lengths are lognormal (median 665 tokens, sigma 0.9), cut to 16..8192; seq_len is 8192. Rows are those of all batches
before rounding up to a multiple of the ranks. Balance is the cost of the most expensive rank over the mean, in total
and slot by slot. Times are processor time; other work on the machine still slows caches and clock.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from measured import Measured, Target

from replaybuf.packing.cost import rollout_costs
from replaybuf.packing.pack import best_fit_decreasing, fillers, pack, padding_fraction

SEQ_LEN = 8192
FIRST_FIT, DECREASING, PACK = "naive first fit", "first-fit decreasing", "pack"
UNUSED_PERCENT = {512: 1.2, 4096: 0.5}
"""Share of the rows that may stay empty, by rollouts."""
MANY = 4096
"""Rollouts with the targets 10 times the speed of naive first fit, and under 3 ms."""
TIMED_RANKS = (1, 8, 256)
"""World sizes with these targets: one rank, few ranks, and so many that each has one or two rows."""
EVEN_ROLLOUTS, EVEN_RANKS, EVEN = 512, 8, 1.005
"""Target for the cost of the most expensive rank over the mean, by rollouts and ranks."""
TOTAL, SLOTS = "costliest rank over the mean", "costliest rank of a slot over the mean"
ROWS, FILLERS, TIME = "micro-batches per rank", "empty filler micro-batches", "time to pack"
FIGURES = {TOTAL: "", SLOTS: "", ROWS: "", FILLERS: "", TIME: "ms"}
"""Figures of each world size, and their units."""

Lengths = npt.NDArray[np.int32]


def lognormal_lengths(count: int, seed: int) -> Lengths:
    """Draw lengths as reasoning runs have them."""
    return np.clip(np.random.default_rng(seed).lognormal(6.5, 0.9, count), 16, SEQ_LEN).astype(np.int32)


def first_fit(sizes: list[int]) -> int:
    """Count the rows of the naive method: search all rows from the first for each rollout."""
    rooms: list[int] = []
    for size in sizes:
        for at, room in enumerate(rooms):
            if room >= size:
                rooms[at] = room - size
                break
        else:
            rooms.append(SEQ_LEN - size)
    return len(rooms)


def processor_ms(work: Callable[[], object], repeats: int) -> list[float]:
    """Time a call in ms of processor time."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        taken.append((time.process_time() - start) * 1e3)
    return taken


def record_rows(results: Measured, batches: list[Lengths]) -> None:
    """Compare the rows before rounding up, and their unused share."""
    count = len(batches[0])
    grids = [pack(lengths, SEQ_LEN, 1) for lengths in batches]
    rows = sum(len(grid[0]) for grid in grids)
    sides = {
        FIRST_FIT: [sum(first_fit(lengths.tolist()) for lengths in batches)],
        DECREASING: [sum(first_fit(sorted(lengths.tolist(), reverse=True)) for lengths in batches)],
        PACK: [rows],
    }
    least = sum(-(-int(lengths.sum()) // SEQ_LEN) for lengths in batches)
    unused = [100 * padding_fraction(lengths, grid, SEQ_LEN) for lengths, grid in zip(batches, grids, strict=True)]
    named = f"{count} rollouts, {len(batches)} batches"
    results.record(f"{named}: rows", sides, reference=DECREASING, targets={PACK: [Target("ratio", "at most", 1.0)]})
    results.record(
        f"{named}: rows and their lower bound, tokens / seq_len",
        {"lower bound": [least], PACK: [rows]},
        reference="lower bound",
        targets={PACK: [Target("ratio", "at most", 1.01)]},
    )
    wanted = [Target("median", "at most", UNUSED_PERCENT[count])] if count in UNUSED_PERCENT else []
    results.record(f"{named}: unused share of the rows", {PACK: unused}, unit="%", targets={PACK: wanted})


def record_times(results: Measured, lengths: Lengths, repeats: int) -> None:
    """Compare the time to pack one batch for some world sizes."""
    count, sizes = len(lengths), lengths.tolist()
    sides = {
        FIRST_FIT: processor_ms(lambda: first_fit(sizes), 1 if count > 10_000 else 3),
        "best-fit decreasing": processor_ms(lambda: best_fit_decreasing(lengths, SEQ_LEN), repeats),
    }
    wanted = [Target("ratio", "at least", 10), Target("median", "at most", 3)] if count == MANY else []
    packed = {f"{PACK}, {ranks} ranks": ranks for ranks in TIMED_RANKS}
    sides |= {
        name: processor_ms(lambda ranks=ranks: pack(lengths, SEQ_LEN, ranks), repeats)  # type: ignore[misc]
        for name, ranks in packed.items()
    }
    results.record(
        f"{count} rollouts: time to pack one batch",
        sides,
        unit="ms",
        ratio="reference / it",
        targets=dict.fromkeys(packed, wanted),
    )


def record_balance(results: Measured, batches: list[Lengths], worlds: list[int], repeats: int) -> None:
    """Record how even the ranks of each world size are, and the time to pack for them."""
    count = len(batches[0])
    balances = {ranks: balance(batches if ranks < 100 else batches[:2], ranks, repeats) for ranks in worlds}
    even = {f"{EVEN_RANKS} ranks": [Target("median", "at most", EVEN)]} if count == EVEN_ROLLOUTS else {}
    for what, unit in FIGURES.items():
        sides = {f"{ranks} ranks": figures[what] for ranks, figures in balances.items()}
        results.record(f"{count} rollouts: {what}", sides, unit=unit, targets=even if what == TOTAL else {})


def balance(batches: list[Lengths], ranks: int, repeats: int) -> dict[str, list[float]]:
    """Return the figures of each batch; the first five are repeated for their time."""
    figures: dict[str, list[float]] = {name: [] for name in FIGURES}
    for number, lengths in enumerate(batches):
        costs = rollout_costs(lengths)
        grid = pack(lengths, SEQ_LEN, ranks)
        cost = np.array([[float(costs[row].sum()) for row in rank] for rank in grid])
        figures[TOTAL].append(float(cost.sum(axis=1).max() / cost.sum(axis=1).mean()))
        figures[SLOTS].append(float(cost.max(axis=0).sum() / cost.mean(axis=0).sum()))
        figures[ROWS].append(len(grid[0]))
        figures[FILLERS].append(fillers(grid))
        figures[TIME] += processor_ms(functools.partial(pack, lengths, SEQ_LEN, ranks), repeats if number < 5 else 1)
    return figures


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[512, 4096, 65536])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 256, 512, 4096])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    results = Measured(
        "packing", reference=FIRST_FIT, packages=["numpy"], settings=vars(arguments) | {"seq_len": SEQ_LEN}
    )
    for count in arguments.rollouts:
        seeds = 1 if count > 10_000 else 8 if count > 1_000 else 30
        batches = [lognormal_lengths(count, seed) for seed in range(seeds)]
        record_rows(results, batches)
        record_times(results, batches[0], arguments.repeats)
        record_balance(results, batches, arguments.ranks, min(arguments.repeats, 3 if count > 10_000 else 9))
    results.save()


if __name__ == "__main__":
    main()
