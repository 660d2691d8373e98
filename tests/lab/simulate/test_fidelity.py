"""A recording, simulated as itself and as another strategy, against runs of a real service.

The runs are scripted: no time passes on the service's clock but what the script says, so they do not depend on the
machine. `benchmarks/fidelity.py` measures more pairs on real clocks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import msgspec
import pytest

from replaybuf.client.client import Client
from replaybuf.errors import NotLeader
from replaybuf.lab.simulate.command import SimulateOptions, run_study
from replaybuf.lab.simulate.figures import Figures
from replaybuf.lab.simulate.recording import Recording, read_service
from replaybuf.lab.simulate.workload import Attempt, Supply, Workload
from replaybuf.wire.config import RunConfig, StrategySpec
from tests.conftest import ClockedServe, RunClient
from tests.lab.simulate.scripted import Play
from tests.lab.simulate.workloads import config, workload

STEPS = 48
ATTEMPTS = 3
WITHIN = 0.15
LEAST = 0.06
"""Shares of time and of groups, and versions, may differ by so much where 15 % of the value is less."""
REWARD_EVERY, REWARD_S = 9, 2.4
"""A long tail: every ninth group waits for its reward for six steps."""

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "one-use": ("one-step-off-policy", {"max_staleness": 2}),
    "replay": ("replay", {"max_uses": 3, "max_staleness": 3, "look_ahead": 1, "order": "uniform"}),
}
FLEETS: dict[str, dict[str, Any]] = {
    "held-back": {"slots": 12},
    "busy": {"slots": 5},
    "slowing": {"slots": 8, "token_s": 0.032, "load_share": 0.75},
}
"""More slots than the window lets start, fewer than one use needs, and engines that slow down to a quarter."""


class SlowRewards(Supply):
    """Groups of a workload, some of which wait for their rewards."""

    def attempt(self, prompt_index: int, number: int) -> Attempt:
        """Return an attempt with its reward."""
        made = super().attempt(prompt_index, number)
        slow = prompt_index % REWARD_EVERY == REWARD_EVERY - 1
        return made._replace(duration_s=made.duration_s + REWARD_S, reward_s=REWARD_S) if slow else made


@dataclasses.dataclass(frozen=True)
class Measured:
    """Figures of a run; `dropped`: of the groups stored; `uses`: per group used."""

    steps_per_hour: float
    waited: float
    staleness: float
    dropped: float
    uses: float

    def close_to(self, other: Measured) -> list[str]:
        """Return the figures that are not within the tolerance of another run's."""
        faults = []
        for field in dataclasses.fields(self):
            own, real = getattr(self, field.name), getattr(other, field.name)
            if abs(own - real) > max(WITHIN * real, LEAST):
                faults.append(f"{field.name}: simulated {own:.3f}, real {real:.3f}")
        return faults


class Pairs:
    """Real runs of a fleet, one per strategy, made when they are first asked for."""

    def __init__(self, service: ClockedServe) -> None:
        self._service = service
        self.real = functools.cache(self._run)

    def _run(self, fleet: str, strategy: str) -> tuple[Recording, Measured]:
        """Run a strategy on a fleet, again if a busy machine cost the service its lease."""
        for attempt in range(ATTEMPTS - 1):
            try:
                return self._play(fleet, strategy, f"{fleet}-{strategy}-{attempt}")
            except NotLeader:
                continue
        return self._play(fleet, strategy, f"{fleet}-{strategy}-last")

    def _play(self, fleet: str, strategy: str, name: str) -> tuple[Recording, Measured]:
        run, w = case(fleet, strategy)
        with Client(self._service.url, name) as client:
            client.put_run(msgspec.to_builtins(run))
            seen = Play(client, SlowRewards(w, run, seed=1), STEPS, self._service.put_forward).run()
        watcher = RunClient(self._service.url, name)
        state = watcher.state()
        watcher.http.close()
        ages = {int(age): count for age, count in state["staleness"].items()}
        used = {int(times): uses for times, uses in state["histograms"]["times_sampled"].items()}
        evicted = state["groups"]["evicted"].get("too_stale", 0)
        return read_service(self._service.url, name, None), Measured(
            STEPS * 3600 / seen.seconds,
            seen.wait_share,
            sum(age * count for age, count in ages.items()) / sum(ages.values()),
            evicted / state["groups"]["stored"],
            sum(used.values()) / used[1],
        )


def case(fleet: str, strategy: str) -> tuple[RunConfig, Workload]:
    """Return configuration and speeds of a case: a step of 0.4 s."""
    name, options = STRATEGIES[strategy]
    lengths: dict[str, Any] = {"length_mean": 25.0, "length_sigma": 0.6, "length_max": 100}
    speeds: dict[str, Any] = {"group_s": 0.1, "token_s": 0.008, "train_s": 0.3, "publish_s": 0.1, "checkpoint_steps": 8}
    return config(strategy=name, options=options), workload(**speeds | lengths | FLEETS[fleet])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A service on which no time passes during a call, however busy the machine is."""
    folder = tmp_path_factory.mktemp("fidelity")
    server = ClockedServe(folder / "data", folder / "clock", stopped=True).start()
    yield Pairs(server)
    server.end()


@pytest.mark.parametrize(
    ("fleet", "recorded", "simulated"),
    [
        ("held-back", "one-use", "replay"),
        ("busy", "replay", "replay"),
        ("busy", "one-use", "replay"),
        ("slowing", "one-use", "replay"),
        ("slowing", "replay", "one-use"),
    ],
)
def test_a_recording_predicts_the_run_of_another_strategy(
    pairs: Pairs, fleet: str, recorded: str, simulated: str
) -> None:
    recording, real = pairs.real(fleet, recorded)[0], pairs.real(fleet, simulated)[1]
    name, options = STRATEGIES[simulated]
    asked = msgspec.structs.replace(recording.config, strategy=StrategySpec(name=name, options=options))
    figures = run_study(SimulateOptions(steps=STEPS), asked, recording).runs[0]
    assert recording.slots == FLEETS[fleet]["slots"]
    assert not measured_of(figures).close_to(real)


def measured_of(figures: Figures) -> Measured:
    """Return the figures of a simulation that a real run has too."""
    stale = figures.waste.get("too_stale")
    dropped = stale.groups / figures.stored_groups if stale else 0.0
    return Measured(figures.steps_per_hour, figures.wait_share, figures.staleness_mean, dropped, figures.uses_mean)
