"""What the generator asks the process of a taskset, and what it answers."""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import msgspec

LENGTH = struct.Struct("<I")


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """How conversations become token ids: the model folder `tokenizer`, and the renderer's configuration.

    `renderer` is a configuration of the package `renderers`, with its `name`; empty = the one that the model's type and
    chat template tell.
    """

    tokenizer: str
    renderer: dict[str, Any] = {}


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the generator asks; the generator gives the numbers, from 1 on."""

    number: int = 0


class Cancel(Request, frozen=True, kw_only=True, tag=True):
    """Give up the request of this number. It is answered by `Failed` all the same."""


class OfTaskset(Request, frozen=True, kw_only=True, tag=True):
    """A request to a taskset: its id, as verifiers knows it, and the fields of its configuration."""

    taskset: str
    options: dict[str, Any] = {}


class Describe(OfTaskset, frozen=True, kw_only=True, tag=True):
    """Say what a taskset is; answered by `Described`."""


class ReadTasks(OfTaskset, frozen=True, kw_only=True, tag=True):
    """Read the tasks from the place `first` on, `count` at most; answered by `TaskRows`, none at the end.

    With `rendering` the rows hold the token ids a play begins with.
    """

    first: int
    count: int
    rendering: Rendering | None = None


class ScoreReply(OfTaskset, frozen=True, kw_only=True, tag=True):
    """Score one reply to the prompt of a task; `task` as `TaskRow` tells it. Answered by `Scored`."""

    task: dict[str, Any]
    reply: str


class BeginPlay(OfTaskset, frozen=True, kw_only=True, tag=True):
    """Begin a play of a task, up to where it asks for the first turn; answered by `Standing`.

    `play` is a name that the generator gives; `prompt_ids` what the first turn must follow.
    """

    play: str
    task: dict[str, Any]
    rendering: Rendering
    prompt_ids: list[int]


class OfPlay(Request, frozen=True, kw_only=True, tag=True):
    """A request to a play that was begun."""

    play: str


class TakeTurn(OfPlay, frozen=True, kw_only=True, tag=True):
    """Go on with what the policy sampled; answered by `Standing`. `cut_off`: at the token bound."""

    token_ids: list[int]
    cut_off: bool = False


class EndPlay(OfPlay, frozen=True, kw_only=True, tag=True):
    """End a play, which gets no further turn; answered by `Standing` with its scores."""


class DropPlay(OfPlay, frozen=True, kw_only=True, tag=True):
    """Forget a play, and cancel it where it has not ended. Answered by `Dropped` at once."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first answer: verifiers of this version is there."""

    number: int = 0
    version: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why there is no answer.

    `reason`: `missing` (no verifiers), `invalid` (the request), `raised`, `cancelled`, `rewritten` (a play asked for a
    turn after other tokens than it had).
    """

    number: int
    reason: str
    detail: str


class Described(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`infinite`: its tasks never end.

    `plays`: why its tasks take more than a reply, None where a reply is all. `unfit`: why neither will do, None where
    one does.
    """

    number: int
    infinite: bool
    plays: str | None
    unfit: str | None


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One task.

    `task_id` is its own id, its own key or the hash of its data; `messages` as a chat template takes them, none where a
    user opens; `prompt_ids` the same as a play begins with them, where they were asked for; `answer` of its data where
    that is text or a number; `task` all of its data; `needs` what it asks for that is not there.
    """

    task_id: str
    messages: list[dict[str, Any]]
    prompt_ids: list[int] | None = None
    answer: str | int | float | None
    task: dict[str, Any]
    needs: list[str]


class TaskRows(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rows of consecutive tasks."""

    number: int
    rows: list[TaskRow]


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`reward` is sum(weight x score) of the taskset's rewards; `rewards` the scores; `metrics` count for nothing."""

    number: int = 0
    reward: float
    rewards: dict[str, float]
    metrics: dict[str, float]


class Standing(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where a play stands: it asks for a turn after `answer`, which follows the last one; or it ended, `scored`.

    `answer` is empty where it asks for its first turn.
    """

    number: int
    answer: list[int] = []
    scored: Scored | None = None


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A play is gone, or was never there."""

    number: int


TasksetRequests: TypeAlias = Describe | ReadTasks | ScoreReply | BeginPlay
PlayRequests: TypeAlias = TakeTurn | EndPlay | DropPlay
Work: TypeAlias = TasksetRequests | PlayRequests
Requests: TypeAlias = Cancel | Work
Answer: TypeAlias = Ready | Failed | Described | TaskRows | Scored | Standing | Dropped


def framed(message: Requests | Answer) -> bytes:
    """Encode a message behind its length."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
