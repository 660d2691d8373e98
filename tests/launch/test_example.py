"""examples/run.toml as a user runs it, with the real engine, generator and trainer, on a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import eventually

pytest.importorskip("torch")

from tests.trainer.served import write_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "run.toml"
STEPS = 8
WITHIN_S = 240.0
SMALLER = {
    "max_steps = 100": f"max_steps = {STEPS}",
    "group_size = 8": "group_size = 2",
    "groups_per_batch = 32": "groups_per_batch = 2",
    "port = 8900": "port = 0",
    '"reasoning-gym"': '"exact-match"',
    'name = "small"\n': 'name = "small"\nport = 0\n',
    "learning_rate = 1e-4": "learning_rate = 1e-4\ncheckpoint_every_steps = 2",
}


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The example with a model of random weights, a few steps, and free ports."""
    model = tmp_path / ".replaybuf" / "model"
    write_model(model, 0)
    for name in ("prompts", "held_out"):
        lines = [{"prompt": word, "prompt_id": word, "answer": word[::-1]} for word in ("abc", "bcd", "cab", "dab")]
        (model / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = EXAMPLE.read_text()
    for old, new in SMALLER.items():
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


@pytest.mark.timeout(600)  # 30 s alone: two processes import torch
def test_the_example_survives_kill_9_of_its_generator(example: Path) -> None:
    """It is restarted; the run completes all its steps, and is evaluated before and after.

    A restarted engine takes 5 s to import torch: `test_up.py` has its restart, `trainer/test_restarted_engine.py` what
    trainer and generator do meanwhile.
    """
    data = example.parent / ".replaybuf" / "spell"
    session = subprocess.Popen(
        [sys.executable, "-m", "replaybuf", "up", str(example)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = data / "metrics" / "trainer.jsonl"

    def first_step() -> bool:
        if session.poll() is not None:
            raise AssertionError(f"the session ended: {session.communicate(timeout=10)}")
        return metrics.exists() and metrics.read_bytes().count(b"\n") >= 1

    try:
        eventually(first_step, WITHIN_S)
        children = psutil.Process(session.pid).children(recursive=True)
        log = (data / "logs" / "up.log").read_text()
        os.kill(int(re.findall(r"started name=generator pid=(\d+)", log)[-1]), signal.SIGKILL)
        output, _ = session.communicate(timeout=WITHIN_S)
    finally:
        session.terminate()
        session.wait(timeout=WITHIN_S)
    assert session.returncode == 0, output
    assert re.search(r"generator \(pid \d+\) was killed by SIGKILL; restart 1 of 5 in 1 s", output)
    assert f"training is done at step {STEPS}" in output
    assert len(re.findall(r"evaluation held_out of version \d+: reward", output)) == 2
    steps = {json.loads(line)["step"] for line in metrics.read_text().splitlines()}
    assert steps == set(range(STEPS))
    assert psutil.wait_procs(children, timeout=WITHIN_S)[1] == []
