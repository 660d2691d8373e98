"""The command line with a service that kills itself in the middle of a move: `python -m`, with `$KILL_AT`.

`KILL_AT`: `written` (files are durable, Redis does not know them) or `recorded` (stubs are in Redis, the service does
not know them).
"""

from __future__ import annotations

import os
import signal
from typing import Any

from replaybuf.cli.main import main
from replaybuf.store.spill import SpillFiles, SpillStore

_write, _record = SpillFiles.write, SpillStore.record


async def write_and_die(self: SpillFiles, files: Any) -> None:
    """Write the files, and die."""
    await _write(self, files)
    os.kill(os.getpid(), signal.SIGKILL)


async def record_and_die(self: SpillStore, run: str, token: str, url: str, folder: str, moves: Any = ()) -> list[bool]:
    """Record the moves of some groups, and die."""
    recorded = await _record(self, run, token, url, folder, moves)
    if moves:
        os.kill(os.getpid(), signal.SIGKILL)
    return recorded


if __name__ == "__main__":
    match os.environ.get("KILL_AT"):
        case "written":
            SpillFiles.write = write_and_die  # type: ignore[method-assign]
        case "recorded":
            SpillStore.record = record_and_die  # type: ignore[method-assign]
    main()
