"""The command line with clocks that a test changes: `python -m`, with `$CLOCK_FILE`.

The file holds two numbers: seconds by which both clocks are ahead, and seconds by which the wall clock has jumped. Two
more numbers stop both clocks: what the wall clock and the other one show without these seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from replaybuf.cli.main import main
from replaybuf.service.clock import Clock
from replaybuf.service.host import Service


def _clocks_s() -> tuple[float, float]:
    passed, jumped, *stopped = map(float, Path(os.environ["CLOCK_FILE"]).read_text().split())
    wall, monotonic = stopped or (time.time(), time.monotonic())
    return wall + passed + jumped, monotonic + passed


def wall_s() -> float:
    """Return the wall clock."""
    return _clocks_s()[0]


def monotonic_s() -> float:
    """Return the clock that does not jump."""
    return _clocks_s()[1]


if __name__ == "__main__":
    assert Service.__init__.__kwdefaults__ is not None
    Service.__init__.__kwdefaults__["clock"] = Clock(wall_s, monotonic_s)
    main()
