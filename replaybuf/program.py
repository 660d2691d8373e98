"""Name this program in printed commands, so that a user can paste them."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "replaybuf"


def command_line(*words: str) -> str:
    """Return a shell command that runs this program again with `words` as arguments."""
    return shlex.join([*program(sys.argv[0]), *words])


def program(started_as: str) -> list[str]:
    """Return the words that start this program again; `started_as` is its `sys.argv[0]`.

    The bare name is used only if the shell finds this same program under it.
    """
    if Path(started_as).name != NAME or not os.access(started_as, os.X_OK):  # python -m, or inside another program
        return [sys.executable, "-m", NAME]
    path = shutil.which(NAME)
    return [NAME if path and Path(path).samefile(started_as) else started_as]
