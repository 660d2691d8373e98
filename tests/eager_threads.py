"""The command line with threads that take turns as often as Python can: `python -m tests.eager_threads serve`."""

from __future__ import annotations

import sys

from replaybuf.cli.main import main

if __name__ == "__main__":
    sys.setswitchinterval(1e-6)
    main()
