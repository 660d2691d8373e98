"""Memory and state of processes come from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replaybuf.launch import processes
from replaybuf.launch.processes import ProcessState, process_states

linux_only = pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc here")


@linux_only
def test_a_process_is_described_with_its_memory_and_its_children() -> None:
    """The embedded Valkey shows up under the service that started it, by its own name."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        own, *children = process_states("serve", os.getpid())
        assert own.name == "serve"
        assert own.memory_bytes is not None and own.peak_bytes is not None
        assert own.peak_bytes >= own.memory_bytes > 1_000_000
        assert own.cpu_s is not None
        assert 0.0 < own.cpu_s <= time.process_time() + 0.1
        assert child.pid in [process.pid for process in children]


def test_a_process_that_is_gone_is_not_described() -> None:
    """No error, just nothing."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait(timeout=20)
    assert process_states("train", child.pid) == []


def test_without_proc_only_the_pid_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On other systems the figures are missing, and shown as such."""
    monkeypatch.setattr(processes, "PROC", tmp_path / "proc")
    assert process_states("train", 7) == [ProcessState("train", 7, "not known")]
