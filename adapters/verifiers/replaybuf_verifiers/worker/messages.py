"""Requests to the process of a taskset, its answers, and the errors that requests raise there."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """How conversations become token ids: the model folder `tokenizer`, and the renderer's configuration.

    `renderer` is a configuration of the package `renderers`, with its `name`. Empty: chosen by the model's type.
    """

    tokenizer: str
    renderer: dict[str, Any] = {}


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cancel the request with this number, which is then answered by `Failed`; has no answer itself."""

    number: int


class TasksetRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request to a taskset: its verifiers id, and the fields of its configuration."""

    taskset: str
    options: dict[str, Any] = {}


class Describe(TasksetRequest, frozen=True, kw_only=True, tag=True):
    """Describe a taskset; answered by `Described`."""


class ReadTasks(TasksetRequest, frozen=True, kw_only=True, tag=True):
    """Read at most `count` tasks from the place `first`; answered by `TaskRows`, empty at the end.

    With `rendering` the rows hold the token ids that a play begins with.
    """

    first: int
    count: int
    rendering: Rendering | None = None


class ScoreReply(TasksetRequest, frozen=True, kw_only=True, tag=True):
    """Score one reply to the prompt of a task; `task` as in `TaskRow`. Answered by `Scored`."""

    task: dict[str, Any]
    reply: str


class BeginPlay(TasksetRequest, frozen=True, kw_only=True, tag=True):
    """Begin a play of a task, up to its request for the first turn; answered by `PlayState`.

    `play` is a name that the generator chooses; the first turn follows `prompt_ids`.
    """

    play: str
    task: dict[str, Any]
    rendering: Rendering
    prompt_ids: list[int]


class TakeTurn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Continue a play with a sampled turn; answered by `PlayState`. `cut_off`: at the token bound."""

    play: str
    token_ids: list[int]
    cut_off: bool = False


class EndPlay(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a play, which gets no further turn; answered by `PlayState` with its scores."""

    play: str


class DropPlay(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cancel a play if it goes on, and forget it; has no answer."""

    play: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first answer: this version of verifiers is installed."""

    version: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request without a result.

    `reason`: `missing` (no verifiers), `invalid` (the request), `raised`, `cancelled` or `rewritten` (`Rewritten`).
    `traceback` of what the taskset raised.
    """

    reason: str
    detail: str
    traceback: str = ""


class Described(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Properties of a taskset. `infinite`: its tasks never end.

    `plays`: why its tasks take more than one reply, or None. `unfit`: why they can be neither replied to nor played,
    or None.
    """

    infinite: bool
    plays: str | None
    unfit: str | None


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One task.

    - `task_id`: its own id, its own key or the hash of its data
    - `messages`: as a chat template takes them; empty if its user opens
    - `prompt_ids`: the same as a play begins with them, with `rendering`
    - `answer`: of its data, if that is text or a number
    - `task`: all its data; `needs`: what it requires and cannot have here
    """

    task_id: str
    messages: list[dict[str, Any]]
    prompt_ids: list[int] | None = None
    answer: str | int | float | None
    task: dict[str, Any]
    needs: list[str]


class TaskRows(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rows of consecutive tasks."""

    rows: list[TaskRow]


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Scores: `reward` = sum(weight x score) of `rewards`; `metrics` do not count."""

    reward: float
    rewards: dict[str, float]
    metrics: dict[str, float]


class PlayState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """State of a play: it asks for a turn after `answer`, which follows the last turn, or it ended with `scored`.

    `answer` is empty before the first turn.
    """

    answer: list[int] = []
    scored: Scored | None = None


Request: TypeAlias = Describe | ReadTasks | ScoreReply | BeginPlay | TakeTurn | EndPlay
Command: TypeAlias = Cancel | DropPlay
Answer: TypeAlias = Ready | Failed | Described | TaskRows | Scored | PlayState


class Unfit(Exception):
    """The taskset cannot answer the request."""


class Rewritten(Exception):
    """A play asked for a turn after tokens that do not extend its earlier tokens."""


class PlayFailed(Exception):
    """A play ended without scores: verifiers, or code of the taskset, failed."""


def described(error: BaseException) -> str:
    """Return type and text of an error."""
    return f"{type(error).__name__}: {error}"
