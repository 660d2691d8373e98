"""Figures as JSON lines, one per step, in the file of `--metrics-file`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from replaybuf.errors import Invalid
from replaybuf_trainer.report.sinks.sink import Figures


class JsonLines:
    """Appends to a file. Raises `Invalid` at once if it cannot be written.

    A line that does not fit on the disk is removed again: half a line would spoil the next one.
    """

    name = "metrics file"

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise Invalid(
                f"metrics file {path} cannot be written: {error.strerror or error}",
                name="metrics_file",
                value=str(path),
            ) from error

    def write(self, item: Figures) -> None:
        """Append one line. Raises `OSError`."""
        line = msgspec.json.encode(item) + b"\n"
        with self._path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError(f"{self._path} takes no more bytes")
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file.fileno(), size)
                raise

    def close(self) -> None:
        """Do nothing: each line is written at once."""
