"""The two clocks of a service, so that tests can give it others."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    """`wall` is for people and the ledger, and it may jump. `monotonic` is for deadlines and durations."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


SYSTEM_CLOCK = Clock()
