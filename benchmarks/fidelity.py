"""Compare the simulator with real runs: each recording is simulated as itself and as the other strategies.

    python benchmarks/fidelity.py --steps 80

A real `replaybuf serve` is called over HTTP on real clocks. Producers and trainer sleep where they would compute, so
the runs need no GPU and little processor time. Each fleet runs each strategy once. Every recording predicts the runs
of all strategies of its fleet. A pair is close if all its figures are within 10 %, or 0.05 of a share or a version.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from measured import Measured
from served import Served

from replaybuf.client.client import AsyncClient
from replaybuf.lab.simulate.command import SimulateOptions, run_study
from replaybuf.lab.simulate.figures import Figures
from replaybuf.lab.simulate.recording import Recording, read_service
from replaybuf.lab.simulate.workload import Attempt, Lengths, Supply, Workload
from replaybuf.wire.answer.run_status import RunStatus
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.group import Group

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "one-step": ("one-step-off-policy", {"max_staleness": 1}),
    "three-step": ("one-step-off-policy", {"max_staleness": 3}),
    "replay": ("replay", {}),
}
FLEETS = {"fast": 16, "even": 8, "slow": 4}
"""Slots by fleet; a batch of 8 groups trains for 0.4 s, and a group takes about 0.4 s and sometimes 2 s more."""
GROUPS_PER_BATCH, GROUP_SIZE = 8, 4
REWARD_EVERY, REWARD_S = 9, 2.0
"""A long tail: every ninth group waits for its reward."""
PRODUCER, WAIT_MS = "sleeper", 2000
WITHIN, LEAST = 0.10, 0.05
FIGURES = ("steps per hour", "trainer waits", "mean staleness", "too stale", "uses per group")


class SlowRewards(Supply):
    """Groups of a workload, some of which wait for their rewards."""

    def attempt(self, prompt_index: int, number: int) -> Attempt:
        """Return an attempt with its reward."""
        made = super().attempt(prompt_index, number)
        slow = prompt_index % REWARD_EVERY == REWARD_EVERY - 1
        return made._replace(duration_s=made.duration_s + REWARD_S) if slow else made


@dataclasses.dataclass(slots=True)
class Run:
    """One run whose producers and trainer sleep; `waited_s`: of the trainer, for batches."""

    client: AsyncClient
    supply: SlowRewards
    steps: int
    done: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    waited_s: float = 0.0
    seconds: float = 0.0

    async def run(self) -> None:
        """Train all steps."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.supply.workload.slots):
                tasks.create_task(self._produce())
            await self._train()
            self.done.set()

    async def _produce(self) -> None:
        while not self.done.is_set():
            answer = await self.client.take_tickets(PRODUCER, 1, wait_ms=WAIT_MS)
            for ticket in answer.tickets:
                await asyncio.sleep(self.supply.attempt(ticket.prompt_index, 1).duration_s)
                lengths = self.supply.lengths(ticket.prompt_index, 1)
                group = make_group(lengths, ticket.ticket, ticket.prompt_index, answer.published_version)
                await self.client.append([group])

    async def _train(self) -> None:
        w, client = self.supply.workload, self.client
        epoch = (await client.attach(dp_world_size=1)).epoch
        await client.send_heartbeat(PRODUCER, slots=w.slots)
        started_s = time.monotonic()
        for step in range(self.steps):
            asked_s = time.monotonic()
            while isinstance(await client.fetch_batch(step, epoch, wait_ms=WAIT_MS), WaitingAnswer):
                pass
            self.waited_s += time.monotonic() - asked_s
            training = asyncio.create_task(asyncio.sleep(w.train_s))
            if step + 1 < self.steps:
                await client.fetch_batch(step + 1, epoch)
            await training
            await client.ack(step, epoch)
            await asyncio.sleep(w.publish_s)
            await client.publish_policy(step + 1, epoch)
            if (step + 1) % w.checkpoint_steps == 0:
                await client.checkpoint(step + 1, epoch)
        self.seconds = time.monotonic() - started_s


