"""Groups that fail one after another are counted by waves, tried one at a time, and given up in the end."""

from __future__ import annotations

import pytest

from replaybuf.errors import ReplaybufError
from replaybuf.generator.failures import FAULTS_IN_A_ROW, FIRST_PAUSE_S, PAUSE_CEILING_S, SERVER_FAILED, Setbacks
from replaybuf.kernel.tickets import FORGIVEN_REASONS


def after(failures: int, reason: str = "reward_raised") -> Setbacks:
    """Return setbacks after so many failures, the k-th group from second k - 1 to second k."""
    setbacks = Setbacks()
    for number in range(failures):
        setbacks.failed(reason, "no parse", float(number), float(number + 1))
    return setbacks


def test_groups_that_were_in_flight_together_count_once() -> None:
    setbacks = Setbacks()
    for number in range(1000):
        setbacks.failed("reward_timeout", "late", began_s=number / 1000, now_s=2.0 + number)
    assert setbacks.in_a_row == 1
    setbacks.failed("reward_timeout", "late", began_s=2.0, now_s=2000.0)
    assert setbacks.in_a_row == 2


def test_a_success_ends_them_but_not_the_wave_that_was_counted() -> None:
    setbacks = after(3)
    setbacks.succeeded()
    assert setbacks.in_a_row == 0 and setbacks.rest_s(3.0) <= 0
    setbacks.failed("reward_raised", "no parse", began_s=2.5, now_s=3.5)
    assert setbacks.in_a_row == 0
    setbacks.failed("reward_raised", "no parse", began_s=3.0, now_s=4.0)
    assert setbacks.in_a_row == 1


def test_pauses_double_from_the_second_on_up_to_a_ceiling() -> None:
    pauses = [after(failures).rest_s(float(failures)) for failures in range(1, 9)]
    assert pauses == [0.0, *(min(FIRST_PAUSE_S * 2**k, PAUSE_CEILING_S) for k in range(7))]
    assert after(2).rest_s(2.0 + FIRST_PAUSE_S) == 0.0


def test_too_many_in_a_row_are_told_with_the_last_reason() -> None:
    after(FAULTS_IN_A_ROW - 1).check("no parse")
    with pytest.raises(ReplaybufError, match="64 groups in a row failed; the last: no parse"):
        after(FAULTS_IN_A_ROW).check("no parse")


@pytest.mark.parametrize("reason", [*SERVER_FAILED, "ref_engine_timeout"])
def test_what_a_server_did_wrong_pauses_and_never_ends(reason: str) -> None:
    setbacks = after(10 * FAULTS_IN_A_ROW, reason)
    setbacks.check("no answer")
    assert setbacks.rest_s(10.0 * FAULTS_IN_A_ROW) == PAUSE_CEILING_S


@pytest.mark.parametrize("reason", sorted(FORGIVEN_REASONS))
def test_what_is_nobodys_fault_does_not_count(reason: str) -> None:
    assert after(FAULTS_IN_A_ROW, reason).in_a_row == 0
