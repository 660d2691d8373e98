"""Commands to print so that they run as typed, from where this one was started."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

DEFAULT_DATA_DIR = Path(".replaybuf/demo")
NAME = "replaybuf"


def demo_command(root: Path, *options: str) -> str:
    """Write the command of a demo in the folder `root`, with options."""
    where = () if root == DEFAULT_DATA_DIR else ("--data-dir", str(root))
    return shlex.join([*program(sys.argv[0]), "demo", *options, *where])


def program(started_as: str) -> list[str]:
    """Return the words that start this program again; `started_as` is its `sys.argv[0]`.

    The bare name serves only where it is this program that a shell would find by it.
    """
    if Path(started_as).name != NAME or not os.access(started_as, os.X_OK):  # python -m, or within another program
        return [sys.executable, "-m", "replaybuf"]
    found = shutil.which(NAME)
    return [NAME if found and Path(found).samefile(started_as) else started_as]
