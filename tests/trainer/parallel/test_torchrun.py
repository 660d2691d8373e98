"""`replaybuf train` under torchrun: a rank that dies is started again, and the training goes on where it was."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.conftest import RunClient
from tests.forked import ForkedFunction
from tests.trainer.scripted import STEPS, fill_numbers, put_run
from tests.waiting import eventually

WITHIN_S = 200.0


def launch(words: list[str], folder: Path) -> None:
    """Start two ranks as `torchrun --nproc-per-node 2 --max-restarts 2 --standalone` does.

    The ranks are forked from this process, which has imported torch: as programs, the four would take 20 s to do so.
    """
    logging.basicConfig(filename=folder / "log", level=logging.INFO)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="ranks",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=2,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(),
    )
    elastic_launch(config, run_rank)(words, folder)


def run_rank(words: list[str], folder: Path) -> None:
    """Become the command `replaybuf` in a process of the launcher; write its pid into a file named by its rank."""
    (folder / f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    sys.argv = ["replaybuf", *words]
    try:
        runpy.run_module("replaybuf", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise


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
    words = ["train", "--fsdp", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    torchrun = ForkedFunction(target=launch, args=(words, tmp_path), trainer=True)
    torchrun.start()
    try:
        # The ack comes first: a rank that dies before the checkpoint is whole repeats the step, as it should.
        eventually((tmp_path / "checkpoints" / f"step-{STEPS - 1:06d}").is_dir, WITHIN_S)
        os.kill(int((tmp_path / "rank-1").read_text()), signal.SIGKILL)
        eventually(lambda: run.state()["epoch"] > 1, WITHIN_S)
        fill_numbers(run, range(STEPS - 1, STEPS))
        torchrun.join(WITHIN_S)
        assert torchrun.exitcode == 0, (tmp_path / "log").read_text()
    finally:
        torchrun.terminate()
        torchrun.join(WITHIN_S)
    assert run.state()["state"] == "finished"
    steps = [msgspec.json.decode(line)["step"] for line in metrics.read_bytes().splitlines()]
    assert steps == list(range(STEPS)), "a step of which a checkpoint was written is not repeated"
