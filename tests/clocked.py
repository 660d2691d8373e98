"""The command line with clocks that a test changes: `python -m`, with `$CLOCK_FILE`.

The file holds two numbers: seconds by which both clocks are ahead, and seconds by which the wall clock has jumped.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from replaybuf.cli.main import main
from replaybuf.service.clock import Clock
from replaybuf.service.host import Service


def _offsets_s() -> tuple[float, float]:
    passed, jumped = Path(os.environ["CLOCK_FILE"]).read_text().split()
    return float(passed), float(jumped)


def wall_s() -> float:
    """Return the wall clock."""
    return time.time() + sum(_offsets_s())


def monotonic_s() -> float:
    """Return the clock that does not jump."""
    return time.monotonic() + _offsets_s()[0]


if __name__ == "__main__":
    assert Service.__init__.__kwdefaults__ is not None
    Service.__init__.__kwdefaults__["clock"] = Clock(wall_s, monotonic_s)
    main()
