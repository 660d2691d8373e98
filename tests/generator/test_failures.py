"""Failures in a row: counted by waves, followed by pauses, raised in the end."""

from __future__ import annotations

import pytest

from replaybuf.errors import ReplaybufError
from replaybuf.generator.failures import (
    FAULTS_IN_A_ROW,
    FIRST_PAUSE_S,
    PAUSE_CEILING_S,
    SERVER_FAILED,
    Failures,
)
from replaybuf.kernel.state.return_reasons import FORGIVEN_REASONS


def after(count: int, reason: str = "reward_raised") -> Failures:
    """Return the state after `count` failures, where the k-th group ran from second k - 1 to second k."""
    failures = Failures()
    for number in range(count):
        failures.record_failure(reason, "no parse", float(number), float(number + 1))
    return failures


def test_groups_that_were_in_flight_together_count_once() -> None:
    failures = Failures()
    for number in range(1000):
        failures.record_failure("reward_timeout", "late", started_s=number / 1000, now_s=2.0 + number)
    assert failures.in_a_row == 1
    failures.record_failure("reward_timeout", "late", started_s=2.0, now_s=2000.0)
    assert failures.in_a_row == 2


def test_a_success_resets_the_count_but_not_the_counted_wave() -> None:
    failures = after(3)
    failures.record_success()
    assert failures.in_a_row == 0 and failures.rest_s(3.0) <= 0
    failures.record_failure("reward_raised", "no parse", started_s=2.5, now_s=3.5)
    assert failures.in_a_row == 0
    failures.record_failure("reward_raised", "no parse", started_s=3.0, now_s=4.0)
    assert failures.in_a_row == 1


def test_pauses_double_from_the_second_failure_up_to_a_ceiling() -> None:
    pauses = [after(count).rest_s(float(count)) for count in range(1, 9)]
    assert pauses == [0.0, *(min(FIRST_PAUSE_S * 2**k, PAUSE_CEILING_S) for k in range(7))]
    assert after(2).rest_s(2.0 + FIRST_PAUSE_S) == 0.0


def test_too_many_failures_in_a_row_raise_the_last_reason() -> None:
    after(FAULTS_IN_A_ROW - 1).check("no parse")
    with pytest.raises(ReplaybufError, match="64 groups in a row failed; the last: no parse"):
        after(FAULTS_IN_A_ROW).check("no parse")


@pytest.mark.parametrize("reason", [*SERVER_FAILED, "ref_engine_timeout"])
def test_failures_of_a_server_pause_and_never_end(reason: str) -> None:
    failures = after(10 * FAULTS_IN_A_ROW, reason)
    failures.check("no answer")
    assert failures.rest_s(10.0 * FAULTS_IN_A_ROW) == PAUSE_CEILING_S


@pytest.mark.parametrize("reason", sorted(FORGIVEN_REASONS))
def test_forgiven_reasons_do_not_count(reason: str) -> None:
    assert after(FAULTS_IN_A_ROW, reason).in_a_row == 0
