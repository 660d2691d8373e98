"""Tasksets of verifiers (0.4, `verifiers.v1`): their tasks as prompts, their rewards as an environment.

Completions come from the engines of the generator as for any other prompt; a process of its own, which has verifiers,
reads the tasks and scores the replies. Its data go with a prompt, so that any process can score any task.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from replaybuf.errors import Invalid, RewardFault
from replaybuf.generator.environments import TASKSET, Score
from replaybuf.generator.prompts import Prompt, refused
from replaybuf.generator.scoring import reward_fault
from replaybuf.generator.taskset_process import TasksetProcess, TasksetRaised
from replaybuf.generator.taskset_worker import Describe, Described, ReadTasks, Scored, ScoreReply, TaskRow, TaskRows

logger = logging.getLogger(__name__)

METADATA_KEY = "verifiers"
LOAD_S = 600.0
"""Starting the process, and loading a taskset's data or reading a block of it, may take so long each."""
_BLOCK = 256
PROCESS = TasksetProcess()
"""Shared by all tasksets of this process: importing verifiers takes seconds, and 230 MB."""


class TaskOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a prompt's metadata holds under `verifiers`: where its task is from, and all of its data."""

    taskset: str
    options: dict[str, Any] = {}
    task: dict[str, Any]
    needs: list[str] = []


class Tasks:
    """The tasks of one taskset as rows of prompts, read in blocks. `options` are fields of its configuration.

    Raises `Invalid` where it cannot be loaded, `MissingExtra` without verifiers.
    """

    def __init__(self, taskset: str, options: dict[str, Any]) -> None:
        self._taskset = taskset
        self._options = options
        self._block: list[TaskRow] = []
        self._first = 0
        logger.info("reading taskset %s of verifiers", taskset)
        self.infinite = PROCESS.ask_now(Describe(taskset=taskset, options=options), Described, LOAD_S).infinite

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield all rows of a finite taskset, with the words that say where they stand."""
        number = 0
        while (row := self._at(number)) is not None:
            yield self._where(number), self._row(number, row)
            number += 1

    def row(self, number: int) -> dict[str, Any]:
        """Return one row. Raises `Invalid` where there is none."""
        row = self._at(number)
        if row is None:
            raise Invalid(f"taskset {self._taskset} ended after {number} tasks, and is said to be infinite")
        return self._row(number, row)

    def _at(self, number: int) -> TaskRow | None:
        if not self._first <= number < self._first + len(self._block):
            ask = ReadTasks(taskset=self._taskset, options=self._options, first=number, count=_BLOCK)
            self._block = PROCESS.ask_now(ask, TaskRows, LOAD_S).rows
            self._first = number
        return self._block[number - self._first] if self._block else None

    def _row(self, number: int, row: TaskRow) -> dict[str, Any]:
        if not row.messages:
            raise refused(self._where(number), "has no prompt: its user opens, and there is none here")
        task = TaskOf(taskset=self._taskset, options=self._options, task=row.task, needs=row.needs)
        return {
            "prompt_id": f"{self._taskset}/{row.task_id}",
            "messages": row.messages,
            "answer": row.answer,
            "metadata": {METADATA_KEY: msgspec.to_builtins(task)},
        }

    def _where(self, number: int) -> str:
        return f"prompts {TASKSET}{self._taskset}, row {number + 1}"


class Verifiers:
    """Scores by the rewards of a prompt's taskset: sum(weight x score), parts by the names of rewards and metrics.

    Takes tasks of one reply alone: prompts from `verifiers:TASKSET`, whose rewards need nothing but the reply.
    """

    def __init__(self) -> None:
        self._taken: set[bytes] = set()
        self._lock = threading.Lock()

    def check(self, prompt: Prompt) -> None:
        """Raise `Invalid` for a prompt from elsewhere, or whose task takes more than one reply; `MissingExtra`."""
        if METADATA_KEY not in prompt.metadata:
            raise Invalid(f"has no metadata.{METADATA_KEY}; it takes prompts from {TASKSET}TASKSET", name="metadata")
        task = task_of(prompt)
        if task.needs:
            raise Invalid(f"its task has {', '.join(task.needs)}; a reply is all there is here", name=METADATA_KEY)
        key = msgspec.json.encode((task.taskset, task.options), order="deterministic")
        with self._lock:
            if key not in self._taken:
                self._check_taskset(task)
                self._taken.add(key)

    def _check_taskset(self, task: TaskOf) -> None:
        ask = Describe(taskset=task.taskset, options=task.options)
        unscorable = PROCESS.ask_now(ask, Described, LOAD_S).unscorable
        if unscorable is not None:
            raise Invalid(
                f"taskset {task.taskset} {unscorable}; the environment verifiers scores single replies",
                name="taskset",
                value=task.taskset,
            )

    async def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Have the taskset score the reply. Raises `RewardFault`."""
        task = task_of(prompt)
        ask = ScoreReply(taskset=task.taskset, options=task.options, task=task.task, reply=completion_text)
        try:
            scored = await PROCESS.ask(ask, Scored)
        except (Invalid, TasksetRaised) as error:
            raise reward_raised(prompt, error) from error
        return score_by(scored)


def task_of(prompt: Prompt) -> TaskOf:
    """Read a prompt's task. Raises `Invalid` where it has none."""
    try:
        return msgspec.convert(prompt.metadata.get(METADATA_KEY), TaskOf)
    except msgspec.ValidationError as error:
        raise Invalid(f"metadata.{METADATA_KEY}: {error}", name="metadata") from error


def score_by(scored: Scored) -> Score:
    """Make a `Score` of what a taskset gave."""
    metrics = {f"metrics.{name}": value for name, value in scored.metrics.items()}
    return Score(scored.reward, scored.rewards | metrics)


def reward_raised(prompt: Prompt, error: Invalid | TasksetRaised) -> RewardFault:
    """Say that scoring failed."""
    return reward_fault("reward_raised", prompt, f"is not there: {error.detail}")
