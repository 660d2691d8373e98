"""Tasks of a verifiers taskset as rows of prompts.

The prompt of a task carries all its data, so that any process can score or play it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from replaybuf.environment import Prompt, Row, invalid_row
from replaybuf.errors import Invalid, counted
from replaybuf.wire.decoding import prepared
from replaybuf_verifiers.process import PROCESS
from replaybuf_verifiers.worker.messages import Describe, Described, ReadTasks, Rendering, TaskRow, TaskRows

logger = logging.getLogger(__name__)

METADATA_KEY = "verifiers"
RENDERER = "renderer"
"""Option of a taskset that does not belong to its configuration."""
LOAD_S = 600.0
"""Time limit to start the process, to load the data of a taskset, or to read a block of it."""
_BLOCK = 256


class TaskData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The metadata of a prompt under `verifiers`: the taskset of its task, and all data of the task.

    `rendering`: how its play becomes token ids; None if the task takes one reply.
    """

    taskset: str
    options: dict[str, Any] = {}
    task: dict[str, Any]
    needs: list[str] = []
    rendering: Rendering | None = None


class Tasks:
    """The tasks of one taskset, read in blocks.

    `options` are fields of its configuration, and `renderer`: a name or a configuration of the package `renderers`,
    which renders plays for the model in the folder `tokenizer`. Raises `Invalid` if the taskset cannot be loaded or
    played, `MissingExtra` without verifiers.
    """

    def __init__(self, taskset: str, options: dict[str, Any], tokenizer: Path | None) -> None:
        self._taskset = taskset
        self._options = {name: value for name, value in options.items() if name != RENDERER}
        self._block: list[TaskRow] = []
        self._first = 0
        logger.info("reading taskset %s of verifiers", taskset)
        described = PROCESS.ask_now(Describe(taskset=taskset, options=self._options), Described, LOAD_S)
        self.infinite = described.infinite
        self._rendering: Rendering | None = None
        if described.plays is not None and described.unfit is None and tokenizer is not None:
            named = options.get(RENDERER, {})
            renderer = {"name": named} if isinstance(named, str) else named
            self._rendering = Rendering(tokenizer=str(tokenizer.absolute()), renderer=renderer)
        elif RENDERER in options:
            detail = f"taskset {taskset} has the option {RENDERER}, but its tasks are not played"
            raise Invalid(detail, name=RENDERER, value=options[RENDERER])

    def rows(self) -> Iterator[Row]:
        """Yield all rows of a finite taskset, each with the words that say where it is."""
        number = 0
        while (row := self._at(number)) is not None:
            yield self._where(number), self._row(number, row)
            number += 1

    def row(self, number: int) -> dict[str, Any]:
        """Return one row. Raises `Invalid` if the taskset ended before it."""
        row = self._at(number)
        if row is None:
            raise Invalid(f"taskset {self._taskset} is infinite, but ended after {counted(number, 'task')}")
        return self._row(number, row)

    def _at(self, number: int) -> TaskRow | None:
        if not self._first <= number < self._first + len(self._block):
            request = ReadTasks(
                taskset=self._taskset, options=self._options, first=number, count=_BLOCK, rendering=self._rendering
            )
            self._block = PROCESS.ask_now(request, TaskRows, LOAD_S).rows
            self._first = number
        return self._block[number - self._first] if self._block else None

    def _row(self, number: int, row: TaskRow) -> dict[str, Any]:
        if not row.messages:
            raise invalid_row(self._where(number), "has no prompt: its user opens the play, which is not supported")
        task = TaskData(
            taskset=self._taskset, options=self._options, task=row.task, needs=row.needs, rendering=self._rendering
        )
        opening = {"messages": row.messages} if row.prompt_ids is None else {"prompt_ids": row.prompt_ids}
        return opening | {
            "prompt_id": f"{self._taskset}/{row.task_id}",
            "answer": row.answer,
            "metadata": {METADATA_KEY: msgspec.to_builtins(task)},
        }

    def _where(self, number: int) -> str:
        return f"prompts verifiers:{self._taskset}, row {number + 1}"


def task_of(prompt: Prompt) -> TaskData:
    """Read the task of a prompt. Raises `Invalid` if it has none."""
    try:
        return msgspec.convert(prompt.metadata.get(METADATA_KEY), prepared(TaskData))
    except msgspec.ValidationError as error:
        raise Invalid(f"metadata.{METADATA_KEY}: {error}", name="metadata") from error
