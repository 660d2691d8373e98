"""Time limit on plug-ins: one slow call is repeated, a second one is an error."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from replaybuf.plugins import time_limit
from replaybuf.plugins.time_limit import TookTooLong, call_limited, call_twice_limited

LIMIT_S = 0.2


class Slow:
    """The first `times` calls take too long."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.calls = 0

    def __call__(self) -> int:
        """Count calls."""
        self.calls += 1
        if self.calls <= self.times:
            time.sleep(2 * LIMIT_S)
        return self.calls


@pytest.mark.parametrize("thread", ["main", "another"])
def test_a_slow_call_is_repeated_and_two_slow_calls_are_an_error(thread: str) -> None:
    """The timer interrupts the call in the main thread; elsewhere the call is measured when it returns."""

    def check() -> None:
        assert threading.current_thread() is threading.main_thread() or thread == "another"
        once, twice = Slow(1), Slow(2)
        assert call_twice_limited(once, LIMIT_S) == 2
        with pytest.raises(TookTooLong, match=r"0\.2 s; called again, it .* 0\.1 s"):
            call_twice_limited(twice, LIMIT_S)
        assert twice.calls == 2

    if thread == "main":
        check()
    else:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(check).result(20)


@pytest.mark.parametrize(("slow", "answered"), [(5, True), (6, False)])
def test_a_call_without_a_processor_is_repeated_a_few_times(
    monkeypatch: pytest.MonkeyPatch, slow: int, *, answered: bool
) -> None:
    """A busy host would pause the run for ever."""
    starved_s = itertools.count()
    monkeypatch.setattr(time_limit, "_starved_s", lambda: float(next(starved_s)))
    call = Slow(slow)
    if answered:
        assert call_twice_limited(call, LIMIT_S) == slow + 1
    else:
        with pytest.raises(TookTooLong):
            call_twice_limited(call, LIMIT_S)
    assert call.calls == 6


def test_the_time_without_a_processor_is_the_wait_on_the_run_queue() -> None:
    """Of a schedstat, as the kernel's documentation has it: on the processor, waiting for it (both in ns), turns."""

    def waited_ns() -> int:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])

    before_ns = waited_ns()
    assert before_ns <= time_limit._starved_s() * 1e9 + 1
    assert time_limit._starved_s() * 1e9 <= waited_ns() + 1


def test_a_call_that_may_change_something_is_not_repeated() -> None:
    """Feedback observed twice would count twice."""
    slow = Slow(1)
    with pytest.raises(TookTooLong):
        call_limited(slow, LIMIT_S)
    assert slow.calls == 1


def test_a_call_ends_although_its_interruption_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised in a destructor; the rest of the call takes five seconds."""
    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: dropped.append(unraisable.exc_type))

    class Closing:
        def __del__(self) -> None:
            time.sleep(2 * LIMIT_S)

    def hang() -> None:
        Closing()
        for _ in range(500):
            time.sleep(0.01)

    with pytest.raises(TookTooLong, match="did not return"):
        call_limited(hang, LIMIT_S)
    assert dropped
