"""How long a plug-in may take, and that a host that stood still is not its fault."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from replaybuf.kernel.time_limit import TookTooLong, bounded, bounded_again, unbounded

BOUND_S = 0.2


class Late:
    """Comes to an end too late the first `times`, whether the timer reaches it or not."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.calls = 0

    def __call__(self) -> int:
        """Count calls."""
        self.calls += 1
        if self.calls <= self.times:
            time.sleep(2 * BOUND_S)
        return self.calls


@pytest.mark.parametrize("thread", ["main", "another"])
def test_what_is_late_once_is_asked_again_and_what_is_late_twice_is_refused(thread: str) -> None:
    """In the main thread, where a timer ends the call, and in others, where it is seen when it comes back."""

    def check() -> None:
        assert threading.current_thread() is threading.main_thread() or thread == "another"
        once, twice = Late(1), Late(2)
        assert bounded_again(once, BOUND_S) == 2
        with pytest.raises(TookTooLong, match=r"0\.2 s; called again, it .* 0\.1 s"):
            bounded_again(twice, BOUND_S)
        assert twice.calls == 2

    if thread == "main":
        check()
    else:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(check).result(20)


def test_what_may_change_something_is_called_once() -> None:
    """Feedback that was given twice would count twice."""
    late = Late(1)
    with pytest.raises(TookTooLong):
        bounded(late, BOUND_S)
    assert late.calls == 1


def test_where_time_is_virtual_nothing_is_ended_and_the_longest_is_told() -> None:
    late = Late(1)
    with unbounded() as slowest:
        assert [bounded_again(late, BOUND_S), bounded(late, BOUND_S)] == [1, 2]
    assert slowest.took_s >= 2 * BOUND_S
    with pytest.raises(TookTooLong):
        bounded(Late(1), BOUND_S)
