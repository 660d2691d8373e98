"""The command line with a wall clock that a test moves: `python -m tests.chaos.jumping_clock FILE serve ...`.

FILE holds the offset in seconds as one double. It is mapped, so a change counts at the next call. All Python code of
the process sees the moved clock, and only Python code asks for it. libfaketime would need a compiler or root on every
machine that runs the test.
"""

from __future__ import annotations

import importlib
import mmap
import struct
import sys
import time
from pathlib import Path

_OFFSET = struct.Struct("<d")


def set_offset(path: Path, offset_s: float) -> None:
    """Move the clock of the process that maps `path`; makes the file if needed."""
    if not path.exists():
        path.write_bytes(_OFFSET.pack(offset_s))
        return
    with path.open("r+b") as file:
        file.write(_OFFSET.pack(offset_s))


def move_clock(path: Path) -> None:
    """Let `time.time` follow the file from now on."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), _OFFSET.size, access=mmap.ACCESS_READ)
    real_s = time.time

    def moved_s() -> float:
        return real_s() + float(_OFFSET.unpack_from(mapped)[0])

    time.time = moved_s


if __name__ == "__main__":
    move_clock(Path(sys.argv.pop(1)))
    # Imported only now: a module that takes `time.time` as a default argument gets the moved one.
    importlib.import_module("replaybuf.cli.main").main()
