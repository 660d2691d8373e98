"""`replaybuf top` in a real terminal, with a real service: keys, an outage, the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.test_runs import Terminal as Command
from tests.cli.test_runs import terminal as terminal
from tests.conftest import RunClient, ServeProcess, Starter, group

Connect = Callable[[str, str], RunClient]
SHOWN_WITHIN_S = 60.0
ENDED_LOOK_S = 0.02
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9])")


class Terminal:
    """A pseudo terminal with `replaybuf top` in it."""

    def __init__(self, *arguments: str, columns: int = 120, rows: int = 30) -> None:
        self._ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "replaybuf", "top", "--every-s", "0.1", *arguments],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env=environment | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        self._seen = ""

    def until(self, text: str) -> None:
        """Read what the program draws from now on until it contains `text`."""
        deadline = time.monotonic() + SHOWN_WITHIN_S
        while text not in ESCAPES.sub("", self._seen):
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} is not in {ESCAPES.sub('', self._seen)[-3000:]}"
            self._seen += os.read(self._ours, 65536).decode("utf-8", "replace")
        self._seen = ""

    def press(self, keys: str) -> None:
        """Send keys."""
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        """Press q, read what the program still draws, and return its exit code."""
        self.press("q")
        deadline = time.monotonic() + SHOWN_WITHIN_S
        while self.process.poll() is None and time.monotonic() < deadline:
            # The end of the program makes nothing to read, because `theirs` is open here too.
            if select.select([self._ours], [], [], ENDED_LOOK_S)[0]:
                os.read(self._ours, 65536)
        return self.process.wait(0)

    def close(self) -> None:
        """End the program and the terminal."""
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def watch() -> Iterator[Callable[..., Terminal]]:
    """Start `top` in terminals that are closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, **size: int) -> Terminal:
            made = Terminal(*arguments, **size)
            stack.callback(made.close)
            return made

        yield start


def train(run: RunClient, steps: int = 2) -> None:
    """Train some steps with groups of a producer that keeps a ticket."""
    run.put(batch={"groups_per_batch": 2}, strategy={"options": {"max_staleness": 9}})
    epoch = run.attach()
    run.post("tickets", producer="host-1", count=1)
    run.append(*(group(f"g{n}") for n in range(2 * steps)))
    run.train(epoch, range(steps))


def test_keys_open_a_run_and_end_the_view(
    own_service: ServeProcess, connect: Connect, watch: Callable[..., Terminal]
) -> None:
    """New figures appear by themselves; at the end the terminal is as it was."""
    run = connect(own_service.url, "alpha")
    train(run)
    connect(own_service.url, "beta").put(batch={"groups_per_batch": 2})
    screen = watch("--url", own_service.url)
    screen.until("2 runs, durability strict")
    screen.until("alpha")
    connect(own_service.url, "gamma").put(batch={"groups_per_batch": 2})
    screen.until("3 runs")
    screen.press("s")
    screen.until("s sort: name")
    screen.press("\x1b[B\x1b[A\r")
    screen.until("run alpha: running")
    screen.until("1 out")
    screen.until("2 published")
    run.post("tickets", producer="host-2", count=1)
    screen.until("host-2")
    screen.press("\x1b")
    screen.until("s sort: name")
    assert screen.end() == 0
    assert termios.tcgetattr(screen.theirs) == screen.before


def test_a_service_that_goes_away_is_named_until_it_is_back(
    tmp_path: Path, connect: Connect, watch: Callable[..., Terminal], started: Starter
) -> None:
    """kill -9 of the service: the last state stays with its age; after the start the view goes on."""
    socket = tmp_path / "s.sock"
    server = started(ServeProcess(tmp_path / "data", "--uds", str(socket)))
    train(connect(server.url, "alpha"))
    screen = watch("--url", f"unix:{socket}", columns=60)
    screen.until("alpha")
    server.kill()
    screen.until("no answer from")
    screen.until("shown is the state of")
    screen.until("alpha")
    connect(server.start().url, "after").put(batch={"groups_per_batch": 2})
    screen.until("2 runs")
    assert screen.end() == 0


def test_without_a_terminal_one_frame_is_printed(terminal: Command, run: RunClient) -> None:
    """A pipe gets text without escapes, `--json` the answer; an unknown run is an error."""
    train(run)
    shown = terminal("top")
    assert run.run in shown and "\x1b" not in shown and "esc all runs" not in shown
    assert "2 published" in terminal("top", run.run)
    assert terminal.json("top", run.run)["row"]["step"] == 2
    assert run.run in {listed["run"] for listed in terminal.json("top")["runs"]}
    assert "nobody" in terminal.refused("top", "nobody")
    assert "no answer from" in terminal.refused("top", "--once", "--url", "http://127.0.0.1:1")
