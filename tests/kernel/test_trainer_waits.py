"""Seconds that trainers waited, by reason: from one answer to the next."""

from __future__ import annotations

from replaybuf.kernel.trainer_waits import LONGEST_GAP_S, TrainerWaits


def test_the_time_after_an_answer_counts_under_its_reason() -> None:
    """Until the next answer; the time after a batch is training."""
    waits = TrainerWaits()
    for reason, now_s in (("no_groups", 10.0), ("too_few_groups", 11.5), (None, 12.0), (None, 90.0)):
        waits.answer(reason, now_s)
    assert waits.total_s == {"no_groups": 1.5, "too_few_groups": 0.5}


def test_a_step_has_the_waits_since_the_step_before() -> None:
    """The total goes on."""
    waits = TrainerWaits()
    waits.answer("no_groups", 0.0)
    waits.answer(None, 2.0)
    assert waits.of_step_s() == {"no_groups": 2.0}
    waits.end_step()
    assert waits.of_step_s() == {}
    waits.answer("no_groups", 5.0)
    waits.answer(None, 5.25)
    assert (waits.of_step_s(), waits.total_s) == ({"no_groups": 0.25}, {"no_groups": 2.25})


def test_a_trainer_that_asks_no_more_does_not_wait() -> None:
    """It is gone or busy; another one begins anew, and a clock that goes back counts nothing."""
    waits = TrainerWaits()
    waits.answer("no_groups", 0.0)
    waits.answer("no_groups", 10_000.0)
    assert waits.total_s["no_groups"] == LONGEST_GAP_S
    waits.forget_last()
    waits.answer(None, 20_000.0)
    waits.answer("no_groups", 20_001.0)
    waits.answer(None, 20_000.0)
    assert waits.total_s["no_groups"] == LONGEST_GAP_S
