"""Outlive the demo by a moment: end its processes when it is gone, even after `kill -9`.

Run as a script of its own, in its own session: `python -I -S guard.py`. Standard input is a pipe of which the demo
holds the only other end. A line `+PGID` puts a process group under guard, `-PGID` takes it out again. End of file means
that the demo no longer exists: every group still under guard gets SIGTERM and, `GRACE_S` later, SIGKILL.

A pipe rather than PR_SET_PDEATHSIG: it works on every POSIX system, reaches grandchildren (whole groups), and needs no
code between fork and exec. Imports nothing outside the standard library, so that it costs little memory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable

GRACE_S = 2.0
POLL_S = 0.05


def watch(lines: Iterable[str]) -> set[int]:
    """Follow the demo's lines to their end; return the process groups that are left."""
    groups: set[int] = set()
    for line in lines:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    return groups


def signal_group(group: int, number: int) -> bool:
    """Send a signal (0 = only look) to a process group; return whether it still exists."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS answers so for a group of zombies
        return False
    return True


def end(groups: set[int], grace_s: float = GRACE_S) -> None:
    """Stop process groups: ask first, force after `grace_s` seconds."""
    left = {group for group in groups if signal_group(group, signal.SIGTERM)}
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = {group for group in left if signal_group(group, 0)}
    for group in left:
        signal_group(group, signal.SIGKILL)


if __name__ == "__main__":
    end(watch(sys.stdin))