def make_group(lengths: Lengths, ticket: str, prompt_index: int, version: int) -> Group:
    """Return a group of rollouts of these lengths, with a prompt of one token."""
    n, completion = len(lengths), (lengths - 1).astype(np.int32)
    total = int(completion.sum())
    spans = np.zeros((n, 4), np.int32)
    spans[:, 0], spans[:, 1], spans[:, 3] = np.arange(n), version, completion
    return Group(
        group_id=None,
        prompt_id=f"p{prompt_index}",
        ticket=ticket,
        prompt_index=prompt_index,
        policy_version=version,
        prompt_ids=np.ones(n, np.int32),
        prompt_lengths=np.ones(n, np.int32),
        completion_ids=np.full(total, 2, np.int32),
        completion_lengths=completion,
        completion_mask=np.ones(total, np.bool_),
        inference_logprobs=np.full(total, -0.5, np.float32),
        rewards=np.arange(n, dtype=np.float64),
        advantages=np.zeros(n),
        version_spans=spans,
        temperatures=np.ones(n, np.float32),
        finish_reasons=("stop",) * n,
    )


def workload(slots: int) -> Workload:
    """Return the speeds of a fleet."""
    lengths: dict[str, Any] = {"length_mean": 25.0, "length_sigma": 0.6, "length_max": 100, "prompt_tokens": 1}
    speeds: dict[str, Any] = {"group_s": 0.1, "token_s": 0.008, "train_s": 0.3, "publish_s": 0.1}
    return Workload(slots=slots, **speeds, **lengths)


def config(strategy: str) -> RunConfig:
    """Return the run with a strategy."""
    name, options = STRATEGIES[strategy]
    return RunConfig(
        strategy=StrategySpec(name=name, options=options),
        batch=BatchSpec(tokens_per_batch=None, groups_per_batch=GROUPS_PER_BATCH),
        group_size=GROUP_SIZE,
    )


async def measure(url: str, fleet: str, strategy: str, steps: int) -> tuple[list[float], Recording]:
    """Run a strategy on a fleet; return its figures and its recording."""
    name, run = f"{fleet}-{strategy}", config(strategy)
    async with AsyncClient(url, name) as client:
        await client.put_run(msgspec.to_builtins(run))
        script = Run(client, SlowRewards(workload(FLEETS[fleet]), run, seed=1), steps)
        await script.run()
        status = await client.get_run()
    return figures_of(status, steps, script), await asyncio.to_thread(read_service, url, name, None)


def figures_of(status: RunStatus, steps: int, script: Run) -> list[float]:
    """Return the `FIGURES` of a real run."""
    ages = {int(age): count for age, count in status.staleness.items()}
    used = {int(times): uses for times, uses in status.histograms.times_sampled.items()}
    return [
        steps * 3600 / script.seconds,
        script.waited_s / script.seconds,
        sum(age * count for age, count in ages.items()) / sum(ages.values()),
        status.groups.evicted.get("too_stale", 0) / status.groups.stored,
        sum(used.values()) / used[1],
    ]


def simulated(recording: Recording, strategy: str, steps: int) -> list[float]:
    """Return the `FIGURES` of a recording as another strategy."""
    figures: Figures = run_study(SimulateOptions(steps=steps), config(strategy), recording).runs[0]
    stale = figures.waste.get("too_stale")
    dropped = stale.groups / figures.stored_groups if stale else 0.0
    return [figures.steps_per_hour, figures.wait_share, figures.staleness_mean, dropped, figures.uses_mean]


def main() -> None:
    """Measure all pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=list(FLEETS))
    arguments = parser.parse_args()
    results = Measured("fidelity", reference="real", packages=["numpy"], settings=vars(arguments))
    close: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="replaybuf-bench-") as folder, Served(Path(folder) / "data") as served:
        for fleet in arguments.fleets:
            real = {name: asyncio.run(measure(served.url, fleet, name, arguments.steps)) for name in STRATEGIES}
            for target, (figures, _) in real.items():
                sides = {f"from {source}": simulated(real[source][1], target, arguments.steps) for source in real}
                for position, what in enumerate(FIGURES):
                    values = {"real": [figures[position]]} | {s: [v[position]] for s, v in sides.items()}
                    results.record(f"{fleet} fleet, {target}: {what}", values)
                for source, predicted in sides.items():
                    pairs = zip(predicted, figures, strict=True)
                    close[f"{fleet}, {target} {source}"] = all(
                        abs(value - right) <= max(WITHIN * abs(right), LEAST) for value, right in pairs
                    )
    share = sum(close.values()) / len(close)
    results.record("share of the pairs that are close", {"pairs": [share]})
    print("not close: " + ("; ".join(pair for pair, is_close in close.items() if not is_close) or "none"))
    results.save()


if __name__ == "__main__":
    main()
