"""Find `replaybuf` commands in scripts and documents, and the options that each command accepts."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import unittest.mock
from collections.abc import Iterator

from replaybuf.cli.main import main


def calls(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each `replaybuf COMMAND` of a text with its options, including those set by environment variables."""
    for match in re.finditer(r"\breplaybuf ((?:[a-z][a-z-]* ?)+)[^\n;&|>)]*", text):
        command = match[1].strip()
        prefix = f"REPLAYBUF_{command.replace('-', '_').upper()}_"
        by_environment = {f"--{name.lower().replace('_', '-')}" for name in re.findall(rf"\b{prefix}(\w+)=", text)}
        yield command, set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", match[0])) | by_environment


@functools.cache
def options_of(command: str) -> frozenset[str]:
    """Return the options in the whole help of a command; none for an unknown command."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as shown,
        contextlib.redirect_stderr(io.StringIO()),
        unittest.mock.patch.dict(os.environ, COLUMNS="200"),
    ):
        try:
            main([*command.split(), "--help-all"])
        except SystemExit as ended:
            if ended.code:
                return frozenset()
    return frozenset(re.findall(r"--[a-z][a-z-]*", shown.getvalue()))
