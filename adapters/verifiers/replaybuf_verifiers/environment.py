"""The environment `verifiers`: rewards of tasksets of verifiers (0.4, `verifiers.v1`).

Completions come from the generator's engines, as for any prompt. A separate process, which has verifiers, scores the
replies. Tasks that take more than one reply are played there, in turns that the engines sample.
"""

from __future__ import annotations

import threading
import uuid

import msgspec

from replaybuf.environment import Episode, Prompt, Score, Turn, episode_fault, reward_fault
from replaybuf.errors import Invalid, RewardFault
from replaybuf_verifiers.process import PROCESS, PlayRewritten, TasksetRaised
from replaybuf_verifiers.tasks import LOAD_S, METADATA_KEY, TaskData, task_of
from replaybuf_verifiers.worker.messages import (
    BeginPlay,
    Describe,
    Described,
    DropPlay,
    EndPlay,
    PlayState,
    Rendering,
    Request,
    Scored,
    ScoreReply,
    TakeTurn,
)


class Verifiers:
    """Scores with the rewards of a prompt's taskset: sum(weight x score), parts by the names of rewards and metrics.

    Accepts prompts from `verifiers:TASKSET`. `takes_turns` becomes True when `check` sees a task that is played. Then
    every rollout is an episode; that of a task with one reply ends after the first turn.
    """

    def __init__(self) -> None:
        self.takes_turns = False
        self._checked: set[bytes] = set()
        self._lock = threading.Lock()

    def check(self, prompt: Prompt) -> None:
        """Raise `Invalid` for prompts of other sources and for tasks that cannot run here; `MissingExtra`."""
        if METADATA_KEY not in prompt.metadata:
            detail = f"has no metadata.{METADATA_KEY}; verifiers needs prompts from verifiers:TASKSET"
            raise Invalid(detail, name="metadata")
        task = task_of(prompt)
        if task.needs:
            raise Invalid(f"its task has {', '.join(task.needs)}, which needs a container", name=METADATA_KEY)
        key = msgspec.json.encode((task.taskset, task.options), order="deterministic")
        with self._lock:
            if key not in self._checked:
                _check_taskset(task)
                self._checked.add(key)
        self.takes_turns = self.takes_turns or task.rendering is not None

    def start(self, prompt: Prompt) -> Episode:
        """Start a rollout: a play, or one reply."""
        task = task_of(prompt)
        return Reply(self, prompt) if task.rendering is None else Play(prompt, task, task.rendering)

    async def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Score a reply with the taskset. Raises `RewardFault`."""
        task = task_of(prompt)
        request = ScoreReply(taskset=task.taskset, options=task.options, task=task.task, reply=completion_text)
        try:
            return _score(await PROCESS.ask(request, Scored))
        except (Invalid, TasksetRaised) as error:
            raise reward_fault("raised", prompt, f"failed: {error.detail}") from error


class Reply:
    """The episode of a task with one reply."""

    def __init__(self, environment: Verifiers, prompt: Prompt) -> None:
        self._environment = environment
        self._prompt = prompt
        self._text = ""

    async def step(self, turn: Turn) -> None:
        """End with the first turn."""
        self._text = turn.text

    cut_off = step

    async def score(self) -> Score:
        """Score the reply with the taskset. Raises `RewardFault`."""
        return await self._environment.score(self._prompt, self._text)


class Play:
    """The episode of a task that is played. The play starts with the first turn."""

    def __init__(self, prompt: Prompt, task: TaskData, rendering: Rendering) -> None:
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
        self._state: PlayState | None = None

    async def step(self, turn: Turn) -> list[int] | None:
        """Send a turn. Raises `RewardFault`, `environment_rewritten` if the play changed tokens before it."""
        return await self._take(TakeTurn(play=self._name, token_ids=turn.token_ids))

    async def cut_off(self, turn: Turn) -> None:
        """Send the last turn."""
        await self._take(TakeTurn(play=self._name, token_ids=turn.token_ids, cut_off=True))

    async def score(self) -> Score:
        """Return the scores of the play, after ending it."""
        if self._state is None or self._state.scored is None:
            self._state = await self._ask(EndPlay(play=self._name))
        if self._state.scored is None:
            raise self._fault("raised", "goes on after its end")
        return _score(self._state.scored)

    async def close(self) -> None:
        """Cancel the play if it goes on, and forget it."""
        PROCESS.post(DropPlay(play=self._name))

    async def _take(self, turn: TakeTurn) -> list[int] | None:
        if self._state is None:
            self._state = await self._ask(self._begin)
        if self._state.scored is None:
            self._state = await self._ask(turn)
        return self._state.answer if self._state.scored is None else None

    async def _ask(self, request: Request) -> PlayState:
        try:
            return await PROCESS.ask(request, PlayState)
        except PlayRewritten as error:
            raise self._fault("rewritten", error.detail) from error
        except (Invalid, TasksetRaised) as error:
            raise self._fault("raised", f"failed: {error.detail}") from error

    def _fault(self, kind: str, what: str) -> RewardFault:
        return episode_fault("environment", kind, self._prompt, what)


def _check_taskset(task: TaskData) -> None:
    described = PROCESS.ask_now(Describe(taskset=task.taskset, options=task.options), Described, LOAD_S)
    unfit = described.unfit
    if unfit is None and described.plays is not None and task.rendering is None:
        unfit = f"{described.plays}, and its prompts are not rendered for a play"
    if unfit is not None:
        detail = f"taskset {task.taskset} {unfit}; the environment verifiers does not support that"
        raise Invalid(detail, name="taskset", value=task.taskset)


def _score(scored: Scored) -> Score:
    metrics = {f"metrics.{name}": value for name, value in scored.metrics.items()}
    return Score(scored.reward, scored.rewards | metrics)
