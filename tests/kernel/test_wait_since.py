"""Since when a run waits for its present reason, from looks at it."""

from __future__ import annotations

from replaybuf.kernel.wait_since import WaitSince


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
