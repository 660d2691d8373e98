"""Memory and processor time of processes come from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replaybuf.launch import processes
from replaybuf.launch.processes import process_uses

linux_only = pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc here")


@linux_only
def test_a_process_is_described_with_its_memory_and_its_children() -> None:
    """The embedded Valkey shows up under the service that started it, by its own name."""
    code = "import sys; print('named', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        own, *children = process_uses("serve", os.getpid())
        assert own.name == "serve"
        assert own.peak_bytes is not None and own.peak_bytes > 1_000_000
        assert 0.0 < own.cpu_s <= time.process_time() + 0.1
        name = Path(f"/proc/{child.pid}/comm").read_text().strip()
        assert name in [process.name for process in children]


def test_a_process_that_is_gone_is_not_described() -> None:
    """No error, just nothing."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait(timeout=20)
    assert process_uses("train", child.pid) == []


def test_without_proc_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On other systems a report says so."""
    monkeypatch.setattr(processes, "PROC", tmp_path / "proc")
    assert process_uses("train", os.getpid()) == []
