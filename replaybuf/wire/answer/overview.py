"""Answers that show runs at a glance: one row per run, the flow of one run, and figures over its steps."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from replaybuf.wire.answer.run_status import Coverage, Reuse
from replaybuf.wire.contract import Answer, WaitingAnswer


class RunRow(Answer, frozen=True, kw_only=True):
    """One run at a glance. Seconds are ages; null = never.

    - `tokens_per_s`, `groups_per_s`, `steps_per_s`: trained tokens, stored groups, acked steps
    - `rewards`: mean reward of the newest steps, oldest first; `staleness`: mean of the newest batch
    - `waiting_s`: since `waiting` has this reason; after a restart of the server at least
    - `idle_s`: since the newest batch or ack; `alarm`: why the share of failed prompts is exceeded
    - `stands_still`: it is running, and `idle_s` is far longer than its steps take
    - `leader`: address of the server that leads it; null = not known
    """

    run: str
    state: str
    paused_reason: str | None
    strategy: str
    step: int
    max_steps: int | None
    published_version: int
    tokens_per_s: float
    groups_per_s: float
    steps_per_s: float
    groups_live: int
    tokens_live: int
    dead_lettered: int
    rewards: list[float]
    staleness: float | None
    waiting: WaitingAnswer | None
    waiting_s: float | None = None
    idle_s: float | None
    trainer_last_seen_s: float | None
    producers_last_seen_s: float | None
    producers_known: int
    producers_gone: int
    alarm: str | None
    stands_still: bool = False
    producers_without_engine: int = 0
    leader: str | None = None


class Overview(Answer, frozen=True, kw_only=True):
    """Every run of this server, by name; `unreadable`: runs that cannot be read, with the error.

    `now_s`: seconds since the epoch on this server, so that a page needs no clock of its own.
    """

    now_s: float
    version: str
    durability: str
    runs: list[RunRow]
    unreadable: dict[str, str]


class VersionCounts(Struct, frozen=True):
    """Groups whose oldest token is of one policy version; `version` null = all older ones together."""

    version: int | None
    live: int
    in_batches: int


class Flow(Answer, frozen=True, kw_only=True):
    """Live numbers of one run, from producers to the published version.

    - `group_s`: mean seconds from ticket to stored group; `step_s`: seconds of a step without its waits
    - `versions`: groups that the buffer holds, newest version first
    - `ledger_entries`: number of the newest ledger record
    - `waited_s`: seconds that trainers waited, by reason, since this server started
    - `step_waited_s`: part of it since the newest ack; `step_dropped`: groups dropped since the newest batch, by reason
    - `stored_s`, `batch_s`, `ack_s`: seconds since the newest one; null = none
    """

    now_s: float
    row: RunRow
    tickets_out: int
    group_s: float
    step_s: float
    versions: list[VersionCounts]
    ledger_entries: int
    waited_s: dict[str, float]
    step_waited_s: dict[str, float] = field(default_factory=dict)
    step_dropped: dict[str, int] = field(default_factory=dict)
    coverage: Coverage | None = None
    reuse: Reuse = Reuse()
    stored_s: float | None
    batch_s: float | None
    ack_s: float | None


_COLUMN = Meta(description="One value per row; null where it is unknown.")
Column = Annotated[list[Any], _COLUMN]


class ShownChange(Struct, frozen=True):
    """A change of configuration or state, or a rewind: its ledger entry, the next unacked step, who, and what.

    `lines`: "name: old → new"; `by`: name of the token, "" without tokens and for changes of the service.
    """

    entry: int
    step: int
    at_s: float
    by: str
    lines: tuple[str, ...]


class History(Answer, frozen=True, kw_only=True):
    """Figures per step as columns of equal length. A row covers `steps` steps from `step` on, with means per step.

    `columns`: `step`, `steps`, `at_s`, `acked_s`, and figures of the batch; `dropped`: groups by reason, per row;
    `waited`: seconds that the trainer waited, by reason, per row; `metrics`: what the trainer reported with its acks,
    by name, per row. Of all steps, `metrics_missing` values were reported as missing, and `metrics_left_out` have no
    column, because a run keeps 128 names.
    `changes`: the newest changes of configuration and state, and rewinds, oldest first.
    """

    now_s: float
    first_step: int | None
    last_step: int | None
    columns: dict[str, Column]
    dropped: dict[str, Column]
    waited: dict[str, Column] = field(default_factory=dict)
    metrics: dict[str, Column] = field(default_factory=dict)
    metrics_missing: int = 0
    metrics_left_out: int = 0
    changes: list[ShownChange]
