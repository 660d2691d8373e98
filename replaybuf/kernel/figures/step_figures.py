"""Figures per step for people: reward, staleness, reuse, lengths, ages and drops of each batch, folded from the ledger.

No decision reads them. Memory is bounded: beyond `MOST_ROWS` rows, the older half is merged to rows that cover the same
number of steps each, so the whole run stays visible and its newest part keeps every step.
"""

from __future__ import annotations

import functools
import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.kernel.figures.events import Changes, Milestones
from replaybuf.kernel.figures.histograms import add_up
from replaybuf.kernel.rows.index import FREED, Index
from replaybuf.wire.ledger import AckRecord, AnyRecord, BatchRecord, CheckpointRecord, PolicyRecord, RewindRecord

MOST_NAMES = 128
"""Names of a run, over all its steps; an ack brings at most 64."""
FIRST = ("loss", "kl", "ref_kl", "entropy", "grad_norm", "mismatch", "clip_fraction", "learning_rate")
"""The metrics that most people look for."""
_MISSING = math.nan
STILL_STEPS = 10
STILL_S = 30.0
STILL_UNKNOWN_S = 300.0
"""A run may be idle for so long, and for `STILL_STEPS`, before it stands still; without two acked steps for longer."""
MOST_ROWS = 4096
"""About 0.7 MB in memory and 0.4 MB in a snapshot."""
_Integers = npt.NDArray[np.int64]
_MEANS = (
    "groups",
    "rollouts",
    "tokens",
    "tokens_in",
    "reward_mean",
    "reward_std",
    "staleness",
    "uses",
    "age_s",
    "fill",
)


class StepMetrics(msgspec.Struct):
    """Names of metrics that the trainer reports with its acks, in the order of coming, and what could not be kept.

    A row holds one float64 for each name, packed: 4,096 rows of 64 names take 2 MiB, as dicts they would take 30.
    `missing`: values that are null, NaN or infinite; `left_out`: values of names beyond `MOST_NAMES`.
    """

    names: list[str] = []
    missing: int = 0
    left_out: int = 0

    def pack(self, reported: Mapping[str, float | None]) -> bytes:
        """Pack the metrics of one step, float64 by place of their names; new names are added."""
        values = array("d", [_MISSING]) * (len(self.names) if reported else 0)
        for name, value in reported.items():
            # The ledger has null for NaN and infinities: a fold after a restart must count them alike.
            if value is None or not math.isfinite(value):
                self.missing += 1
            elif name in self.names:
                values[self.names.index(name)] = value
            elif len(self.names) < MOST_NAMES:
                self.names.append(name)
                values.append(value)
            else:
                self.left_out += 1
        return values.tobytes()

    def columns(self, rows: Sequence[bytes]) -> dict[str, list[float | None]]:
        """Return one column per name that has a value in `rows`, which are packed; None = missing.

        `FIRST` comes first, then the others by name.
        """
        by_name = dict(zip(self.names, zip_longest(*map(unpack, rows), fillvalue=_MISSING), strict=False))
        return {
            name: [None if math.isnan(value) else value for value in by_name[name]]
            for name in (*(name for name in FIRST if name in by_name), *sorted(by_name.keys() - {*FIRST}))
            if not all(map(math.isnan, by_name[name]))
        }


def unpack(row: bytes) -> array[float]:
    """Return the values of a packed row, by place of their names."""
    return array("d", row)


def merge_metrics(rows: Sequence[tuple[int, bytes]]) -> bytes:
    """Merge packed rows of so many steps each: means per step over the rows that have a value."""
    steps = [number for number, _ in rows]
    merged = array("d")
    for values in zip_longest(*(unpack(row) for _, row in rows), fillvalue=_MISSING):
        known = [(number, value) for number, value in zip(steps, values, strict=True) if not math.isnan(value)]
        merged.append(mean_per_step(known) if known else _MISSING)
    return merged.tobytes()


def mean_per_step(values: Sequence[tuple[int, float]]) -> float:
    """Return the mean of values, each of so many steps. It is exact for equal values: their chart is one number."""
    steps, first = sum(number for number, _ in values), values[0][1]
    if all(value == first for _, value in values):
        return first
    return sum(value * (number / steps) for number, value in values)  # a sum of products may be infinite


