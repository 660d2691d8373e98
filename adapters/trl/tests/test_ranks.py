"""Two processes of torchrun on a CPU: the first one alone talks to the service, and both train their part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from training import fill, of_ledger

from tests.conftest import RunClient

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl" / "train.py"
STEPS, MAX_STEPS = 2, 4


def test_two_ranks_train_the_batches_of_the_ledger(run: RunClient, model: Path, tmp_path: Path) -> None:
    batch = {"groups_per_batch": 16, "tokens_per_batch": None, "seq_len": 128}
    groups = fill(run, groups=16, size=8, steps=STEPS, batch=batch, group_size=8, max_steps=STEPS)
    options: dict[str, Any] = {
        "--url": run.http.base_url,
        "--run": run.run,
        "--model": model,
        "--output": tmp_path / "out",
        "--steps": MAX_STEPS,
        "--accumulation": 2,
    }
    words = [str(word) for pair in options.items() for word in pair]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    command = [*torchrun, str(Path(__file__).with_name("recording.py")), str(EXAMPLE), *words, "--cpu"]
    trained = tmp_path / "trained.jsonl"
    environment = os.environ | {"TRAINED": str(trained), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in trained.read_text().splitlines()]
    parts = [line for line in lines if "trained" in line]
    assert len({line["pid"] for line in parts}) == 2
    for step in range(STEPS):
        of_step = sorted(digest for line in parts if line["step"] == step for digest in line["trained"])
        assert of_step == sorted(of_ledger(run, step, groups).elements())
    left = [name for line in lines for name in line.get("threads_at_the_end", []) if "gloo" in name]
    assert not left, "threads of torch.distributed, which may abort the process at its exit"
    state = run.state()
    assert (state["epoch"], state["step"], state["state"]) == (1, STEPS, "finished")
