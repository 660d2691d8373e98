"""Limits on live groups: bounds hold, and groups that the next batch needs always enter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replaybuf.kernel.decide.intake import count_fitting
from replaybuf.kernel.state.limits import Load
from replaybuf.wire.config import Limits

LOADS = st.builds(Load, st.just(1), st.integers(1, 100), st.integers(1, 100))
LIMITS = st.builds(
    Limits, max_tokens_live=st.none() | st.integers(1, 400), max_bytes_live=st.none() | st.integers(1, 400)
)


@given(LOADS, st.lists(LOADS | st.just(Load()), max_size=12), LIMITS, st.integers(0, 6))
def test_groups_enter_within_the_bounds_or_if_the_next_batch_needs_them(
    held: Load, coming: list[Load], limits: Limits, lacking: int
) -> None:
    """The first group that has to wait would break a bound, and the next batch does not need it."""
    count, refusal = count_fitting(held, coming, limits, lambda: lacking)
    entered = [load for load in coming[:count] if load.groups]
    assert sum(entered, held).over(limits) is None or len(entered) <= max(lacking, len(within(held, coming, limits)))
    assert (refusal is None) == (count == len(coming))
    if refusal:
        assert sum(coming[: count + 1], held).over(limits) is not None and len(entered) >= lacking


def within(held: Load, coming: list[Load], limits: Limits) -> list[Load]:
    """List the first groups that fit into the bounds."""
    rooms = []
    for load in coming:
        held += load
        if load.groups and held.over(limits):
            break
        rooms += [load] if load.groups else []
    return rooms


def test_a_full_buffer_accepts_a_duplicate() -> None:
    """A duplicate needs no space; a producer would send a rejected one again for ever."""
    full, limits = Load(3, 100, 900), Limits(max_tokens_live=100)
    assert count_fitting(full, [Load(), Load()], limits, lambda: 0) == (2, None)


def test_the_refusal_names_the_bound_and_the_amount_that_would_be_live() -> None:
    _, refusal = count_fitting(
        Load(1, 10, 90), [Load(1, 5, 20)], Limits(max_bytes_live=100, max_group_bytes=9), lambda: 0
    )
    assert refusal is not None
    assert (refusal.name, refusal.value, refusal.bound) == ("limits.max_bytes_live", 110, 100)