class StepRow(msgspec.Struct, array_like=True, gc=False):
    """Figures of the batch of `step`, or means per step over `steps` merged steps.

    - `at_s`, `acked_s`: seconds since the epoch of the newest batch and ack; 0 = no ack
    - `groups`, `rollouts`, `tokens` of the batch; `tokens_in`: tokens stored since the batch before
    - `reward_mean`, `reward_std`: means over its groups; `reward_min`, `reward_max`: of the groups' means
    - `staleness`, `uses`, `age_s`: means over its groups; `age_s` from stored to batch
    - `longest`: tokens of the longest rollout; `fill`: share of the budget
    - `stored`: number of the newest group stored before it; `dropped`: groups since the batch before, by reason
    - `waited`: seconds that the trainer waited from the ack before to its own ack, by reason
    - `metrics`: what the trainer reported with its ack, packed by `StepMetrics`
    """

    step: int
    steps: int = 1
    at_s: float = 0.0
    acked_s: float = 0.0
    groups: float = 0.0
    rollouts: float = 0.0
    tokens: float = 0.0
    tokens_in: float = 0.0
    reward_mean: float = 0.0
    reward_std: float = 0.0
    reward_min: float = 0.0
    reward_max: float = 0.0
    staleness: float = 0.0
    staleness_max: int = 0
    uses: float = 0.0
    age_s: float = 0.0
    longest: int = 0
    fill: float = 1.0
    stored: int = 0
    dropped: dict[str, int] = {}
    waited: dict[str, float] = {}
    metrics: bytes = b""

    @property
    def last(self) -> int:
        """The last step of the row."""
        return self.step + self.steps - 1


