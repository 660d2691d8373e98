"""Shell scripts of examples, run where a stand-in replaces the program that needs a GPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.conftest import RunClient

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 150.0


def run_script(
    script: Path, *arguments: str, run: RunClient, folder: Path, stand_in: Path, cwd: Path | None = None, **more: str
) -> tuple[int, str]:
    """Run a script for a run, with its output in `folder`/out; return its exit code and what it printed.

    `stand_in`: a Python file that replaces the program of its name. `more`: variables of the environment.
    """
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    program = bin_folder / stand_in.stem
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in} "$@"\n')
    program.chmod(0o755)
    environment = {
        "REPLAYBUF_URL": str(run.http.base_url),
        "RUN": run.run,
        "OUT": str(folder / "out"),
        "PATH": f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    process = subprocess.Popen(
        [str(script), *arguments],
        env=os.environ | environment | more,
        cwd=cwd or folder,
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, printed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
