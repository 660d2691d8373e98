"""Tie a process to the one that started it, beside the guard, which may be killed at the same moment."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import MutableMapping

PARENT = "REPLAYBUF_ENDS_WITH"
"""Environment variable of a tied process: the id of the process that started it."""
_PR_SET_PDEATHSIG = 1


def tie_to_parent(environment: MutableMapping[str, str] = os.environ) -> None:
    """Ask Linux for a SIGTERM when the parent named in `PARENT` ends; elsewhere only the guard ends this process.

    The name is removed, so that it reaches no process of this one. Exits if the parent has already ended.
    """
    parent = environment.pop(PARENT, "")
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != parent:
        sys.exit(f"replaybuf: process {parent}, which started this one, has ended")
