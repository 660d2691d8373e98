"""Script that ends the demo's processes when the demo is gone, even after `kill -9`.

It runs in its own session: `python -I -S guard.py`. The demo holds the only other end of its standard input. A line
`+PGID` adds a process group, `-PGID` removes it. End of file means that the demo no longer exists: every remaining
group gets SIGTERM and, `GRACE_S` later, SIGKILL.

A pipe works on every POSIX system and reaches whole process groups, unlike PR_SET_PDEATHSIG (`tie.py`). The script
imports only the standard library, so that it needs little memory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable

GRACE_S = 2.0
POLL_S = 0.05


def remaining_groups(lines: Iterable[str]) -> set[int]:
    """Apply the demo's lines until their end; return the process groups that remain."""
    groups: set[int] = set()
    for line in lines:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    return groups


def signal_group(group: int, number: int) -> bool:
    """Send a signal (0 = none) to a process group; return whether the group still exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS answers PermissionError for a group of zombies
        return False
    return True


def end(groups: set[int], grace_s: float = GRACE_S) -> None:
    """Send SIGTERM to process groups, and SIGKILL after `grace_s` seconds."""
    left = {group for group in groups if signal_group(group, signal.SIGTERM)}
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = {group for group in left if signal_group(group, 0)}
    for group in left:
        signal_group(group, signal.SIGKILL)


if __name__ == "__main__":
    end(remaining_groups(sys.stdin))
