"""`make gpu` without a GPU: a whole run by `replaybuf up` with vLLM, whose figures are complete."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.vllm.conftest import VENV

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400.0


def test_a_rehearsal_trains_on_vllm_and_gives_every_figure(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", "--steps", "5"]
    command += ["--vllm", str(VENV / "bin" / "vllm"), "--keep", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout[done.stdout.index("{") :])
    assert (figures["steps"], figures["gpus"], figures["publisher"]) == (2, [], "reload")
    positive = ("tokens_per_s", "step_s", "peak_memory_gib", "mfu", "train_mfu", "publication_s")
    assert all(figures[name] > 0 for name in positive), figures
    shares = ("trainer_wait_share", "share_outside_forward_and_backward")
    assert all(0 <= figures[name] <= 1 for name in shares), figures


def test_without_a_gpu_nothing_is_measured_and_the_way_out_is_named() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2 and "--rehearse" in done.stderr
