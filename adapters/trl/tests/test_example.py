"""The example of the repository trains on a CPU as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training import fill

from tests.conftest import RunClient

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl" / "train.py"
BATCH = {"groups_per_batch": 16, "tokens_per_batch": None, "seq_len": 128}


@pytest.mark.timeout(600)
def test_the_example_trains_on_a_cpu_as_it_is(run: RunClient, model: Path, tmp_path: Path) -> None:
    """Other tests replace functions of TRL in their own process; this one starts a new one."""
    fill(run, steps=1, groups=16, size=8, batch=BATCH, group_size=8, max_steps=1)
    options = {"--url": run.http.base_url, "--run": run.run, "--model": model, "--output": tmp_path, "--steps": 1}
    words = [str(word) for pair in options.items() for word in pair]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *words, "--cpu"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    state = run.state()
    assert (state["state"], state["published_version"], state["checkpoints"]) == ("finished", 1, [1])
    assert (tmp_path / "weights" / "v000001" / "model.safetensors").exists()
