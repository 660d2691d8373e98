"""Tasksets of verifiers (0.4, `verifiers.v1`): their tasks as prompts, their rewards as an environment.

Completions come from the engines of the generator as for any other prompt; a process of its own, which has verifiers,
reads the tasks and scores the replies. Tasks that take more than a reply are played there, in turns that the engines
sample. A task's data go with its prompt, so that any process can score or play it.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from replaybuf.errors import Invalid, RewardFault
from replaybuf.generator.environments.contract import TASKSET, Episode, Score, Turn
from replaybuf.generator.environments.scoring import episode_fault, reward_fault
from replaybuf.generator.prompts.prompt import Prompt, refused
from replaybuf.generator.tasksets.process import PlayRewritten, TasksetProcess, TasksetRaised
from replaybuf.generator.tasksets.worker.messages import (
    BeginPlay,
    Describe,
    Described,
    DropPlay,
    EndPlay,
    ReadTasks,
    Rendering,
    Requests,
    Scored,
    ScoreReply,
    Standing,
    TakeTurn,
    TaskRow,
    TaskRows,
)

logger = logging.getLogger(__name__)

METADATA_KEY = "verifiers"
RENDERER = "renderer"
"""Option of a taskset that is none of its configuration."""
LOAD_S = 600.0
"""Starting the process, and loading a taskset's data or reading a block of it, may take so long each."""
_BLOCK = 256
PROCESS = TasksetProcess()
"""Shared by all tasksets of this process: importing verifiers takes seconds, and 230 MB."""


class TaskOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a prompt's metadata holds under `verifiers`: where its task is from, and all of its data.

    `rendering`: how its play becomes token ids; None where a reply is all it takes.
    """

    taskset: str
    options: dict[str, Any] = {}
    task: dict[str, Any]
    needs: list[str] = []
    rendering: Rendering | None = None


class Tasks:
    """The tasks of one taskset as rows of prompts, read in blocks.

    `options` are fields of its configuration, and `renderer`: what renders its plays for the model in the folder
    `tokenizer`, a name or a configuration of the package `renderers`. Raises `Invalid` where it cannot be loaded or
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
            detail = f"taskset {taskset} has the option {RENDERER}, and its tasks are not played"
            raise Invalid(detail, name=RENDERER, value=options[RENDERER])

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
            ask = ReadTasks(
                taskset=self._taskset, options=self._options, first=number, count=_BLOCK, rendering=self._rendering
            )
            self._block = PROCESS.ask_now(ask, TaskRows, LOAD_S).rows
            self._first = number
        return self._block[number - self._first] if self._block else None

    def _row(self, number: int, row: TaskRow) -> dict[str, Any]:
        if not row.messages:
            raise refused(self._where(number), "has no prompt: its user opens, and there is none here")
        task = TaskOf(
            taskset=self._taskset, options=self._options, task=row.task, needs=row.needs, rendering=self._rendering
        )
        opening = {"messages": row.messages} if row.prompt_ids is None else {"prompt_ids": row.prompt_ids}
        return opening | {
            "prompt_id": f"{self._taskset}/{row.task_id}",
            "answer": row.answer,
            "metadata": {METADATA_KEY: msgspec.to_builtins(task)},
        }

    def _where(self, number: int) -> str:
        return f"prompts {TASKSET}{self._taskset}, row {number + 1}"


