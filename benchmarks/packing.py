"""Packing against naive first-fit, first-fit decreasing and the lower bound: rows, unused share, balance, time.

    python benchmarks/packing.py [--rollouts 512 4096 65536] [--ranks 1 8 64 512 4096] [--repeats 9] [--json PATH]

Lengths are lognormal (median 665 tokens, sigma 0.9), cut to 16..8192, seq_len 8192. Times are processor time, the best
of the repeats: other work on the machine does not count, but still slows caches and clock down.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from replaybuf.cost import rollout_costs
from replaybuf.packing import best_fit_decreasing, fillers, pack, padding_fraction

SEQ_LEN = 8192
Lengths = npt.NDArray[np.int32]


def lognormal_lengths(count: int, seed: int) -> Lengths:
    """Draw lengths as reasoning runs have them."""
    return np.clip(np.random.default_rng(seed).lognormal(6.5, 0.9, count), 16, SEQ_LEN).astype(np.int32)


def first_fit(sizes: list[int]) -> int:
    """Count the rows of the naive method: look through all rows, from the first, for each rollout."""
    rooms: list[int] = []
    for size in sizes:
        for at, room in enumerate(rooms):
            if room >= size:
                rooms[at] = room - size
                break
        else:
            rooms.append(SEQ_LEN - size)
    return len(rooms)


def best_ms(work: Callable[[], object], repeats: int) -> float:
    """Time a call: the best of the repeats."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return 1e3 * min(taken)


def bins(count: int, seeds: int, repeats: int) -> dict[str, Any]:
    """Compare the rows before they are rounded up to a multiple of the ranks."""
    batches = [lognormal_lengths(count, seed) for seed in range(seeds)]
    ours = [pack(lengths, SEQ_LEN, 1) for lengths in batches]
    rows = sum(len(grid[0]) for grid in ours)
    decreasing = sum(first_fit(sorted(lengths.tolist(), reverse=True)) for lengths in batches)
    least = sum(-(-int(lengths.sum()) // SEQ_LEN) for lengths in batches)
    unused = [padding_fraction(lengths, grid, SEQ_LEN) for lengths, grid in zip(batches, ours, strict=True)]
    sizes = batches[0].tolist()
    naive_ms = best_ms(lambda: first_fit(sizes), 1 if count > 10000 else 3)
    return {
        "rollouts": count,
        "batches": seeds,
        "rows_over_first_fit": rows / sum(first_fit(lengths.tolist()) for lengths in batches),
        "rows_over_first_fit_decreasing": rows / decreasing,
        "rows_over_lower_bound": rows / least,
        "unused_mean": float(np.mean(unused)),
        "unused_worst": max(unused),
        "naive_first_fit_ms": naive_ms,
        "best_fit_decreasing_ms": best_ms(lambda: best_fit_decreasing(batches[0], SEQ_LEN), repeats),
        "pack_8_ranks_ms": best_ms(lambda: pack(batches[0], SEQ_LEN, 8), repeats),
    }


def balance(count: int, ranks: int, seeds: int, repeats: int) -> dict[str, Any]:
    """Tell how even ranks are, in total and slot by slot, and what packing for them takes."""
    totals, slots, empty, times = [], [], 0, []
    for seed in range(seeds):
        lengths = lognormal_lengths(count, seed)
        costs = rollout_costs(lengths)
        grid = pack(lengths, SEQ_LEN, ranks)
        cost = np.array([[float(costs[row].sum()) for row in rank] for rank in grid])
        totals.append(cost.sum(axis=1).max() / cost.sum(axis=1).mean())
        slots.append(cost.max(axis=0).sum() / cost.mean(axis=0).sum())
        empty += fillers(grid)
        times.append(best_ms(lambda lengths=lengths: pack(lengths, SEQ_LEN, ranks), repeats if seed < 5 else 1))
    return {
        "rollouts": count,
        "ranks": ranks,
        "batches": seeds,
        "micro_batches_per_rank": len(grid[0]),
        "fillers_per_batch": empty / seeds,
        "rank_max_over_mean_median": float(np.median(totals)),
        "rank_max_over_mean_worst": float(max(totals)),
        "slot_max_over_mean": float(np.mean(slots)),
        "ms_best": min(times),
        "ms_median": float(np.median(times)),
        "ms_worst": max(times),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Render as a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = [f"{row[name]:.4g}" if isinstance(row[name], float) else f"{row[name]:,}" for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[512, 4096, 65536])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds = {count: 1 if count > 10000 else 8 if count > 1000 else 30 for count in options.rollouts}
    of_bins = [bins(count, seeds[count], options.repeats) for count in options.rollouts]
    print(table(of_bins), end="\n\n")
    of_ranks = [
        balance(count, ranks, seeds[count] if ranks < 100 else 2, min(options.repeats, 3 if count > 10000 else 9))
        for count in options.rollouts
        for ranks in options.ranks
    ]
    print(table(of_ranks))
    machine = {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    print(f"\n{machine}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "bins": of_bins, "ranks": of_ranks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
