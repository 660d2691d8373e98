"""The simulator against the real thing: one workload, simulated, and played against a real service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replaybuf.client.client import Client
from replaybuf.errors import Invalid, NotFound
from replaybuf.lab.simulate.command import SimulateOptions, run_study
from replaybuf.lab.simulate.figures import Figures
from replaybuf.lab.simulate.loop import simulate
from replaybuf.lab.simulate.recording import Recording, derive, read_file, read_service, save
from replaybuf.lab.simulate.workload import Supply, Workload
from replaybuf.wire.config import RunConfig
from tests.conftest import ClockedServe, RunClient, ServeProcess, group
from tests.lab.simulate.scripted import Play
from tests.lab.simulate.workloads import config, workload

STEPS = 32
STALENESS_TOLERANCE = 0.05
"""Policy versions, of a mean between 0.8 and 1.9; seen: 0.01."""
SHARE_TOLERANCE = 0.03
"""Of the trainer's time, and of the groups stored: the simulator rounds arrivals. Seen: 0.008."""

SHORT_ROWS = 120
"""All recorded rollouts fit; the prompts of a made-up workload, by default, would not."""

CASES = {
    "agrees-tight": ({"max_staleness": 1}, {"slots": 6, "token_s": 0.008}),
    "agrees-loose": ({"max_staleness": 3}, {"slots": 6, "token_s": 0.016}),
}


def case(name: str) -> tuple[RunConfig, Workload]:
    """Return configuration and speeds of a case: a step of 0.4 s, groups of 0.1 to 1.7 s."""
    options, speeds = CASES[name]
    lengths = {"length_mean": 25.0, "length_sigma": 0.9, "length_shared": 0.8, "length_max": 100}
    w = workload(group_s=0.1, train_s=0.3, publish_s=0.1, round_s=0.01, checkpoint_steps=8, **lengths, **speeds)
    return config(options=options), w


def real_figures(url: str, name: str) -> dict[str, Any]:
    """Return the staleness mean and the share of groups dropped, as the service counted them."""
    client = RunClient(url, name)
    state = client.state()
    client.http.close()
    ages = {int(age): count for age, count in state["staleness"].items()}
    return {
        "staleness": sum(age * count for age, count in ages.items()) / sum(ages.values()),
        "dropped": sum(state["groups"]["evicted"].values()) / state["groups"]["stored"],
    }


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClockedServe]:
    """A service on which no time passes during a call, however busy the machine is."""
    folder = tmp_path_factory.mktemp("stopped")
    server = ClockedServe(folder / "data", folder / "clock", stopped=True).start()
    yield server
    server.end()


@pytest.mark.parametrize("name", CASES)
def test_simulated_and_real_runs_agree(stopped: ClockedServe, tmp_path: Path, name: str) -> None:
    """Trainer wait, mean staleness and drops; then what is read off the recorded run."""
    run, w = case(name)
    with Client(stopped.url, name) as client:
        client.put_run(msgspec.to_builtins(run))
        measured = Play(client, Supply(w, run, seed=1), STEPS, stopped.put_forward).run()
    simulated: Figures = simulate(run, Supply(w, run, seed=1), STEPS)
    real = real_figures(stopped.url, name)
    reported = f"real {real}, waited {measured.wait_share:.3f}; simulated {simulated.wait_share:.3f}"
    assert simulated.steps == STEPS
    assert simulated.wait_share == pytest.approx(measured.wait_share, abs=SHARE_TOLERANCE), reported
    assert simulated.staleness_mean == pytest.approx(real["staleness"], abs=STALENESS_TOLERANCE), reported
    dropped = simulated.coverage.dropped / simulated.stored_groups
    assert dropped == pytest.approx(real["dropped"], abs=SHARE_TOLERANCE), reported
    recorded_run_is_understood(stopped.url, name, w, tmp_path / "recording.json")


def recorded_run_is_understood(url: str, name: str, w: Workload, path: Path) -> None:
    """Speeds come out near what was scripted, a saved recording is the same, and it can be studied."""
    recording = read_service(url, name, None)
    run = recording.config
    save(recording, path)
    assert read_file(path) == recording
    workload = derive(recording, Workload())
    assert workload.train_s == pytest.approx(w.train_s, abs=0.1)
    assert workload.publish_s == pytest.approx(w.publish_s, abs=0.05)
    assert w.slots / 3 <= workload.slots <= 3 * w.slots
    study = run_study(SimulateOptions(steps=STEPS), recording.config, recording)
    assert study.recorded == name and study.runs[0].steps == STEPS
    short = msgspec.structs.replace(run, batch=msgspec.structs.replace(run.batch, seq_len=SHORT_ROWS))
    again = run_study(SimulateOptions(steps=4), short, recording)
    assert again.runs[0].steps == 4, "recorded lengths count, not the prompts of a made-up workload"
    assert study.runs[0].generated_lengths.mean == pytest.approx(recorded_length(recording), rel=0.2)


def recorded_length(recording: Recording) -> float:
    """Mean tokens of the recorded rollouts."""
    return sum(g.tokens for g in recording.groups) / sum(g.group_size for g in recording.groups)


def test_a_recording_needs_eight_groups(run: RunClient, service: ServeProcess) -> None:
    """Named with the number that is needed."""
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"), group("b"))
    with pytest.raises(NotFound, match=r"has 2 groups; at least 8 are needed"):
        read_service(service.url, run.run, None)


@pytest.mark.parametrize(
    ("content", "fault"), [(b'{"run": 3}', "Expected `str`, got `int`"), (b'{"run": "\xff"}', "'utf-8' codec")]
)
def test_a_file_that_is_not_a_recording_is_rejected(tmp_path: Path, content: bytes, fault: str) -> None:
    """With its path and the fault."""
    path = tmp_path / "recording.json"
    path.write_bytes(content)
    with pytest.raises(Invalid, match=rf"recording .*recording.json cannot be read: {fault}"):
        read_file(path)