class Verifiers:
    """Scores by the rewards of a prompt's taskset: sum(weight x score), parts by the names of rewards and metrics.

    Takes prompts from `verifiers:TASKSET`. `takes_turns`: one of those checked so far is played in turns; then all are
    rollouts of an episode, which for a task of one reply is over after that.
    """

    def __init__(self) -> None:
        self.takes_turns = False
        self._taken: set[bytes] = set()
        self._lock = threading.Lock()

    def check(self, prompt: Prompt) -> None:
        """Raise `Invalid` for a prompt from elsewhere, or whose task needs what is not here; `MissingExtra`."""
        if METADATA_KEY not in prompt.metadata:
            raise Invalid(f"has no metadata.{METADATA_KEY}; it takes prompts from {TASKSET}TASKSET", name="metadata")
        task = task_of(prompt)
        if task.needs:
            raise Invalid(f"its task has {', '.join(task.needs)}; there is no container here", name=METADATA_KEY)
        key = msgspec.json.encode((task.taskset, task.options), order="deterministic")
        with self._lock:
            if key not in self._taken:
                self._check_taskset(task)
                self._taken.add(key)
        self.takes_turns = self.takes_turns or task.rendering is not None

    def _check_taskset(self, task: TaskOf) -> None:
        described = PROCESS.ask_now(Describe(taskset=task.taskset, options=task.options), Described, LOAD_S)
        unfit = described.unfit
        if unfit is None and described.plays is not None and task.rendering is None:
            unfit = f"{described.plays}, and its prompts are not rendered for a play"
        if unfit is not None:
            detail = f"taskset {task.taskset} {unfit}; the environment verifiers does without"
            raise Invalid(detail, name="taskset", value=task.taskset)

    def start(self, prompt: Prompt) -> Episode:
        """Begin a rollout: a play, or one reply."""
        task = task_of(prompt)
        return Reply(self, prompt) if task.rendering is None else Play(prompt, task, task.rendering)

    async def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Have the taskset score the reply. Raises `RewardFault`."""
        task = task_of(prompt)
        ask = ScoreReply(taskset=task.taskset, options=task.options, task=task.task, reply=completion_text)
        try:
            scored = await PROCESS.ask(ask, Scored)
        except (Invalid, TasksetRaised) as error:
            raise reward_raised(prompt, error) from error
        return score_by(scored)


class Reply:
    """The episode of a task that takes one reply."""

    def __init__(self, environment: Verifiers, prompt: Prompt) -> None:
        self._environment = environment
        self._prompt = prompt
        self._text = ""

    async def step(self, turn: Turn) -> None:
        """End with the first turn."""
        self._text = turn.text

    cut_off = step

    async def score(self) -> Score:
        """Have the taskset score it. Raises `RewardFault`."""
        return await self._environment.score(self._prompt, self._text)


class Play:
    """The episode of a task that is played. It begins with the first turn."""

    def __init__(self, prompt: Prompt, task: TaskOf, rendering: Rendering) -> None:
        self._prompt = prompt
        self._name = uuid.uuid4().hex
        self._begin = BeginPlay(
            taskset=task.taskset,
            options=task.options,
            play=self._name,
            task=task.task,
            rendering=rendering,
            prompt_ids=prompt.token_ids.tolist(),
        )
        self._standing: Standing | None = None

    async def step(self, turn: Turn) -> list[int] | None:
        """Give it a turn. Raises `RewardFault`, `environment_rewritten` where it does not go on from there."""
        return await self._take(TakeTurn(play=self._name, token_ids=turn.token_ids))

    async def cut_off(self, turn: Turn) -> None:
        """Give it its last turn."""
        await self._take(TakeTurn(play=self._name, token_ids=turn.token_ids, cut_off=True))

    async def score(self) -> Score:
        """Return what it ended with; it ends now where it has not."""
        if self._standing is None or self._standing.scored is None:
            self._standing = await self._asked(EndPlay(play=self._name))
        if self._standing.scored is None:
            raise self._fault("raised", "goes on after its end")
        return score_by(self._standing.scored)

    async def close(self) -> None:
        """Have it forgotten, and cancelled where it goes on."""
        PROCESS.tell(DropPlay(play=self._name))

    async def _take(self, turn: TakeTurn) -> list[int] | None:
        if self._standing is None:
            self._standing = await self._asked(self._begin)
        if self._standing.scored is None:
            self._standing = await self._asked(turn)
        return self._standing.answer if self._standing.scored is None else None

    async def _asked(self, request: Requests) -> Standing:
        try:
            return await PROCESS.ask(request, Standing)
        except PlayRewritten as error:
            raise self._fault("rewritten", error.detail) from error
        except (Invalid, TasksetRaised) as error:
            raise self._fault("raised", f"failed: {error.detail}") from error

    def _fault(self, kind: str, what: str) -> RewardFault:
        return episode_fault("environment", kind, self._prompt, what)


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
    return reward_fault("raised", prompt, f"is not there: {error.detail}")
