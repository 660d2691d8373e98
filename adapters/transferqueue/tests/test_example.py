"""The example of the repository, and the program of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.valkeys import Valkey

ROOT = Path(__file__).parents[3]


def run(valkey: Valkey, tmp_path: Path, *arguments: str) -> str:
    environment = os.environ | {"REPLAYBUF_TRANSFERQUEUE_URL": valkey.url}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(600)
def test_the_example_brings_back_every_sample_after_a_kill(valkey: Valkey, tmp_path: Path) -> None:
    out = run(valkey, tmp_path, str(ROOT / "examples/transferqueue/crash.py"), "--samples", "5")
    assert "5 samples put later, kept" in out and "all 5 samples are back" in out


@pytest.mark.timeout(600)
def test_the_program_of_the_page_runs(valkey: Valkey, tmp_path: Path) -> None:
    page = (ROOT / "docs/adapters/transferqueue.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "program.py").write_text(program.replace("redis://127.0.0.1:6379", valkey.url))
    assert "0 samples with 0 values" in run(valkey, tmp_path, "program.py")
