"""Measure the wait of the ranks that the service causes, with the fleet of a 10,000-GPU run scaled down.

    python benchmarks/fleet.py --steps 6

Assumed of the large run: 75 % of the GPUs generate 2,000 tokens/s each, groups have 16 rollouts of 8,192 tokens, a step
takes 18 s, a rank has 8 GPUs. That is 114 groups/s, 2,060 groups per step and 312 ranks. `--shorter` divides the tokens
of a rollout, `--fewer` the groups per second, `--faster` the time of a step; the number of ranks stays. Simulated
producers take a ticket, wait as long as a generation takes, and append the group of the ticket.

With look-ahead a rank requests the next batch when a step begins, and waits for it at the end of the step. On-policy
all groups of a step are generated after the step before it. Only the time between the last append and the body of a
rank counts there: generation would take its time without a service too.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from groups import random_group
from measured import Measured, Target
from served import Served

from replaybuf.client.client import AsyncClient
from replaybuf.errors import ReplaybufError
from replaybuf.store import EmbeddedServer
from replaybuf.wire.contract import Ticket
from replaybuf.wire.group import Group

GPUS, GENERATING, TOKENS_PER_S = 10_000, 0.75, 2_000
ROLLOUTS, ROLLOUT_TOKENS, STEP_S, GPUS_PER_RANK = 16, 8_192, 18.0, 8
GROUPS_PER_S = GPUS * GENERATING * TOKENS_PER_S / (ROLLOUTS * ROLLOUT_TOKENS)
RANKS = int(GPUS * (1 - GENERATING)) // GPUS_PER_RANK
SHARE = 0.1
"""Largest wait with look-ahead, in percent of the step."""
WARM_STEPS = 2
GENERATION_STEPS = {"look-ahead 1": 3.0, "on-policy": 0.7}
"""Mean time of a generation, in steps."""
STEADY_S, SETTLE_S = 10.0, 3.0
"""A server gets runs when it has lived for so long; a new run is with its leader after so long."""
STRATEGIES = {
    "look-ahead 1": {"name": "one-step-off-policy", "options": {"max_staleness": 8}},
    "on-policy": {"name": "on-policy", "options": {}},
}
TIMEOUT_S, WAIT_MS = 120.0, 20_000
MADE = 64
ONE_ADDRESS = ("--max-half-heads", "0")
"""All producers call from one address, and connect at once on a busy machine: as behind a proxy."""


class Waits(NamedTuple):
    """Waits in s: of each rank for its body in each measured step, and of each step for its ack and publication."""

    bodies: list[float]
    acks: list[float]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--producers", type=int, default=2_000)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after two others")
    parser.add_argument("--shorter", type=int, default=32, help="divides the tokens of a rollout")
    parser.add_argument("--fewer", type=int, default=4, help="divides the groups per second")
    parser.add_argument("--faster", type=int, default=3, help="divides the time of a step")
    arguments = parser.parse_args()
    results = Measured("fleet", reference="on-policy", packages=["numpy", "redis"], settings=vars(arguments))
    step_s = STEP_S / arguments.faster
    waits: dict[str, list[float]] = {}
    acks: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        valkey = EmbeddedServer(Path(folder) / "valkey")
        asyncio.run(valkey.start())
        stack.callback(lambda: asyncio.run(valkey.stop()))
        urls = []
        for number in range(arguments.servers):
            own = Path(folder) / f"server{number}"
            own.mkdir()
            urls.append(stack.enter_context(Served(own, "--redis-url", valkey.url, *ONE_ADDRESS)).url)
        for side in STRATEGIES:
            waits[side], acks[side] = asyncio.run(measure(side, urls, step_s, arguments))
    shares = {side: [100 * wait_s / step_s for wait_s in own] for side, own in waits.items()}
    targets = {"look-ahead 1": [Target("median", "at most", SHARE)]}
    means = {side: [float(np.mean(own))] for side, own in shares.items()}
    results.record("mean wait of a rank for its body", means, unit="% of the step", targets=targets)
    worst = {side: [float(np.percentile(own, 99))] for side, own in shares.items()}
    results.record("99th percentile of that wait", worst, unit="% of the step")
    results.record("mean wait", {side: [float(np.mean(own))] for side, own in waits.items()}, unit="s")
    results.record("ack and publish of a step", acks, unit="s")
    results.save()


async def measure(side: str, urls: Sequence[str], step_s: float, arguments: argparse.Namespace) -> Waits:
    """Train one run with all ranks."""
    run = side.replace(" ", "-")
    per_step = round(GROUPS_PER_S / arguments.fewer * step_s)
    clients = [open_client(urls, number, run) for number in range(arguments.ranks)]
    batch = {"groups_per_batch": per_step, "tokens_per_batch": None, "seq_len": 4 * ROLLOUT_TOKENS // arguments.shorter}
    await asyncio.sleep(STEADY_S)
    await clients[0].put_run({"batch": batch, "strategy": STRATEGIES[side], "group_size": ROLLOUTS})
    await asyncio.sleep(SETTLE_S)
    context = multiprocessing.get_context("spawn")
    appended_s = context.Value("d", 0.0)
    generation_s = GENERATION_STEPS[side] * step_s
    load = (urls, run, arguments.producers, generation_s, ROLLOUT_TOKENS // arguments.shorter, appended_s)
    producers = context.Process(target=run_producers, args=load, daemon=True)
    producers.start()
    try:
        train = train_ahead if side != "on-policy" else train_on_policy
        return await train(clients, arguments.steps, step_s, appended_s)
    finally:
        producers.kill()
        producers.join()
        await asyncio.gather(*(client.aclose() for client in clients))


# ---------------------------------------------------------------------- ranks


async def train_ahead(clients: Sequence[AsyncClient], steps: int, step_s: float, _: Synchronized[float]) -> Waits:
    """Train with the next batch requested at the begin of a step; return the waits at the ends of steps."""
    first, bodies, acks = clients[0], list[float](), list[float]()
    epoch = (await first.attach(dp_world_size=len(clients))).epoch
    await fetch_all(clients, 0, epoch)
    for step in range(WARM_STEPS + steps):
        fetching = asyncio.create_task(fetch_all(clients, step + 1, epoch))
        await asyncio.sleep(step_s)
        ended_s = time.monotonic()
        await first.ack(step, epoch)
        await first.publish_policy(step + 1, epoch)
        acked_s = time.monotonic()
        arrived_s = await fetching
        if step >= WARM_STEPS:
            bodies += [max(0.0, at_s - ended_s) for at_s in arrived_s]
            acks.append(acked_s - ended_s)
        print(f"step {step}: bodies {max(arrived_s) - ended_s:.3f} s, ack {acked_s - ended_s:.3f} s", flush=True)
    return Waits(bodies, acks)


async def train_on_policy(
    clients: Sequence[AsyncClient], steps: int, step_s: float, appended_s: Synchronized[float]
) -> Waits:
    """Train each step after all its groups were generated; return the waits after the last append."""
    first, bodies, acks = clients[0], list[float](), list[float]()
    epoch = (await first.attach(dp_world_size=len(clients))).epoch
    for step in range(WARM_STEPS + steps):
        arrived_s = await fetch_all(clients, step, epoch)
        if step >= WARM_STEPS:
            bodies += [at_s - appended_s.value for at_s in arrived_s]
        print(f"step {step}: bodies {max(arrived_s) - appended_s.value:.3f} s", flush=True)
        await asyncio.sleep(step_s)
        ended_s = time.monotonic()
        await first.ack(step, epoch)
        await first.publish_policy(step + 1, epoch)
        acks.append(time.monotonic() - ended_s)
    return Waits(bodies, acks)


async def fetch_all(clients: Sequence[AsyncClient], step: int, epoch: int) -> list[float]:
    """Fetch the bodies of all ranks; return when each came."""

    async def fetch(rank: int, client: AsyncClient) -> float:
        while not isinstance(await client.fetch_batch(step, epoch, rank, wait_ms=WAIT_MS), bytes):
            pass
        return time.monotonic()

    return await asyncio.gather(*map(fetch, range(len(clients)), clients))


def open_client(urls: Sequence[str], number: int, run: str) -> AsyncClient:
    """Open a client that calls one of the servers first, as behind a load balancer."""
    at = number % len(urls)
    return AsyncClient(",".join([*urls[at:], *urls[:at]]), run, timeout_s=TIMEOUT_S, retry_for_s=TIMEOUT_S)


# ---------------------------------------------------------------------- producers


def run_producers(
    urls: Sequence[str], run: str, count: int, generation_s: float, tokens: int, appended_s: Synchronized[float]
) -> None:
    """Run all producers in this process until it is killed; `appended_s`: when the last append began."""
    rng = np.random.default_rng(0)
    made = [
        random_group(rng, number, rollouts=ROLLOUTS, mean_tokens=tokens, longest=2 * tokens) for number in range(MADE)
    ]

    async def produce(number: int) -> None:
        client = open_client(urls, number, run)
        await asyncio.sleep(generation_s * random.random() / 4)  # not all at once
        while True:
            taken: Any = await again(lambda: client.take_tickets(f"p{number}", 1, wait_ms=WAIT_MS))
            for ticket in taken.tickets:
                await asyncio.sleep(generation_s * random.uniform(0.5, 1.5))
                group = for_ticket(made[number % MADE], ticket, taken.published_version)
                appended_s.value = time.monotonic()
                await again(lambda group=group: client.append([group]))  # type: ignore[misc]

    async def produce_all() -> None:
        await asyncio.gather(*map(produce, range(count)))

    asyncio.run(produce_all())


async def again(call: Callable[[], Awaitable[Any]]) -> Any:
    """Make a call until it is answered: tickets are not asked for again by the client."""
    while True:
        try:
            return await call()
        except ReplaybufError as error:
            print(f"a producer calls again: {error}", flush=True)
            await asyncio.sleep(1.0)


def for_ticket(group: Group, ticket: Ticket, version: int) -> Group:
    """Make a group the one of a ticket, sampled with a version."""
    spans = group.version_spans.copy()
    spans[:, 1] = version
    return msgspec.structs.replace(
        group, group_id=None, ticket=ticket.ticket, policy_version=version, version_spans=spans
    )


if __name__ == "__main__":
    main()
