"""Waits: seconds that trainers waited by reason, and since when a run waits for its present reason."""

from __future__ import annotations

from replaybuf.kernel.figures.waits import LONGEST_GAP_S, TrainerWaits, WaitSince


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


def test_a_reason_goes_on_while_groups_trickle_in() -> None:
    """Changes that leave the reason alone do not begin it again."""
    since = WaitSince()
    since.look(None, None, 0.0)
    since.look("too_few_groups", 0.25, 10.0)
    for now_s in (20.0, 30.0, 40.0):
        since.look("too_few_groups", 1.0, now_s)
    assert (since.reason, since.since_s) == ("too_few_groups", 9.75)


def test_a_new_reason_begins_with_the_change_that_made_it_or_now() -> None:
    """The newest change is older than the last look: only time can have changed the reason."""
    since = WaitSince()
    since.look("no_groups", 0.0, 0.0)
    since.look("too_few_groups", 2.0, 60.0)
    assert since.since_s == 58.0
    since.look("no_producers", 62.0, 120.0)
    assert since.since_s == 120.0
    since.look(None, 0.5, 130.0)
    assert (since.reason, since.since_s) == (None, 129.5)


def test_after_a_restart_the_reason_has_held_since_the_newest_change_at_least() -> None:
    """Without any change it begins now; a change from the future, of another clock, is now."""
    for change_age_s, since_s in ((3600.0, -3500.0), (None, 100.0), (-5.0, 100.0)):
        since = WaitSince()
        since.look("too_few_groups", change_age_s, 100.0)
        assert since.since_s == since_s
