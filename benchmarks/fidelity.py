"""Compare the simulator with real runs: each recording is simulated as itself and as the other strategies.

    python benchmarks/fidelity.py --folder fidelity

A real `replaybuf serve` is called over HTTP on real clocks. Producers and trainer sleep where they would compute, so
the runs need no GPU and little processor time: the three strategies of a fleet run at the same time. Steps take 1.6 s
and groups 1 s and more, so that calls of a busy machine are short against them; how late timers fired is recorded.
Every recording predicts the runs of all strategies of its fleet. A pair is close if all its figures are within 10 %, or
0.05 of a share or a version. `--folder` keeps the real runs: the next call simulates those that are there.
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
from replaybuf.lab.simulate.workload import Lengths, Supply, Workload
from replaybuf.wire.answer.run_status import RunStatus
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.group import Group

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "one-step": ("one-step-off-policy", {"max_staleness": 1}),
    "three-step": ("one-step-off-policy", {"max_staleness": 3}),
    "replay": ("replay", {}),
}
GROUPS_PER_BATCH, GROUP_SIZE = 8, 4
TRAIN_S, PUBLISH_S = 1.2, 0.4
PRODUCER, WAIT_MS = "sleeper", 10_000
WITHIN, LEAST = 0.10, 0.05
FIGURES = ("steps per hour", "trainer waits", "mean staleness", "too stale", "uses per group")
TICK_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """Producers with `slots`; a group generates for 1.6 s on average, and then waits for its reward.

    - `every`: each such prompt waits 8 s, the others not; 0: all wait as long as a Pareto distribution says
    - `slowdown`: with n groups that generate, each takes 1 + slowdown (n - 1) times as long
    """

    slots: int
    every: int = 9
    slowdown: float = 0.0

    def reward_s(self, prompt_index: int) -> float:
        """Return how long the reward of a prompt takes, in seconds; at most 16 s."""
        if self.every:
            return 8.0 if prompt_index % self.every == self.every - 1 else 0.0
        return float(min(0.3 * (1 + np.random.default_rng(prompt_index).pareto(1.2)), 16.0))


FLEETS = {
    "fast": Fleet(16),
    "even": Fleet(8),
    "slow": Fleet(4),
    "long tail": Fleet(12, every=0),
    "slowing": Fleet(16, slowdown=0.15),
}


class Engine:
    """Engines of a fleet, on which groups take longer the more of them generate."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._busy = 0

    async def generate(self, alone_s: float) -> None:
        """Sleep as long as a group generates that would take `alone_s` without others."""
        if not self._slowdown:
            await asyncio.sleep(alone_s)
            return
        self._busy += 1
        at_s = time.monotonic()
        while alone_s > 0:
            factor = 1 + self._slowdown * (self._busy - 1)
            await asyncio.sleep(min(TICK_S, alone_s * factor))
            now_s = time.monotonic()
            alone_s, at_s = alone_s - (now_s - at_s) / factor, now_s
        self._busy -= 1


@dataclasses.dataclass(slots=True)
class Run:
    """One run whose producers and trainer sleep; `waited_s`: of the trainer, for batches."""

    client: AsyncClient
    supply: Supply
    fleet: Fleet
    steps: int
    done: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    waited_s: float = 0.0
    seconds: float = 0.0

    async def run(self) -> None:
        """Train all steps."""
        engine = Engine(self.fleet.slowdown)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.fleet.slots):
                tasks.create_task(self._produce(engine))
            await self._train()
            self.done.set()

    async def _produce(self, engine: Engine) -> None:
        while not self.done.is_set():
            answer = await self.client.take_tickets(PRODUCER, 1, wait_ms=WAIT_MS)
            for ticket in answer.tickets:
                await engine.generate(self.supply.attempt(ticket.prompt_index, 1).duration_s)
                await asyncio.sleep(self.fleet.reward_s(ticket.prompt_index))
                lengths = self.supply.lengths(ticket.prompt_index, 1)
                group = make_group(lengths, ticket.ticket, ticket.prompt_index, answer.published_version)
                await self.client.append([group])

    async def _train(self) -> None:
        client = self.client
        epoch = (await client.attach(dp_world_size=1)).epoch
        await client.send_heartbeat(PRODUCER, slots=self.fleet.slots)
        started_s = time.monotonic()
        for step in range(self.steps):
            asked_s = time.monotonic()
            while isinstance(await client.fetch_batch(step, epoch, wait_ms=WAIT_MS), WaitingAnswer):
                pass
            self.waited_s += time.monotonic() - asked_s
            training = asyncio.create_task(asyncio.sleep(TRAIN_S))
            if step + 1 < self.steps:
                await client.fetch_batch(step + 1, epoch)
            await training
            await client.ack(step, epoch)
            await asyncio.sleep(PUBLISH_S)
            await client.publish_policy(step + 1, epoch)
            if (step + 1) % self.supply.workload.checkpoint_steps == 0:
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


WORKLOAD = Workload(
    group_s=0.4, token_s=0.032, length_mean=25.0, length_sigma=0.6, length_max=100, prompt_tokens=1, train_s=TRAIN_S
)
"""Lengths of all fleets."""


