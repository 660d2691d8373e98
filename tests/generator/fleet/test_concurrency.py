"""The limit of groups in flight follows the engines' gauges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import Invalid
from replaybuf.generator.engines import Load
from replaybuf.generator.engines.http import read_load
from replaybuf.generator.fleet.concurrency import WINDOW, Bounds, Concurrency, next_limit, total

BOUNDS = Bounds(2, 64)
COUNT = st.integers(0, 1000)

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a}b"} 8.0
vllm:num_requests_running{engine="1",model_name="a}b"} 7.0
vllm:num_requests_waiting{engine="0",model_name="a}b"} 3.0
vllm:num_requests_waiting{engine="1",model_name="a}b"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3.0
"""


def test_gauges_are_added_up_over_the_engines_of_a_server() -> None:
    assert read_load(VLLM, "vllm:num_requests_running", "vllm:num_requests_waiting") == Load(15, 3)
    assert read_load("a 1\nb 2 1712\n", "a", "b") == Load(1, 2)


def test_a_server_that_lacks_a_gauge_reports_no_load() -> None:
    assert read_load(VLLM, "vllm:num_requests_running", "vllm:num_requests") is None
    assert read_load("", "a", "b") is None


@pytest.mark.parametrize(
    ("line", "message"), [("a x", "could not convert"), ("a +Inf", "a is"), ('a{b="c"}', "could not convert")]
)
def test_an_invalid_gauge_is_an_error(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_load(f"{line}\nb 1\n", "a", "b")


def test_the_limit_falls_by_the_share_of_rollouts_that_wait() -> None:
    assert next_limit(64, Load(running=30, waiting=10), BOUNDS, sampling=40, scoring=0) == 30
    assert next_limit(64, Load(running=30, waiting=10), BOUNDS, sampling=40, scoring=5) == 35


def test_generators_that_share_engines_reduce_in_the_same_proportion() -> None:
    load = Load(running=100, waiting=100)
    limits = [next_limit(64, load, BOUNDS, sampling=sampling, scoring=0) for sampling in (40, 10)]
    assert limits == [20, 5]


def test_without_a_queue_a_reached_limit_rises_by_half() -> None:
    assert next_limit(8, Load(20, 0), BOUNDS, sampling=8, scoring=0) == 12
    assert next_limit(2, Load(2, 0), BOUNDS, sampling=1, scoring=1) == 3
    assert next_limit(8, Load(20, 0), BOUNDS, sampling=7, scoring=0) == 8


def test_paused_engines_do_not_lower_the_limit() -> None:
    assert next_limit(40, Load(running=0, waiting=80), BOUNDS, sampling=40, scoring=0) == 40


def test_without_gauges_the_limit_is_the_upper_bound() -> None:
    assert next_limit(3, None, BOUNDS, sampling=0, scoring=0) == 64
    assert total([None, None]) is None
    assert total([None, Load(1, 2), Load(3, 4)]) == Load(4, 6)


@given(st.integers(2, 64), COUNT, COUNT, COUNT, COUNT)
def test_the_limit_stays_within_bounds_and_never_rises_while_rollouts_wait(
    limit: int, running: int, waiting: int, sampling: int, scoring: int
) -> None:
    chosen = next_limit(limit, Load(running, waiting), BOUNDS, sampling=sampling, scoring=scoring)
    assert BOUNDS.least <= chosen <= BOUNDS.most
    assert chosen <= limit or waiting == 0


@given(st.integers(1, 200), st.integers(1, 64))
def test_the_limit_settles_at_the_capacity_of_a_steady_engine(room: int, n: int) -> None:
    """An engine samples `room` rollouts, in groups of n; the limit ends within one step above its capacity."""
    concurrency = Concurrency(Bounds(1, 64))
    for _ in range(40 * WINDOW):
        rollouts = concurrency.limit * n
        load = Load(min(rollouts, room), max(0, rollouts - room))
        concurrency.update([load], sampling=concurrency.limit, scoring=0)
    full = max(1, min(64, room // n))
    assert full <= concurrency.limit <= max(1, min(64, full + max(1, full // 2)))


@given(st.lists(st.tuples(COUNT, COUNT), min_size=WINDOW - 1, max_size=WINDOW - 1), st.integers(0, WINDOW - 1))
def test_a_temporary_queue_does_not_lower_the_limit(queues: list[tuple[int, int]], calm: int) -> None:
    """One reading per window without a queue is enough."""
    concurrency = Concurrency(Bounds(1, 64))
    window = [Load(running, waiting) for running, waiting in queues]
    window.insert(calm, Load(512, 0))
    for load in window * 3:
        concurrency.update([load], sampling=64, scoring=0)
    assert concurrency.limit == 64


def test_a_standing_queue_lowers_the_limit_once_per_window() -> None:
    concurrency = Concurrency(Bounds(1, 64))
    loads = [Load(8, 504), Load(0, 512), Load(128, 128), Load(64, 448), Load(256, 256 + 1)]
    assert [concurrency.update([load], sampling=64, scoring=0) for load in loads] == [False] * 4 + [True]
    assert concurrency.limit == 32
    assert not concurrency.update([Load(1, 999)], sampling=32, scoring=0)


def test_the_reading_with_the_most_groups_counts() -> None:
    """Between two tickets a generator has few groups, however many others have queued."""
    concurrency = Concurrency(Bounds(1, 64))
    for sampling in (1, 60, 0, 2, 0):
        concurrency.update([Load(100, 100)], sampling=sampling, scoring=0)
    assert concurrency.limit == 30


def test_gauges_that_disappear_restore_the_upper_bound() -> None:
    concurrency = Concurrency(Bounds(1, 64))
    for _ in range(WINDOW):
        concurrency.update([Load(100, 100)], sampling=64, scoring=0)
    assert concurrency.limit == 32
    assert concurrency.update([None], sampling=32, scoring=0)
    assert concurrency.limit == 64


def test_invalid_bounds_are_rejected_with_the_bound() -> None:
    with pytest.raises(Invalid, match="is 9; it must be from 1 to max_inflight_groups, 8") as caught:
        Bounds(9, 8)
    assert (caught.value.name, caught.value.value, caught.value.bound) == ("min_inflight_groups", 9, 8)
    with pytest.raises(Invalid):
        Bounds(0, 8)


def test_new_bounds_move_a_limit_at_the_old_upper_bound() -> None:
    concurrency = Concurrency(Bounds(2, 8))
    concurrency.set_bounds(Bounds(2, 16))
    assert concurrency.limit == 16
    for _ in range(WINDOW):
        concurrency.update([Load(1, 1)], sampling=16, scoring=0)
    concurrency.set_bounds(Bounds(2, 32))
    assert concurrency.limit == 8
    concurrency.set_bounds(Bounds(2, 4))
    assert concurrency.limit == 4
    assert concurrency.adaptive
    assert not Concurrency(Bounds(3, 3)).adaptive
