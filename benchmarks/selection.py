"""Select 512 groups of a million: numpy columns against a Python list of dicts. Then 100,000 groups of a million.

    python benchmarks/selection.py --groups 1000000 --repeats 7 --large 100000

Each figure is the median over the repeats with the least and the largest. The reference has one dict per group and
uses comprehensions, `random.sample`, and `random.choices` over running sums. Both sides select groups within staleness
and uses. The columns are those that the service shows to a strategy. Large batches have no reference: a selection holds
the event loop, so each must stay below 50 ms of processor time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from measured import Measured

from replaybuf.kernel.rows.index import ENTRY, Index
from replaybuf.kernel.strategy.contract import Budget, BufferView, Selection, source_hash
from replaybuf.kernel.strategy.plugin_set import build_strategy
from replaybuf.store.groups import READ_CHUNK_ENTRIES

BATCH = 512
VERSION, MAX_STALENESS = 10, 4
COLUMNS, PLAIN = "columns", "list of dicts"

Row = dict[str, float]
Timed = Callable[[], object]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--large", type=int, help="groups of a large batch (a tenth of --groups)")
    arguments = parser.parse_args()
    arguments.large = arguments.large or arguments.groups // 10
    results = Measured("selection", reference=PLAIN, packages=["numpy"], settings=vars(arguments) | {"batch": BATCH})
    entries = random_entries(arguments.groups)
    index, rows = fill_index(entries), plain_rows(entries)
    for name, ours, plain in cases(index, rows):
        sides = {COLUMNS: measure(ours, arguments.repeats), PLAIN: measure(plain, min(arguments.repeats, 3))}
        results.record(name, sides, unit="ms", ratio="reference / it")
    for name, ours in large_batches(index, arguments.large):
        results.record(
            f"{arguments.large:,} groups, {name}",
            {COLUMNS: measure(ours, arguments.repeats, time.process_time)},
            unit="ms",
        )
    results.record("inserts", inserts(entries, arguments.repeats), unit="thousand groups/s")
    sizes = {COLUMNS: [index.nbytes / arguments.groups], PLAIN: [plain_bytes(rows)]}
    results.record("memory", sizes, unit="bytes per group", ratio="reference / it")
    results.save()


def random_entries(count: int) -> npt.NDArray[Any]:
    """Draw index entries: four policy versions, 512 groups of an older one, priorities between 0 and 1."""
    rng = np.random.default_rng(0)
    entries = np.zeros(count, ENTRY)
    entries["prompt_index"] = np.arange(count)
    entries["arrival_s"] = np.arange(count)
    entries["policy_version"] = rng.integers(VERSION - MAX_STALENESS + 1, VERSION + 1, count)
    entries["policy_version"][rng.choice(count, BATCH, replace=False)] = VERSION - MAX_STALENESS
    entries["tokens"] = rng.integers(500, 2000, count)
    entries["rollouts"] = 8
    entries["longest_tokens"] = entries["tokens"] // 4
    entries["advantage_abs_mean"] = rng.random(count)
    entries["reward_std"] = rng.random(count)
    entries["source"] = rng.choice([source_hash("a"), source_hash("b"), 0], count)
    return entries


def fill_index(entries: npt.NDArray[Any], reserved: int = 0) -> Index:
    """Insert all entries in the chunks of a service; a rebuild reserves their number before."""
    index = Index()
    index.reserve(reserved)
    for start in range(0, len(entries), READ_CHUNK_ENTRIES):
        piece = entries[start : start + READ_CHUNK_ENTRIES]
        index.insert(np.arange(start + 1, start + 1 + len(piece)), piece)
    return index


def plain_rows(entries: npt.NDArray[Any]) -> list[Row]:
    """Build the reference: one dict per group."""
    names = entries.dtype.names or ()
    return [plain_row(names, number, values) for number, values in enumerate(entries.tolist(), 1)]


def plain_row(names: tuple[str, ...], number: int, values: tuple[float, ...]) -> Row:
    """Build one group of the reference."""
    state = {"row": number, "times_sampled": 0, "last_step": -1}
    row: Row = dict(zip(names, values, strict=True)) | state
    row["priority"] = row["advantage_abs_mean"]
    return row


def cases(index: Index, rows: list[Row]) -> list[tuple[str, Timed, Timed]]:
    """Return the measured calls by name: ours and the plain one."""
    count = len(rows)
    view = buffer_of(index, Budget(None, BATCH, 4096))
    seeds = itertools.count()

    def choose(name: str, **options: object) -> Timed:
        strategy = build_strategy(name, options)
        return lambda: chosen(
            strategy.select(index.groups(None), view, view.budget, np.random.default_rng(next(seeds)))
        )

    prioritized = choose("replay", order="prioritized", priority="feedback", exponent=1.0)
    rng = np.random.default_rng(0)
    numbers, values = rng.choice(count, BATCH, replace=False) + 1, rng.random(BATCH).astype(np.float32)
    by_number = {int(row["row"]): row for row in rows}

    def prioritized_with_update() -> None:
        prioritized()
        index["priority"][index.rows_of(numbers)] = values

    def plain_prioritized_with_update() -> None:
        weights = list(itertools.accumulate(row["priority"] for row in rows))
        seen: dict[int, Row] = {}
        while len(seen) < BATCH:
            for row in random.choices(rows, cum_weights=weights, k=BATCH):
                seen[int(row["row"])] = row
        for number, value in zip(numbers.tolist(), values.tolist(), strict=True):
            by_number[number]["priority"] = value

    later = dataclasses.replace(view, step=VERSION + 1, version=VERSION + 1)
    within = build_strategy("one-step-off-policy", {"max_staleness": MAX_STALENESS})

    def stale() -> object:
        return within.evict(index.groups(None), later)

    def plain_stale() -> list[float]:
        return [row["row"] for row in rows if later.version - row["policy_version"] > MAX_STALENESS]

    def plain_uniform() -> list[Row]:
        return random.sample([row for row in rows if row["times_sampled"] < 4], BATCH)

    def plain_oldest() -> list[Row]:
        return sorted(rows, key=lambda row: row["policy_version"])[:BATCH]

    def plain_fifo() -> list[Row]:
        return sorted(rows, key=lambda row: (row["last_step"], row["policy_version"]))[:BATCH]

    def plain_together() -> list[Row]:
        of_prompt: dict[float, list[Row]] = {}
        for row in rows:
            of_prompt.setdefault(row["prompt_index"], []).append(row)
        prompts = random.sample(list(of_prompt.values()), BATCH)
        return list(itertools.islice(itertools.chain.from_iterable(prompts), BATCH))

    return [
        ("evict 512 stale ones", stale, plain_stale),
        ("replay, uniform", choose("replay"), plain_uniform),
        ("replay, prioritized + update", prioritized_with_update, plain_prioritized_with_update),
        ("one-step-off-policy", choose("one-step-off-policy", max_staleness=MAX_STALENESS), plain_oldest),
        ("replay, fifo", choose("replay", order="fifo"), plain_fifo),
        ("replay, all groups of a prompt together", choose("replay", prompts_together=True), plain_together),
        ("replay, half fresh, cooldown 2", choose("replay", cooldown=2, fresh_fraction=0.5), plain_uniform),
    ]


def buffer_of(index: Index, budget: Budget) -> BufferView:
    """Describe the buffer of all groups for batches of this budget."""
    return BufferView(
        step=VERSION,
        version=VERSION,
        published_version=VERSION,
        steps_per_publish=1,
        groups_live=len(index),
        tokens_live=int(index["tokens"].sum(dtype=np.int64)),
        tickets_out=0,
        budget=budget,
    )


def large_batches(index: Index, size: int) -> list[tuple[str, Timed]]:
    """Return the selections of a large batch by name: every rule of the built-in strategies, in groups and tokens."""
    rules: list[dict[str, object]] = [
        {"order": "uniform"},
        {"order": "fifo"},
        {"order": "newest"},
        {"order": "prioritized"},
        {"fresh_fraction": 0.5},
        {"order": "fifo", "fresh_fraction": 0.5},
        {"groups_per_prompt": 1},
        {"mix": {"a": 0.3, "b": 0.2}},
        {"prompts_together": True},
        {"cooldown": 2},
    ]
    strategies: list[tuple[str, dict[str, object]]] = [("replay", rule) for rule in rules]
    strategies.append(("one-step-off-policy", {"max_staleness": MAX_STALENESS}))
    return [
        (
            ", ".join([name, *(f"{key} {value}" for key, value in options.items()), unit]),
            select(index, name, options, budget),
        )
        for name, options in strategies
        for unit, budget in (("groups", Budget(None, size, 4096)), ("tokens", Budget(size * 1250, None, 4096)))
    ]


def select(index: Index, name: str, options: dict[str, object], budget: Budget) -> Timed:
    """Return one selection of all groups."""
    strategy, view, seeds = build_strategy(name, options), buffer_of(index, budget), itertools.count()

    def timed() -> Selection:
        answer = strategy.select(index.groups(None), view, budget, np.random.default_rng(next(seeds)))
        if not isinstance(answer, Selection):
            raise SystemExit(f"no batch was chosen: {answer}")
        return answer

    return timed


def chosen(answer: object) -> Selection:
    """Return a full batch. Raises `SystemExit` for anything else, so that no failure is timed."""
    if not isinstance(answer, Selection) or len(answer.rows) != BATCH:
        raise SystemExit(f"no batch of {BATCH} groups was chosen: {answer}")
    return answer


def measure(call: Timed, repeats: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Time one call several times in ms; the first warms the caches and is dropped."""
    call()
    took = []
    for _ in range(repeats):
        started = clock()
        call()
        took.append((clock() - started) * 1000)
    return took


def inserts(entries: npt.NDArray[Any], repeats: int) -> dict[str, list[float]]:
    """Measure inserts per second in thousands: as a rebuild does, without reserving, and as dicts."""
    some = entries[:100_000]
    sides: list[tuple[str, int, Timed]] = [
        (COLUMNS, len(entries), lambda: fill_index(entries, len(entries))),
        ("columns that grow", len(entries), lambda: fill_index(entries)),
        (PLAIN, len(some), lambda: plain_rows(some)),
    ]
    return {side: [count / took for took in measure(call, repeats)] for side, count, call in sides}


def plain_bytes(rows: list[Row]) -> float:
    """Count the bytes of a group in the reference: its dict and its numbers."""
    sample = rows[:: max(1, len(rows) // 1000)]
    return statistics.fmean(sys.getsizeof(row) + sum(sys.getsizeof(value) for value in row.values()) for row in sample)


if __name__ == "__main__":
    main()
