"""A program for the tests: supervise three children, print all pids, and end as `replaybuf demo` would."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil

from replaybuf.launch.supervisor import Program, Stop, Supervisor

FOREVER = "import signal; signal.pause()"
PARENT = f"import subprocess, sys, signal; subprocess.Popen([sys.executable, '-c', {FOREVER!r}]); signal.pause()"
PROCESSES = 5  # guard, three children, one grandchild


async def main(logs: Path) -> int:
    """Start the children, print the pids once all run, and wait for the end."""
    async with Supervisor(logs) as supervisor:
        supervisor.start(Program(name="serve", command=[sys.executable, "-c", PARENT], stop_phase=1))
        supervisor.start(Program(name="engine", command=[sys.executable, "-c", FOREVER]))
        supervisor.start(Program(name="train", command=[sys.executable, "-c", FOREVER]))
        stop = await supervisor.supervise(_tell_pids())
    return stop.exit_code if isinstance(stop, Stop) else 0


async def _tell_pids() -> None:
    while len(children := psutil.Process().children(recursive=True)) < PROCESSES:  # noqa: ASYNC110 - other processes appear
        await asyncio.sleep(0.02)
    print(*(child.pid for child in children), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1]))))
