"""Command lines of ours as they stand in scripts and documents, held against what the command line takes."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator


def calls(text: str) -> Iterator[tuple[str, set[str]]]:
    """Find every `replaybuf COMMAND --option ...` of a script, with its options and those set by environment."""
    for found in re.finditer(r"\breplaybuf ((?:[a-z][a-z-]* ?)+)[^\n;&|>)]*", text):
        command = found[1].strip()
        prefix = f"REPLAYBUF_{command.replace('-', '_').upper()}_"
        by_environment = {f"--{name.lower().replace('_', '-')}" for name in re.findall(rf"\b{prefix}(\w+)=", text)}
        yield command, set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", found[0])) | by_environment


@functools.cache
def options_of(command: str) -> frozenset[str]:
    """Ask the command line for the options of a command; none where there is no such command."""
    shown = subprocess.run(
        [sys.executable, "-m", "replaybuf.cli", *command.split(), "--help"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    return frozenset(re.findall(r"--[a-z][a-z-]*", shown.stdout)) if shown.returncode == 0 else frozenset()