def config(strategy: str) -> RunConfig:
    """Return the run with a strategy."""
    name, options = STRATEGIES[strategy]
    return RunConfig(
        strategy=StrategySpec(name=name, options=options),
        batch=BatchSpec(tokens_per_batch=None, groups_per_batch=GROUPS_PER_BATCH),
        group_size=GROUP_SIZE,
    )


class RealRun(msgspec.Struct, frozen=True):
    """Figures of a real run, by name, and its recording."""

    figures: dict[str, float]
    recording: Recording


Measurement = tuple[dict[str, RealRun], list[float]]
"""Runs of a fleet by strategy, and how late timers were, in seconds."""


async def measure(url: str, fleet: str, steps: int) -> Measurement:
    """Run all strategies on a fleet at the same time."""
    late_s: list[float] = []

    async def watch() -> None:
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            late_s.append(time.monotonic() - due_s)

    watching = asyncio.create_task(watch())
    runs = await asyncio.gather(*(measure_strategy(url, fleet, strategy, steps) for strategy in STRATEGIES))
    watching.cancel()
    return dict(zip(STRATEGIES, runs, strict=True)), late_s


async def measure_strategy(url: str, fleet: str, strategy: str, steps: int) -> RealRun:
    """Run a strategy on a fleet."""
    name, run = f"{fleet.replace(' ', '-')}-{strategy}", config(strategy)
    async with AsyncClient(url, name) as client:
        await client.put_run(msgspec.to_builtins(run))
        script = Run(client, Supply(WORKLOAD, run, seed=1), FLEETS[fleet], steps)
        await script.run()
        status = await client.get_run()
    recording = await asyncio.to_thread(read_service, url, name, None)
    return RealRun(figures_of(status, steps, script), recording)


def figures_of(status: RunStatus, steps: int, script: Run) -> dict[str, float]:
    """Return the `FIGURES` of a real run."""
    ages = {int(age): count for age, count in status.staleness.items()}
    used = {int(times): uses for times, uses in status.histograms.times_sampled.items()}
    values = (
        steps * 3600 / script.seconds,
        script.waited_s / script.seconds,
        sum(age * count for age, count in ages.items()) / sum(ages.values()),
        status.groups.evicted.get("too_stale", 0) / status.groups.stored,
        sum(used.values()) / used[1],
    )
    return dict(zip(FIGURES, values, strict=True))


def simulated(recording: Recording, strategy: str, steps: int) -> dict[str, float]:
    """Return the `FIGURES` of a recording as another strategy."""
    figures: Figures = run_study(SimulateOptions(steps=steps), config(strategy), recording).runs[0]
    stale = figures.waste.get("too_stale")
    dropped = stale.groups / figures.stored_groups if stale else 0.0
    values = (figures.steps_per_hour, figures.wait_share, figures.staleness_mean, dropped, figures.uses_mean)
    return dict(zip(FIGURES, values, strict=True))


def faults(predicted: dict[str, float], real: dict[str, float]) -> list[str]:
    """Return the figures that are not close, with both values."""
    return [
        f"{what} {predicted[what]:.3g} for {real[what]:.3g}"
        for what in FIGURES
        if abs(predicted[what] - real[what]) > max(WITHIN * abs(real[what]), LEAST)
    ]


def read_fleet(folder: Path, fleet: str, steps: int) -> Measurement:
    """Return the runs of a fleet; measure them if the folder has none."""
    path = folder / f"{fleet.replace(' ', '-')}-{steps}.json"
    if not path.exists():
        with (
            tempfile.TemporaryDirectory(prefix="replaybuf-bench-") as scratch,
            Served(Path(scratch) / "data") as served,
        ):
            path.write_bytes(msgspec.json.encode(asyncio.run(measure(served.url, fleet, steps))))
    runs: Measurement = msgspec.json.decode(path.read_bytes(), type=Measurement)
    return runs


def main() -> None:
    """Measure all pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=list(FLEETS))
    parser.add_argument("--folder", type=Path, help="keep the real runs here")
    arguments = parser.parse_args()
    settings = {"steps": arguments.steps, "fleets": arguments.fleets}
    results = Measured("fidelity", reference="real", packages=["numpy"], settings=settings)
    pairs: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="replaybuf-bench-") as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for fleet in arguments.fleets:
            real, late_s = read_fleet(folder, fleet, arguments.steps)
            results.record(f"{fleet} fleet: timers were late by", {"machine": [1000 * s for s in late_s]}, unit="ms")
            for target, run in real.items():
                sides = {source: simulated(real[source].recording, target, arguments.steps) for source in real}
                for what in FIGURES:
                    values = {"real": [run.figures[what]]} | {f"from {s}": [v[what]] for s, v in sides.items()}
                    results.record(f"{fleet} fleet, {target}: {what}", values)
                for source, predicted in sides.items():
                    pairs[f"{fleet}, {target} from {source}"] = faults(predicted, run.figures)
    results.record("share of the pairs that are close", {"pairs": [sum(not f for f in pairs.values()) / len(pairs)]})
    for pair, differences in pairs.items():
        if differences:
            print(f"not close: {pair}: {', '.join(differences)}")
    results.save()


if __name__ == "__main__":
    main()
