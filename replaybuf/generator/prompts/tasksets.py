"""Tasksets: tasks of a library as rows of prompts, by plug-ins of the entry-point group `replaybuf.tasksets`.

A plug-in is a function or class with the arguments of `open_taskset`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from replaybuf.generator.prompts.rows import Row
from replaybuf.plugins import entry_points as plugins

TASKSET = "verifiers:"
"""Prefix of a verifiers taskset in `--prompts`."""


class Taskset(Protocol):
    """The tasks of one taskset. If `infinite`, they never end."""

    infinite: bool

    def rows(self) -> Iterator[Row]:
        """Yield all rows of a finite taskset, each with the words that say where it is."""

    def row(self, number: int) -> dict[str, Any]:
        """Return one row by its number, from 0; the same each time."""


def open_taskset(taskset: str, options: dict[str, Any], tokenizer: Path | None) -> Taskset:
    """Open a taskset of verifiers with its options, for the model in the folder `tokenizer`.

    Raises `Invalid` if it cannot be loaded, `MissingExtra` without the package that reads it.
    """
    source: Taskset = plugins.load(plugins.TASKSETS, TASKSET.removesuffix(":"))(taskset, options, tokenizer)
    return source
