"""docs/one-gpu.md as a new user goes through it, on a CPU: its commands and its file, with the substitutions below.

Packages and the model come from this checkout: installing takes minutes, and there may be no model hub. vLLM is the
one of `make test-vllm`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.vllm.conftest import VENV
from tests.vllm.served import ENVIRONMENT
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "one-gpu.md").read_text()
SMALL_FILE = {
    # vLLM starts in half a minute on two idle cores, in minutes on busy ones.
    'data_dir = ".replaybuf/sums"': 'data_dir = ".replaybuf/sums"\nstart_timeout_s = 900',
    # 200 steps of 128 rollouts take an hour on a CPU.
    "max_steps = 200": "max_steps = 3",
    "groups_per_batch = 16": "groups_per_batch = 2",
    # The model of the test has positions for 256 tokens, and answers until it reaches the bound.
    "seq_len = 4096": "seq_len = 256",
    '"4096", "--enable-scale-out"': '"256", "--enable-scale-out", "--enforce-eager"',
    "max_tokens = 512": "max_tokens = 16",
    # bfloat16 is emulated on most CPUs: 40 s per step with a model of 0.8 million parameters.
    "bfloat16": "float32",
}
"""What a CPU and a tiny model need; each text is in the file once."""
STEPS = 3
CALL_TIMEOUT_S = 300.0


def blocks(language: str) -> list[str]:
    """Return the code blocks of the page in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def replaced(text: str, substitutions: dict[str, str]) -> str:
    """Replace texts of which each occurs once."""
    for printed, used in substitutions.items():
        assert text.count(printed) == 1, f"{printed!r} is {text.count(printed)} times in the file of the page"
        text = text.replace(printed, used)
    return text


@pytest.fixture
def box(versions: list[Path], tmp_path: Path) -> Path:
    """The folder of a new user after step 1 of the page: two environments, and a model in models/policy."""
    command = tmp_path / ".venv" / "bin" / "replaybuf"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m replaybuf "$@"\n')
    command.chmod(0o755)
    (tmp_path / ".venv-vllm").symlink_to(VENV)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "policy").symlink_to(versions[0])
    return tmp_path


def test_the_commands_of_the_page_train_on_vllm_and_end_with_a_report(box: Path) -> None:
    """`doctor` and the dry run find no problem, `top` shows the run, and vLLM samples with weights of the trainer."""
    vllm_port, port = free_port(), free_port()
    environment = ", ".join(f'{name} = "{value}"' for name, value in ENVIRONMENT.items())
    (text,) = blocks("toml")
    text = replaced(text, SMALL_FILE | {"port = 8900": f"port = {port}", 'VLLM_SERVER_DEV_MODE = "1"': environment})
    (box / "run.toml").write_text(text.replace("8001", str(vllm_port)))
    install, start = blocks("sh")
    doctor, dry_run, up = (shlex.split(line) for line in start.splitlines())
    assert dry_run == [*up, "--dry-run"] and ".venv-vllm/bin/pip install" in install
    variables = os.environ | {"OMP_NUM_THREADS": "1", "REPLAYBUF_URL": f"http://127.0.0.1:{port}"}

    def call(*command: str) -> str:
        done = subprocess.run(command, cwd=box, env=variables, capture_output=True, text=True, timeout=CALL_TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert f"127.0.0.1:{port} is free" in " ".join(call(*doctor, "--port", str(port)).split())
    assert "--enable-scale-out" in call(*dry_run) and not (box / ".replaybuf").exists()
    with (box / "up.log").open("w") as log:
        running = subprocess.Popen(up, cwd=box, env=variables, stdout=log, stderr=log)
        try:
            eventually(lambda: "console of this run" in (box / "up.log").read_text(), within_s=CALL_TIMEOUT_S)
            (top,) = re.findall(r"`(replaybuf top \w+)`", PAGE)
            assert "sums" in call(".venv/bin/replaybuf", *top.split()[1:], "--once")
            code = running.wait(CALL_TIMEOUT_S)
        finally:
            running.terminate()
            running.wait(60.0)
    printed = (box / "up.log").read_text()
    assert code == 0 and f"training is done at step {STEPS}" in printed, printed[-4000:]
    data = box / ".replaybuf" / "sums"
    assert "sums" in (data / "report.html").read_text()
    steps = [json.loads(line) for line in (data / "metrics" / "trainer.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [*range(STEPS)]
    # One version behind at most, so the groups of the last step were sampled after vLLM had loaded new weights.
    assert steps[-1]["version"] == STEPS - 1 and steps[-1]["staleness_max"] <= 1
