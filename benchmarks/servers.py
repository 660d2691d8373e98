"""Measure what one run costs each of several servers: appends and batch bodies through followers, against one server.

    python benchmarks/servers.py --groups 800 --rounds 3

Servers share one Valkey, and one of them leads the run. With one server all calls go to it. With more, producer and
trainer call the followers in turns: these check, store and write bodies, and the leader decides. Each figure is the
processor time of the leader, or of all followers together, per group of 8 x 2,048 tokens (131 kB).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
from groups import random_group
from measured import Measured
from served import Served

from replaybuf.client.client import Client
from replaybuf.store import EmbeddedServer
from replaybuf.wire.group import Group

ROLLOUTS, TOKENS = 8, 2048
PER_BATCH = 32
PER_CALL = 8
SERVERS = (1, 2, 3)
STEADY_S = 10.0
"""A server gets runs when it has lived for so long."""
SETTLE_S = 3.0
"""A new run is with the server that should lead it after so long."""
ONE = "one server"

Costs = dict[str, dict[str, list[float]]]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=800, help="of each round, a multiple of 32")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results = Measured("servers", reference=ONE, packages=["numpy", "redis"], settings=vars(arguments))
    costs: Costs = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        valkey = EmbeddedServer(Path(folder) / "valkey")
        asyncio.run(valkey.start())
        stack.callback(lambda: asyncio.run(valkey.stop()))
        servers: list[Served] = []
        for number in SERVERS:
            own = Path(folder) / f"server{number}"
            own.mkdir()
            servers.append(stack.enter_context(Served(own, "--redis-url", valkey.url)))
            time.sleep(STEADY_S)
            for turn in range(arguments.rounds):
                measure(servers, f"run-{number}-{turn}", arguments.groups, costs)
    for what, sides in costs.items():
        results.record(what, dict(sides), unit="ms", ratio="it / reference")
    results.save()


def measure(servers: list[Served], run: str, count: int, costs: Costs) -> None:
    """Append and fetch the groups of one run, by the followers if there are any; add what that cost."""
    with ExitStack() as stack:
        clients = {server.url: stack.enter_context(Client(server.url, run, timeout_s=120.0)) for server in servers}
        first = clients[servers[0].url]
        batch = {"groups_per_batch": PER_BATCH, "tokens_per_batch": None, "seq_len": 2 * TOKENS}
        first.put_run({"batch": batch, "strategy": {"name": "one-step-off-policy", "options": {"max_staleness": 1000}}})
        time.sleep(SETTLE_S)
        leads = leader_of(servers[0], run)
        asked = [clients[server.url] for server in servers if server.url != leads] or [first]
        leader = next(server for server in servers if server.url == leads)
        followers = [server for server in servers if server.url != leads]
        side = ONE if len(servers) == 1 else f"{len(servers)} servers"
        groups = made(count)
        callers = itertools.cycle(asked)

        def add(what: str, before: list[float]) -> None:
            after = [leader.cpu_s, *[server.cpu_s for server in followers]]
            took = [1e3 * (now - then) / count for now, then in zip(after, before, strict=True)]
            costs[f"{what}: leader"][side].append(took[0])
            costs[f"{what}: all servers"][side].append(sum(took))

        before = [leader.cpu_s, *[server.cpu_s for server in followers]]
        for start in range(0, count, PER_CALL):
            next(callers).append(groups[start : start + PER_CALL])
        while first.get_run().groups.stored < count:
            time.sleep(0.05)
        add("append of a group", before)
        epoch = first.attach().epoch
        before = [leader.cpu_s, *[server.cpu_s for server in followers]]
        for step in range(count // PER_BATCH):
            body = next(callers).fetch_batch(step, epoch, wait_ms=10_000)
            if not isinstance(body, bytes):
                raise RuntimeError(f"batch {step} waits: {body.reason}")
            first.ack(step, epoch)
            first.publish_policy(step + 1, epoch)
        add("batch, per group", before)
        if leader_of(servers[0], run) != leads:
            raise RuntimeError(f"the lead of {run} moved during the measurement")


def made(count: int) -> list[Group]:
    """Make groups of one size."""
    rng = np.random.default_rng(0)
    return [random_group(rng, number, rollouts=ROLLOUTS, mean_tokens=TOKENS, longest=TOKENS) for number in range(count)]


def leader_of(server: Served, run: str) -> str:
    """Return the address of the server that leads a run."""
    return str(httpx.get(f"{server.url}/readyz").json()["leaders"][run])


if __name__ == "__main__":
    main()
