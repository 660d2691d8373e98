"""`replaybuf train` under torchrun: a rank that dies is started again, and the training goes on where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.conftest import RunClient
from tests.trainer.scripted import STEPS, fill_numbers, put_run
from tests.waiting import eventually

WITHIN_S = 200.0


def rank_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("RANK", "")
    except psutil.Error:  # it ends
        return ""


@pytest.mark.timeout(300)
def test_a_killed_rank_is_started_again_and_the_run_is_trained_to_its_end(
    run: RunClient, models: Path, tmp_path: Path
) -> None:
    """The last group comes only after the kill, so the ranks are in the middle of the run."""
    put_run(run)
    fill_numbers(run, range(STEPS - 1))
    metrics = tmp_path / "train.jsonl"
    options = {
        "url": str(run.http.base_url),
        "run": run.run,
        "model": models / "a",
        "checkpoint-dir": tmp_path / "checkpoints",
        "weights-dir": tmp_path / "weights",
        "metrics-file": metrics,
        "checkpoint-every-steps": 1,
        "rank-timeout-s": 60,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = ["--nproc-per-node", "2", "--max-restarts", "2", "--standalone", "-m", "--", "replaybuf", "train"]
    with (tmp_path / "log").open("w") as log:
        torchrun = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *command, "--fsdp", *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        try:
            # The ack comes first: a rank that dies before the checkpoint is whole repeats the step, as it should.
            eventually((tmp_path / "checkpoints" / f"step-{STEPS - 1:06d}").is_dir, WITHIN_S)
            (victim,) = [child for child in psutil.Process(torchrun.pid).children(True) if rank_of(child) == "1"]
            victim.send_signal(signal.SIGKILL)
            eventually(lambda: run.state()["epoch"] > 1, WITHIN_S)
            fill_numbers(run, range(STEPS - 1, STEPS))
            assert torchrun.wait(WITHIN_S) == 0, (tmp_path / "log").read_text()
        finally:
            torchrun.terminate()
            torchrun.wait(WITHIN_S)
    assert run.state()["state"] == "finished"
    steps = [msgspec.json.decode(line)["step"] for line in metrics.read_bytes().splitlines()]
    assert steps == list(range(STEPS)), "a step of which a checkpoint was written is not repeated"
