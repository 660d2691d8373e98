"""Figures per step: what a batch trained on, how they are merged, and what a rewind takes back."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest

from replaybuf.kernel.figures import step_figures
from replaybuf.kernel.figures.events import MOST_CHANGES
from replaybuf.kernel.figures.step_figures import StepFigures, StepRow, merge, stands_still
from replaybuf.kernel.state.snapshot import MAGIC, decode_snapshot, encode_snapshot, take
from replaybuf.wire.config import BatchSpec, Limits, RunConfig, recorded
from replaybuf.wire.ledger import AckRecord, ConfigRecord, DeadLetterRecord
from tests.builders import batch_entry, batch_record, entries
from tests.kernel.test_state import Run

HEADER_BYTES = len(MAGIC) + 20


def stored(run: Run, *groups: Mapping[str, float]) -> None:
    """Store groups with these values of their index entries."""
    first = run.state.stored + 1
    run.state.store(np.arange(first, first + len(groups)), entries(*groups))


def batch(run: Run, *numbers: int, at_s: float, index_end: int = 0) -> None:
    """Put groups into the batch of the next step; `index_end`: newest group then, 0 = all that are stored."""
    state = run.state
    record = batch_record(state.next_step, [batch_entry(n) for n in numbers], generation=state.generation)
    run.apply(msgspec.structs.replace(record, at_s=at_s, index_end=index_end or state.stored))


def test_a_row_has_the_figures_of_the_groups_of_its_batch() -> None:
    """Two groups; the third is stored after the batch and is no part of `tokens_in`."""
    run = Run()
    stored(
        run,
        {"arrival_s": 10.0, "reward_mean": 0.0, "reward_std": 0.5, "tokens": 10, "longest_tokens": 6},
        {"arrival_s": 14.0, "reward_mean": 1.0, "reward_std": 0.0, "tokens": 30, "longest_tokens": 16},
        {"arrival_s": 99.0, "tokens": 1000},
    )
    run.evict(3, reason="tail")
    batch(run, 1, 2, at_s=20.0, index_end=2)
    run.apply(AckRecord(step=0, epoch=1, at_s=25.0))
    (row,) = run.state.figures.rows
    assert (row.step, row.groups, row.at_s, row.acked_s) == (0, 2, 20.0, 25.0)
    assert (row.reward_mean, row.reward_std, row.reward_min, row.reward_max) == (0.5, 0.25, 0.0, 1.0)
    assert (row.age_s, row.longest, row.tokens_in, row.stored) == (8.0, 16, 40.0, 2)
    assert (row.uses, row.fill, row.dropped) == (1.0, 1.0, {"tail": 1})


def test_a_group_that_a_batch_used_is_not_dropped() -> None:
    """Replay evicts it when it is too stale for its next use. A dead letter is dropped once."""
    run = Run(max_uses=4)
    stored(run, *({"tokens": 10},) * 3)
    run.train(1)
    run.evict(1, 2, reason="too_stale")
    run.apply(DeadLetterRecord(numbers={"missing_payload": [2, 3]}))
    stored(run, {"tokens": 10})
    batch(run, 4, at_s=20.0)
    assert run.state.figures.rows[-1].dropped == {"too_stale": 1, "missing_payload": 1}


def test_a_batch_counts_the_groups_that_were_stored_when_it_was_decided() -> None:
    """Arrivals by the clock of another server change nothing; a freed group never counts, because its row may go."""
    run = Run()
    stored(run, {"arrival_s": 90.0, "tokens": 10}, {"arrival_s": 14.0, "tokens": 30}, {"arrival_s": 1.0, "tokens": 500})
    batch(run, 1, at_s=20.0, index_end=2)
    run.apply(AckRecord(step=0, epoch=1))
    run.evict(3, reason="tail")
    run.checkpoint(1)
    stored(run, {"arrival_s": 30.0, "tokens": 70})
    batch(run, 4, at_s=40.0, index_end=4)
    assert [(row.tokens_in, row.stored) for row in run.state.figures.rows] == [(40.0, 2), (70.0, 4)]


def test_staleness_is_that_of_the_step() -> None:
    """Groups of version 0 in the third batch."""
    run = Run()
    stored(run, *({"policy_version": version, "policy_version_max": version} for version in (0, 0, 0, 1)))
    run.train(1)
    run.train(2)
    run.batch(3, 4)
    assert [(row.staleness, row.staleness_max) for row in run.state.figures.rows] == [(0, 0), (1, 1), (1.5, 2)]


def test_a_resample_takes_rows_back_and_a_redelivery_keeps_them() -> None:
    """Rows of voided batches go, and come again with the new batches."""
    run = Run()
    run.store(0, 0, 0)
    for number in (1, 2):
        run.train(number)
    run.rewind(1, "redeliver")
    assert [row.step for row in run.state.figures.rows] == [0, 1]
    run.rewind(1, "resample")
    assert [row.step for row in run.state.figures.rows] == [0]
    run.batch(3)
    assert [row.step for row in run.state.figures.rows] == [0, 1]


@pytest.mark.parametrize("trained", [17, 100, 130, 1000])
def test_rows_are_bounded_and_show_the_whole_run(monkeypatch: pytest.MonkeyPatch, trained: int) -> None:
    """With at most 16 rows the newest 8 keep every step; the older ones cover as many steps each, without a gap."""
    monkeypatch.setattr(step_figures, "MOST_ROWS", 16)
    run = Run(max_uses=None)
    run.store(0)
    for _ in range(trained):
        run.train(1)
    rows = run.state.figures.rows
    assert len(rows) <= 16
    assert [row.step for row in rows[1:]] == [row.last + 1 for row in rows[:-1]]
    assert (rows[0].step, rows[-1].last) == (0, trained - 1)
    assert all(row.steps == 1 for row in rows[-8:])
    assert max(row.steps for row in rows) <= trained / 2, "a run of any length has a curve"


def test_waits_count_for_the_step_that_was_acked_after_them() -> None:
    """A redelivered step adds the waits of its second time; another step has its own."""
    run = Run()
    run.store(0, 0)
    run.batch(1)
    run.apply(AckRecord(step=0, epoch=1, waited_s={"no_groups": 2.0, "too_few_groups": 0.5}))
    run.batch(2)
    run.apply(AckRecord(step=1, epoch=1))
    run.rewind(0, "redeliver")
    run.apply(AckRecord(step=0, epoch=2, waited_s={"too_few_groups": 1.0}))
    assert [row.waited for row in run.state.figures.rows] == [{"no_groups": 2.0, "too_few_groups": 1.5}, {}]


def test_groups_of_a_lost_version_count_as_dropped() -> None:
    """A rewind evicts them without a record of its own."""
    run = Run()
    run.store(0, 0, 1)
    run.train(1)
    run.rewind(0, "resample")
    assert run.state.figures.pending == {"lost_lineage": 1}


def test_merged_rows_have_means_extremes_and_sums() -> None:
    """A row of three steps weighs three times as much as a row of one."""
    first = StepRow(
        step=0, steps=3, reward_mean=1.0, reward_min=0.5, reward_max=1.0, dropped={"a": 1}, waited={"w": 1.5}
    )
    second = StepRow(step=3, reward_mean=0.0, reward_min=0.0, reward_max=0.75, dropped={"a": 2, "b": 1}, acked_s=9.0)
    second.waited = {"w": 2.0}
    merged = merge([first, second])
    assert (merged.step, merged.steps, merged.last, merged.acked_s) == (0, 4, 3, 9.0)
    assert (merged.reward_mean, merged.reward_min, merged.reward_max) == (0.75, 0.0, 1.0)
    assert (merged.dropped, merged.waited) == ({"a": 3, "b": 1}, {"w": 3.5})


@pytest.mark.parametrize(
    ("first", "last", "points", "expected"),
    [
        (None, None, 100, list(range(10))),
        (3, 6, 100, [3, 4, 5, 6]),
        (None, None, 5, [0, 2, 4, 6, 8]),
        (20, None, 5, []),
        (None, None, 3, [0, 4, 8]),
    ],
)
def test_a_range_is_merged_to_at_most_so_many_points(
    first: int | None, last: int | None, points: int, expected: list[int]
) -> None:
    """All rows, a range, pairs, nothing."""
    figures = StepFigures(rows=[StepRow(step=step) for step in range(10)])
    assert [row.step for row in figures.between(first, last, points)] == expected


def test_rows_of_many_steps_count_as_many() -> None:
    """The points of a chart cover the same number of steps each, also where the rows do not."""
    figures = StepFigures(rows=[StepRow(step=0, steps=90), *(StepRow(step=step) for step in range(90, 100))])
    assert [(row.step, row.steps) for row in figures.between(None, None, 10)] == [(0, 90), (90, 10)]


def test_a_snapshot_keeps_the_rows_and_an_older_one_has_none() -> None:
    """A snapshot of an older release lacks the field."""
    run = Run()
    run.store(0)
    run.train(1)
    raw = encode_snapshot(take(run.state))
    assert decode_snapshot(raw).figures == run.state.figures
    fields = msgspec.msgpack.decode(zlib.decompress(raw[HEADER_BYTES:]))
    del fields["figures"]
    older = raw[:HEADER_BYTES] + zlib.compress(msgspec.msgpack.encode(fields))
    assert decode_snapshot(older).figures == StepFigures()


def test_changes_are_bounded_and_outlive_a_snapshot() -> None:
    """The newest stay, and long values are cut."""
    run = Run()
    for number in range(MOST_CHANGES + 5):
        limits = Limits(max_tokens_live=number + 1)
        run.apply(
            ConfigRecord(config=recorded(RunConfig(batch=BatchSpec(groups_per_batch=1), limits=limits)), max_uses=1)
        )
    changes = run.state.figures.changes
    assert len(changes.newest) == MOST_CHANGES
    assert changes.newest[-1].lines == (f"limits.max_tokens_live: {number} → {number + 1}",)
    assert changes.revision == run.state.entries
    kept = decode_snapshot(encode_snapshot(take(run.state))).figures.changes
    assert (kept.revision, kept.newest) == (changes.revision, changes.newest)


@pytest.mark.parametrize(
    ("idle_s", "acked_s", "expected"),
    [
        (None, [], False),
        (29.0, [1.0, 1.1, 1.2], False),
        (31.0, [1.0, 1.1, 1.2], True),
        (590.0, [100.0, 160.0, 220.0], False),
        (610.0, [100.0, 160.0, 220.0], True),
        (290.0, [100.0, 0.0], False),
        (310.0, [100.0, 0.0], True),
    ],
)
def test_a_run_stands_still_after_ten_steps_without_one(
    idle_s: float | None, acked_s: list[float], expected: bool
) -> None:
    """Fast runs after 30 s; slow ones later, so that a long step is no alarm."""
    assert stands_still(idle_s, [StepRow(step, acked_s=at_s) for step, at_s in enumerate(acked_s)]) is expected
