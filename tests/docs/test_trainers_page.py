"""docs/trainers.md keeps up with the code: its examples run, its tables name what there is."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaybuf.client import unpack
from replaybuf.client.client import Client
from replaybuf.client.reader import BatchReader, ReaderOptions
from tests.conftest import RunClient, ServeProcess, group

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
LONGEST_EXAMPLE_LINES = 20
STEPS = 2
TIMEOUT_S = 120.0


def example(heading: str) -> str:
    """Cut the one Python block out of a section."""
    section = re.split(r"\n##+ ", PAGE.partition(f"# {heading}\n")[2])[0]
    (block,) = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert len(block.splitlines()) <= LONGEST_EXAMPLE_LINES
    return str(block)


def run_example(heading: str, **names: Any) -> dict[str, Any]:
    """Run it as it stands; return its names."""
    exec(compile(example(heading), f"docs/trainers.md, {heading}", "exec"), names)
    return names


@pytest.fixture
def main(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient], monkeypatch: pytest.MonkeyPatch
) -> RunClient:
    """A run `main` of two steps with all its groups, on the service that the examples go to."""
    monkeypatch.setenv("REPLAYBUF_URL", own_service.url)
    run = connect(own_service.url, "main")
    strategy = {"name": "one-step-off-policy", "options": {"max_staleness": 9}}
    run.put(batch={"groups_per_batch": 1}, strategy=strategy, max_steps=STEPS)
    run.append(*(group(f"g{step}") for step in range(STEPS)))
    return run


@pytest.mark.parametrize("heading", ["numpy", "torch", "IterableDataset"])
def test_an_example_trains_the_run_to_its_end(
    main: RunClient, heading: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if heading != "numpy":
        pytest.importorskip("torch")
    run_example(heading)
    state = main.state()
    assert (state["state"], state["step"], state["published_version"]) == ("finished", STEPS, STEPS)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["0", "1"]


def test_the_example_of_several_ranks_trains_on_each_of_them(main: RunClient) -> None:
    """Two processes, as torchrun starts them: both get a part of every step, and both end with the run."""
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    torchrun = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-c", example("Several ranks")]
    ranks = [
        subprocess.Popen(command, env=torchrun | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=TIMEOUT_S)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert told == [[f"{step} {rank} 1" for step in range(STEPS)] for rank in range(2)]
    assert [rank.returncode for rank in ranks] == [0, 0] and main.state()["state"] == "finished"


def test_the_example_of_the_way_back_sends_priorities(main: RunClient) -> None:
    """For every group of the batch."""
    with Client(str(main.http.base_url), "main") as client:
        attached = client.attach()
        with BatchReader(client, attached.epoch, attached.step) as reader:
            names = run_example("From packed rows back to rollouts", reader=reader, batch=next(reader))
    assert names["feedback"] == {"priorities": {"g0": pytest.approx(1.0, abs=0.01)}}


def test_the_example_of_the_way_back_from_torch_sends_priorities(main: RunClient) -> None:
    """As numpy's does."""
    pytest.importorskip("torch")
    from replaybuf_trainer.reading import TensorReader

    with Client(str(main.http.base_url), "main") as client:
        attached = client.attach()
        with TensorReader(client, attached.epoch, attached.step) as reader:
            names = run_example("Results of torch", reader=reader, batch=next(reader))
    assert names["feedback"] == {"priorities": {"g0": pytest.approx(1.0, abs=0.01)}}
    assert len(names["first"]) == len(names["batch"].host.micro_batches[0].rewards)


def test_every_option_of_the_reader_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", PAGE, re.MULTILINE))
    told = {"none": None, "true": True}
    for field in dataclasses.fields(ReaderOptions):
        default = rows[field.name]
        assert (told[default] if default in told else float(default)) == field.default, field.name


def test_every_call_of_the_way_back_is_documented() -> None:
    calls = set(re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE))
    assert calls == {"rollout_keys", "per_rollout", "per_group", "merged"}
    assert all(hasattr(unpack, call) for call in calls)