class StepFigures(msgspec.Struct):
    """Rows by ascending step, the groups dropped since the newest batch, by reason, and the newest changes.

    `newest_s`: time of the newest ledger record; `moments` for the life of a group; `metrics`: their names.
    """

    rows: list[StepRow] = []
    pending: dict[str, int] = {}
    changes: Changes = msgspec.field(default_factory=Changes)
    newest_s: float = 0.0
    moments: Milestones = msgspec.field(default_factory=Milestones)
    metrics: StepMetrics = msgspec.field(default_factory=StepMetrics)

    def apply(self, record: AnyRecord, *, entry: int, step: int, oldest_step: int) -> None:
        """Fold ledger entry `entry`, except of a batch (`add_batch`); `step` is the next unacked one after it."""
        self.newest_s = record.at_s or self.newest_s
        match record:
            case AckRecord():
                if row := self.row_of(record.step):
                    row.acked_s, row.waited = record.at_s, add_up(row.waited, record.waited_s)
                    if row.steps == 1:  # a mean of several steps stays
                        row.metrics = self.metrics.pack(record.metrics)
            case PolicyRecord():
                self.moments.publish(record, step)
            case CheckpointRecord():
                self.moments.checkpoint(record, oldest_step)
            case RewindRecord():
                self.moments.rewind(record)
                self.changes.add_rewind(entry, record)
                if record.on_resume == "resample":
                    self.rows = [row for row in self.rows if row.last < record.step]

    def row_of(self, step: int) -> StepRow | None:
        """Return the row of a step, which may cover others too."""
        place = bisect_right(self.rows, step, key=lambda row: row.step) - 1
        return self.rows[place] if place >= 0 and step <= self.rows[place].last else None

    def drop(self, reason: str, groups: int) -> None:
        """Count dropped groups."""
        if groups:
            self.pending[reason] = self.pending.get(reason, 0) + groups

    def between(self, first: int | None, last: int | None, points: int) -> list[StepRow]:
        """Return rows with steps from `first` to `last`, merged to at most `points`; None = no bound."""
        rows = [row for row in self.rows if (first is None or row.last >= first) and (last is None or row.step <= last)]
        return rows if len(rows) <= points else _merge_spans(rows, -(-_covered(rows) // points))

    def add_batch(self, record: BatchRecord, index: Index, rows: _Integers, versions: _Integers) -> None:
        """Fold a batch of the groups in `rows` of the index, at these versions of the policy, [groups] each."""
        self.rows = [row for row in self.rows if row.last < record.step] if self._covers(record.step) else self.rows
        made = _row_of(record, index, rows, versions, self.pending)
        if len(rows):
            _add_stored(made, index, self.rows[-1].stored if self.rows else 0, record.index_end)
        self.rows.append(made)
        self.newest_s = record.at_s or self.newest_s
        self.pending = {}
        if len(self.rows) > MOST_ROWS:
            older, newer = self.rows[: -MOST_ROWS // 2], self.rows[-MOST_ROWS // 2 :]
            # Spans are powers of two, so that longer ones are made of whole shorter ones.
            span = 1 << (-(-_covered(older) // (MOST_ROWS // 4)) - 1).bit_length()
            self.rows = _merge_spans(older, span) + newer

    def _covers(self, step: int) -> bool:
        return bool(self.rows) and self.rows[-1].last >= step


def stands_still(idle_s: float | None, rows: Sequence[StepRow]) -> bool:
    """Return whether a run is idle for far longer than its newest steps, `rows`, took; one without a batch never is."""
    acked = [row for row in rows if row.acked_s]
    steps = sum(row.steps for row in acked[1:])
    bound_s = max(STILL_S, STILL_STEPS * (acked[-1].acked_s - acked[0].acked_s) / steps) if steps else STILL_UNKNOWN_S
    return idle_s is not None and idle_s > bound_s


def _covered(rows: Sequence[StepRow]) -> int:
    """Return the number of steps from the first row to the last."""
    return rows[-1].last + 1 - rows[0].step


def _merge_spans(rows: Sequence[StepRow], span: int) -> list[StepRow]:
    """Merge rows that begin in the same `span` steps, counted from the first row."""
    spans = groupby(rows, key=lambda row: (row.step - rows[0].step) // span)
    return [merge(list(members)) for _, members in spans]


def merge(rows: Sequence[StepRow]) -> StepRow:
    """Merge neighbours into one row: means per step, extremes, and sums of drops and waits."""
    if len(rows) == 1:
        return rows[0]
    steps, newest = sum(row.steps for row in rows), rows[-1]
    means = {name: mean_per_step([(row.steps, getattr(row, name)) for row in rows]) for name in _MEANS}
    return StepRow(
        step=rows[0].step,
        steps=steps,
        at_s=newest.at_s,
        acked_s=newest.acked_s,
        reward_min=min(row.reward_min for row in rows),
        reward_max=max(row.reward_max for row in rows),
        staleness_max=max(row.staleness_max for row in rows),
        longest=max(row.longest for row in rows),
        stored=newest.stored,
        dropped=functools.reduce(add_up, [row.dropped for row in rows]),
        waited=functools.reduce(add_up, [row.waited for row in rows]),
        metrics=merge_metrics([(row.steps, row.metrics) for row in rows]),
        **means,
    )


def _row_of(
    record: BatchRecord, index: Index, rows: _Integers, versions: _Integers, dropped: dict[str, int]
) -> StepRow:
    base = StepRow(
        step=record.step,
        at_s=record.at_s,
        groups=len(record.groups),
        rollouts=record.rollouts,
        tokens=record.tokens,
        fill=1.0 if record.fill is None else record.fill,
        dropped=dropped,
    )
    if not len(rows):
        return base
    rewards, staleness = index["reward_mean"][rows], versions - index["policy_version"][rows]
    base.reward_mean, base.reward_std = _mean(rewards), _mean(index["reward_std"][rows])
    base.reward_min, base.reward_max = float(rewards.min()), float(rewards.max())
    base.staleness, base.staleness_max = _mean(staleness), int(staleness.max())
    base.uses, base.longest = _mean(index["times_sampled"][rows]), int(index["longest_tokens"][rows].max())
    if record.at_s:
        base.age_s = max(0.0, record.at_s - _mean(index["arrival_s"][rows]))
    return base


def _add_stored(row: StepRow, index: Index, stored_before: int, index_end: int) -> None:
    """Add what was stored since the batch before, up to group `index_end`: a restart folds the index stream first.

    Freed rows never count, because they may be gone.
    """
    since, until = np.searchsorted(index["number"], (stored_before, index_end), "right").tolist()
    kept = index["state"][since:until] != FREED
    row.tokens_in = float(index["tokens"][since:until].sum(dtype=np.int64, where=kept))
    row.stored = max(stored_before, index_end)


def _mean(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> float:
    return float(values.mean(dtype=np.float64))
