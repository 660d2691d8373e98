"""Sinks behind their guards: faults and delays stay out of the training."""

from __future__ import annotations

import logging
import resource
import signal
import threading
from pathlib import Path

import pytest

from replaybuf.errors import Invalid
from replaybuf_trainer.report.sinks.json_lines import JsonLines
from replaybuf_trainer.report.sinks.sink import Background, Figures, Guard, flat

TIMEOUT_S = 30.0


class Scripted:
    """A sink that raises for the items in `broken` and waits for `gate` at each."""

    name = "scripted"

    def __init__(self, *broken: int) -> None:
        self.broken = broken
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.written: list[int] = []
        self.closed = False

    def write(self, item: int) -> None:
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        if item in self.broken:
            raise OSError(28, "No space left on device")
        self.written.append(item)

    def close(self) -> None:
        self.closed = True


def test_a_sink_that_fails_is_logged_once_counted_and_used_again(caplog: pytest.LogCaptureFixture) -> None:
    sink = Scripted(1, 2)
    guard = Guard(sink)
    with caplog.at_level(logging.INFO):
        for item in range(4):
            guard.write(item)
        guard.close()
    assert (sink.written, guard.lost, sink.closed) == ([0, 3], 2, True)
    assert [record.getMessage() for record in caplog.records] == [
        "figures: scripted fails (OSError: [Errno 28] No space left on device); the training goes on, and lost steps "
        "are counted",
        "figures: scripted works again",
        "figures: scripted lost 2 steps",
    ]


def test_a_slow_sink_never_holds_the_training_and_its_queue_is_bounded() -> None:
    """While one item is being written, two wait; the fourth is lost. The waiting items are written at the end."""
    sink = Scripted()
    sink.gate.clear()
    guard = Background(sink, items=2)
    guard.write(0)
    assert sink.entered.wait(TIMEOUT_S)
    for item in (1, 2, 3):
        guard.write(item)
    assert guard.lost == 1
    sink.gate.set()
    guard.close()
    assert (sink.written, sink.closed) == ([0, 1, 2], True)


def test_a_sink_that_hangs_is_left_behind_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    sink = Scripted()
    sink.gate.clear()
    guard = Background(sink, items=1)
    guard.write(0)
    assert sink.entered.wait(TIMEOUT_S)
    guard.write(1)
    guard.close(timeout_s=0.01)
    assert "scripted does not end within" in caplog.text
    sink.gate.set()


def test_figures_are_flattened_to_numbers_by_path() -> None:
    figures: Figures = {"loss": 1, "skipped": False, "phase_s": {"wait": 0.5}, "note": "x", "reward": None}
    assert flat(figures) == {"loss": 1.0, "skipped": 0.0, "phase_s/wait": 0.5}


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_half_line(tmp_path: Path) -> None:
    """The file may hold 40 bytes more than the first line; the kernel enforces it as a full disk does."""
    path = tmp_path / "train.jsonl"
    sink = JsonLines(path)
    sink.write({"step": 0})
    first = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(first) + 40, limits[1]))
        with pytest.raises(OSError, match=r"takes no more bytes|File too large"):
            sink.write({"step": 1, "text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_bytes() == first
    sink.write({"step": 2})
    assert path.read_bytes() == first + b'{"step":2}\n'


def test_a_metrics_file_that_cannot_be_written_is_rejected_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Invalid, match=r"metrics file \S+/file/train.jsonl cannot be written"):
        JsonLines(tmp_path / "file" / "train.jsonl")
