"""Lock of a data folder: one session at a time."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from replaybuf.errors import Conflict

LOCK_WAIT_S = 5.0
POLL_S = 0.1


def lock_folder(path: Path, in_use: Conflict) -> int:
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
