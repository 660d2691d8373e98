"""End the processes of a session when the session is gone, even after `kill -9`.

As a script, `python -I -S guard.py`, it runs in its own session. The supervisor holds the only other end of its
standard input. A line `+PGID` adds a process group, `-PGID` removes it. End of file means that the supervisor no longer
exists: every remaining group gets SIGTERM and, `GRACE_S` later, SIGKILL. A pipe works on every POSIX system and reaches
whole process groups, unlike PR_SET_PDEATHSIG.

The guard may be killed at the same moment as the supervisor. Therefore the commands of this package also tie themselves
to the supervisor (`tie_to_parent`). The guard also holds the lock of the data folder until the end. The module imports
only the standard library, so that the script needs little memory.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

GRACE_S = 2.0
POLL_S = 0.05
LOCK_WAIT_S = 5.0
PARENT = "REPLAYBUF_ENDS_WITH"
"""Environment variable of a tied process: the id of the process that started it."""
_PR_SET_PDEATHSIG = 1


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


def lock_folder(path: Path, in_use: Exception) -> int:
    """Lock the file `path` and return its descriptor. Raises `in_use` after `LOCK_WAIT_S`.

    The guard of a session that was just killed holds the lock until its processes are gone.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise in_use from None
            time.sleep(POLL_S)
        else:
            return lock


def tie_to_parent(environment: MutableMapping[str, str] = os.environ) -> None:
    """Ask Linux for a SIGTERM when the parent named in `PARENT` ends; elsewhere only the guard ends this process.

    The name is removed, so that it reaches no process of this one. Exits if the parent has already ended.
    """
    parent = environment.pop(PARENT, "")
    if not parent or sys.platform != "linux":
        return
    import ctypes  # not in the script, which needs little memory

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != parent:
        sys.exit(f"replaybuf: process {parent}, which started this one, has ended")


if __name__ == "__main__":
    end(remaining_groups(sys.stdin))
