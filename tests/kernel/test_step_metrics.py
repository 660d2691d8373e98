"""Metrics that a trainer reports with its acks: what a run keeps of them, step by step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.kernel.figures.step_figures import MOST_NAMES, StepMetrics, mean_per_step, merge_metrics
from replaybuf.kernel.state.snapshot import decode_snapshot, encode_snapshot, take
from replaybuf.wire.ledger import AckRecord
from tests.kernel.test_state import Run

Reported = dict[str, float | None]
REPORTED = st.dictionaries(st.sampled_from("abcdef"), st.none() | st.floats(-1e6, 1e6), max_size=4)


@given(st.lists(REPORTED, max_size=12))
def test_every_number_is_found_again_by_its_name_and_step(steps: list[Reported]) -> None:
    metrics = StepMetrics()
    columns = metrics.columns([metrics.pack(reported) for reported in steps])
    kept = [{name: value for name, value in reported.items() if value is not None} for reported in steps]
    assert [
        {name: column[place] for name, column in columns.items() if column[place] is not None}
        for place in range(len(steps))
    ] == kept
    assert metrics.missing == sum(value is None for reported in steps for value in reported.values())
    assert set(columns) == {name for reported in kept for name in reported}


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(allow_nan=False, allow_infinity=False)), min_size=1))
def test_a_mean_is_between_its_values_and_equal_values_are_their_mean(values: list[tuple[int, float]]) -> None:
    """To the last bit for equal ones, and finite for the largest floats."""
    numbers = [number for _, number in values]
    slack = 1e-9 * max(abs(number) for number in numbers)
    assert min(numbers) - slack <= mean_per_step(values) <= max(numbers) + slack
    same = [(steps, numbers[0]) for steps, _ in values]
    assert mean_per_step(same) == numbers[0]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_no_number_counts_as_missing_before_and_after_a_restart(value: float | None) -> None:
    """A live ack may bring NaN; the ledger, which a restart reads, has null in its place."""
    metrics = StepMetrics()
    row = metrics.pack({"loss": value, "kl": 1.0})
    assert (metrics.names, metrics.missing, metrics.columns([row])) == (["kl"], 1, {"kl": [1.0]})


def test_names_beyond_the_bound_are_left_out_and_counted() -> None:
    """A trainer with other names in each step; those that came first stay."""
    metrics = StepMetrics()
    rows = [metrics.pack({f"{step}/{number}": 1.0 for number in range(64)}) for step in range(4)]
    assert len(metrics.names) == MOST_NAMES == len(metrics.columns(rows))
    assert metrics.left_out == 4 * 64 - MOST_NAMES
    assert metrics.columns([metrics.pack({"0/0": 3.0})]) == {"0/0": [3.0]}


def test_merged_rows_have_means_per_step_of_the_known_values() -> None:
    """A row of three steps weighs three times as much; a name without a value in either stays missing."""
    metrics = StepMetrics()
    first, second = metrics.pack({"loss": 1.0, "kl": 0.5}), metrics.pack({"loss": 5.0, "new": 2.0})
    assert metrics.columns([merge_metrics([(3, first), (1, second)])]) == {"loss": [2.0], "kl": [0.5], "new": [2.0]}
    empty = metrics.pack({"loss": None})
    assert all(map(math.isnan, memoryview(merge_metrics([(1, empty), (1, b"")])).cast("d")))


def test_a_step_has_the_metrics_of_its_newest_ack() -> None:
    """A redelivered step is trained again; a resampled one starts anew."""
    run = Run()
    run.store(0, 0)
    run.batch(1)
    run.apply(AckRecord(step=0, epoch=1, metrics={"loss": 1.0, "kl": None}))
    run.batch(2)
    run.apply(AckRecord(step=1, epoch=1))
    run.rewind(0, "redeliver")
    run.apply(AckRecord(step=0, epoch=2, metrics={"loss": 0.5}))
    figures = run.state.figures
    assert figures.metrics.columns([row.metrics for row in figures.rows]) == {"loss": [0.5, None]}
    run.rewind(0, "resample")
    assert figures.rows == []


def test_a_snapshot_keeps_the_metrics() -> None:
    run = Run()
    run.store(0)
    run.batch(1)
    run.apply(AckRecord(step=0, epoch=1, metrics={"loss": 0.1, "kl": None}))
    figures = decode_snapshot(encode_snapshot(take(run.state))).figures
    assert figures == run.state.figures
    assert (figures.metrics.names, figures.metrics.missing) == (["loss"], 1)


@pytest.mark.parametrize("steps", [1, 4])
def test_an_ack_of_a_merged_row_leaves_its_mean(steps: int) -> None:
    """The row of an old step covers several; the ack of one of them is no mean of all."""
    run = Run()
    run.store(0)
    run.batch(1)
    run.apply(AckRecord(step=0, epoch=1, metrics={"loss": 1.0}))
    run.state.figures.rows[0].steps = steps
    run.apply(AckRecord(step=0, epoch=1, metrics={"loss": 9.0}))
    figures = run.state.figures
    assert figures.metrics.columns([figures.rows[0].metrics]) == {"loss": [9.0 if steps == 1 else 1.0]}


def test_what_most_people_look_for_comes_first_and_the_rest_by_name() -> None:
    metrics = StepMetrics()
    row = metrics.pack({"zeta": 1.0, "entropy": 2.0, "alpha": 3.0, "loss": 4.0})
    assert list(metrics.columns([row])) == ["loss", "entropy", "alpha", "zeta"]
