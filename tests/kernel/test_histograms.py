"""Counts of groups and prompts in single cases; `test_state_model.py` compares all of them with a model."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.kernel.figures.histograms import (
    AGE_MS,
    MOST_SOURCES,
    TOKENS,
    UNKNOWN_AGE,
    VERSIONS,
    Histogram,
    ages_ms,
)
from replaybuf.wire.group import hash_name
from replaybuf.wire.ledger import DeadLetterRecord, EvictRecord, FailedPromptRecord
from tests.builders import batch_entry, batch_record, entries
from tests.kernel.test_state import Run


@given(values=st.lists(st.integers(0, 2**31 - 1) | st.sampled_from(TOKENS)), edges=st.sampled_from([TOKENS, AGE_MS]))
def test_a_value_is_counted_in_the_first_bucket_with_an_edge_at_or_above_it(
    values: list[int], edges: tuple[int, ...]
) -> None:
    """For both searches, exponent and bisection; subtracting the values empties the histogram."""
    histogram = Histogram(edges)
    histogram.add(np.array(values, np.int64))
    expected = [sum(low < value <= high for value in values) for low, high in zip((-1, *edges), edges, strict=False)]
    assert histogram.counts == [*expected, sum(value > edges[-1] for value in values)]
    assert (histogram.count, histogram.sum) == (len(values), sum(values))
    histogram.add(np.array(values, np.int64), -1)
    assert histogram == Histogram(edges)


def test_an_age_without_a_time_is_unknown_and_every_other_age_is_bounded() -> None:
    """Producers may write any arrival time, and the state must be the same on every machine."""
    arrivals = np.array([90.0, 120.0, np.nan, -np.inf, np.inf, -1.7e308])
    assert ages_ms(arrivals, 0.0).tolist() == [UNKNOWN_AGE] * 6
    assert ages_ms(arrivals, 100.0).tolist() == [10_000, 0, 0, 2_000_000_000, 0, 2_000_000_000]
    histogram = Histogram(AGE_MS)
    histogram.add(ages_ms(arrivals, 0.0))
    assert histogram.count == 0


def test_records_without_a_time_count_everything_except_seconds() -> None:
    run = Run()
    run.store(0, 0)
    run.train(1)
    run.evict(2)
    tallies = run.state.totals.histograms
    assert (tallies.age_at_use.count, tallies.lengths["used"].mean.count) == (0, 1)
    ages = tallies.drop_ages["too_stale"]
    assert (ages.versions.count, ages.versions.sum, ages.ms.count) == (1, 1, 0)


def test_a_drop_counts_the_age_at_its_step_until_a_rewind_undoes_the_drop() -> None:
    """Age = version(step of the drop) - policy version, with two steps per version."""
    run = Run(steps_per_publish=2)
    run.state.store(np.arange(1, 7), entries(*[{"arrival_s": 100.0}] * 6))
    for number in (1, 2, 3, 4):
        run.train(number)
    run.apply(EvictRecord(step=4, numbers={"too_stale": [5]}, at_s=107.5))
    run.apply(DeadLetterRecord(numbers={"broken_frame": [6]}, at_s=160.0))
    ages = run.state.totals.histograms.drop_ages
    assert (ages["too_stale"].versions.sum, ages["too_stale"].ms.sum) == (2, 7_500)
    assert (ages["broken_frame"].versions.sum, ages["broken_frame"].ms.sum) == (2, 60_000)
    assert run.state.totals.histograms.lengths["dropped"].mean.count == 2
    run.rewind(3, "resample")
    assert ages["too_stale"].versions == Histogram(VERSIONS) and ages["too_stale"].ms == Histogram(AGE_MS)
    assert run.state.totals.histograms.lengths["dropped"].mean.count == 1
    assert run.state.totals.histograms.lengths["used"].mean.count == run.state.totals.groups_used == 4, (
        "uses are never taken back"
    )


def test_a_prompt_counts_as_trained_only_by_uses_of_the_surviving_history() -> None:
    """The only use is voided by a rewind; the prompt of a dead letter then counts as dropped."""
    run = Run(max_uses=3)
    run.state.store(np.array([1, 2]), entries({"prompt_index": 0}, {"prompt_index": 1}))
    for times in (1, 2):
        run.apply(batch_record(times - 1, [batch_entry(1, times_sampled=times)], generation=0))
    run.apply(DeadLetterRecord(numbers={"bad_checksum": [1]}))
    coverage = run.state.totals.histograms.coverage(3, 0)
    assert (coverage.issued, coverage.stored, coverage.trained, coverage.dropped, coverage.pending) == (3, 2, 1, 0, 2)
    run.rewind(0, "resample")
    coverage = run.state.totals.histograms.coverage(3, 0)
    assert (coverage.trained, coverage.dropped, coverage.pending, coverage.share) == (0, 1, 2, 0.0)
    assert run.state.totals.histograms.reuse == {1: 1, 2: 1}


def test_a_failed_prompt_counts_as_failed_until_its_late_group_is_stored() -> None:
    run = Run()
    run.apply(FailedPromptRecord(adapter="", prompt_index=0, outcome="failed", attempts=3, reason="expired"))
    coverage = run.state.totals.histograms.coverage(2, len(run.state.failed.prompts))
    assert (coverage.stored, coverage.failed, coverage.pending) == (0, 1, 1)
    run.state.store(np.array([1]), entries({"prompt_index": 0}))
    coverage = run.state.totals.histograms.coverage(2, len(run.state.failed.prompts))
    assert (coverage.stored, coverage.failed, coverage.pending) == (1, 0, 2)


def test_without_tickets_each_prompt_index_of_a_group_counts_as_a_prompt() -> None:
    """A group without a prompt index counts only in the lengths."""
    run = Run()
    run.state.store(np.array([1, 2, 3]), entries({"prompt_index": 4}, {"prompt_index": 4}, {}))
    run.train(1)
    coverage = run.state.totals.histograms.coverage(0, 0)
    assert (coverage.issued, coverage.stored, coverage.trained, coverage.pending, coverage.share) == (2, 2, 1, 1, 1.0)
    assert run.state.totals.histograms.lengths["stored"].mean.count == 3


def test_prompts_are_counted_by_source_and_the_first_sources_apart() -> None:
    """In the order of arrival; prompts of later sources count together with those without one."""
    run = Run()
    names = {hash_name(name): name for name in (f"s{n}" for n in range(MOST_SOURCES + 2))}
    sources = [*names, 0, *names][: MOST_SOURCES + 3]
    run.state.store(np.arange(1, len(sources) + 1), entries(*({"prompt_index": 0, "source": code} for code in sources)))
    run.train(1)
    run.evict(2)
    coverage = run.state.totals.histograms.coverage(0, 0, names)
    assert list(coverage.sources) == [f"s{n}" for n in range(MOST_SOURCES)] + ["*"]
    assert [(source.stored, source.trained, source.dropped, source.share) for source in coverage.sources.values()][
        :3
    ] == [
        (1, 1, 0, 1.0),
        (1, 0, 1, 0.0),
        (1, 0, 0, 0.0),
    ]
    assert coverage.sources["*"].stored == 3
    assert sum(source.stored for source in coverage.sources.values()) == coverage.stored == len(sources)
    run.rewind(0, "resample")
    coverage = run.state.totals.histograms.coverage(0, 0)
    unnamed = coverage.sources[f"#{hash_name('s0'):08x}"]
    assert (unnamed.stored, unnamed.trained) == (1, 0)


@given(long=st.integers(1, 99), dropped=st.integers(0, 99))
def test_lengths_are_biased_if_many_groups_are_dropped_and_the_trained_ones_are_shorter(
    long: int, dropped: int
) -> None:
    """100 groups with one rollout each, of 200 tokens the `long` ones and of 100 the others; the last are dropped."""
    run = Run()
    tokens = [100] * (100 - long) + [200] * long
    run.state.store(np.arange(1, 101), entries(*({"rollouts": 1, "tokens": count} for count in tokens)))
    for number in range(1, 101 - dropped):
        run.train(number)
    if dropped:
        run.evict(*range(101 - dropped, 101))
    lengths = run.state.totals.histograms.coverage(0, 0).lengths
    used, stored = tokens[: 100 - dropped], tokens
    assert lengths is not None
    assert (lengths.used, lengths.stored) == (sum(used) / len(used), sum(stored) / 100)
    assert lengths.biased == (dropped > 5 and abs(lengths.used / lengths.stored - 1) > 0.1)
