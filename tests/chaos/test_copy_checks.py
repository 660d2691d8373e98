"""The checker finds cursors that skip, repeat or end early, wrong late columns, and restores with a difference."""

from __future__ import annotations

import pytest

from tests.chaos.checker import check
from tests.chaos.history import AnyEvent, CursorMoved, CursorRead, LossAccepted, Restored
from tests.chaos.test_checker import RUN, answered, changed, correct, is_correct, reserve_rollout, rewrite


def page(at_s: float, *numbers: int, **fields: object) -> CursorRead:
    """A page of the cursor; at rest (53.5 s on) without groups it is the last one."""
    return CursorRead(**answered(at_s, **fields), numbers=list(numbers), last=not numbers)


def moved(at_s: float, number: int, outcome: str = "ok") -> CursorMoved:
    """Groups that are done."""
    return CursorMoved(**answered(at_s, outcome=outcome), number=number)


def test_pages_that_follow_each_other_are_correct() -> None:
    """Also one that came again, moves without an answer, and groups whose history was trimmed."""
    unanswered = moved(5.0, 2, "unavailable")
    again: list[AnyEvent] = [
        page(4.0, 1, 2),
        unanswered,
        page(6.0, 1, 2, 3),
        moved(7.0, 3),
        page(8.0, 4),
        moved(9.0, 4),
        page(54.5),
    ]
    assert is_correct(*again)
    assert is_correct(page(4.0, 1, 2), unanswered, page(6.0, 3, 4), moved(7.0, 4), page(54.5))
    assert is_correct(page(4.0, 1), moved(5.0, 1), page(6.0, 4, missed=2), moved(7.0, 4), page(54.5))


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([page(4.0, 1), moved(5.0, 1), page(6.0, 3, 4)], id="skips a group"),
        pytest.param([page(4.0, 1, 3)], id="leaves a group out of a page"),
        pytest.param([page(4.0, 1, 2), moved(5.0, 2), page(6.0, 2, 3)], id="returns a group that is done"),
        pytest.param([page(4.0, 2, 1)], id="is not in order"),
        pytest.param([page(4.0, 1, wrong=["p0"])], id="has other tokens"),
        pytest.param([page(4.0, 1, 2, 3), moved(5.0, 3), page(54.5)], id="ends early"),
        pytest.param([Restored(at_s=9.0, run=RUN, side="s", differences=["a group is gone"])], id="restore"),
    ],
)
def test_each_fault_of_a_copy_is_a_violation(events: list[AnyEvent]) -> None:
    violations = check(sorted([*correct(), *events], key=lambda event: event.at_s))
    assert {violation.guarantee for violation in violations} == {1}


def test_a_loss_that_is_not_as_it_was_said_is_a_violation() -> None:
    accepted = LossAccepted(at_s=9.0, run=RUN, side="s", differences=["6 groups are lost, 5 were said"])
    assert {
        violation.guarantee for violation in check(sorted([*correct(), accepted], key=lambda event: event.at_s))
    } == {13}


@pytest.mark.parametrize("reference", [None, False])
def test_a_batch_without_the_right_column_is_a_violation(reference: bool | None) -> None:
    """Of a run whose strategy requires the column."""
    history = correct()
    rewrite(history, 3, changed(3, options={"requires": ["ref_logprobs"]}))
    reserve_rollout(history, reference=reference)
    assert any("ref_logprobs" in violation.what for violation in check(history) if violation.guarantee == 6)
