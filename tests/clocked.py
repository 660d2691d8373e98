"""The command line with a clock that a test may put forward: `python -m`, the offset in seconds in `$CLOCK_FILE`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from replaybuf.cli.main import main
from replaybuf.service.host import Service


def now_s() -> float:
    """Return the time, put forward."""
    return time.time() + float(Path(os.environ["CLOCK_FILE"]).read_text())


if __name__ == "__main__":
    assert Service.__init__.__kwdefaults__ is not None
    Service.__init__.__kwdefaults__["clock"] = now_s
    main()
