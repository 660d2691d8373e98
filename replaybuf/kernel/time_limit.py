"""A bound on the time that a plug-in may take, kept even where it never returns.

The plug-in runs in the loop's thread, which is the main thread of a service: a timer interrupts it there. In any other
thread, and for a call into C that does not come back to Python, the bound is checked once the call has ended.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

IMPORT_BOUND_S = 5.0
"""Of an import, which may load a large library; nothing else goes on meanwhile."""
BOUND_S = 1.0
"""A question to a strategy takes a millisecond; a thousand times that holds up every run of the service."""


class TookTooLong(Exception):
    """A call passed its bound."""


class Interrupted(BaseException):
    """The timer went off. No `Exception`, so that a plug-in which answers any of those does not answer this one."""


OURS = (KeyboardInterrupt, Interrupted)
"""What goes through whoever answers everything else that a plug-in raises, `SystemExit` too."""
_handled = False
_unbounded: Slowest | None = None


@contextlib.contextmanager
def handling() -> Iterator[None]:
    """Answer the timer for the whole body, so that each of many bounded calls takes 2 µs instead of 16.

    Nests; does nothing outside the main thread.
    """
    global _handled
    if _handled or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _interrupt)
    _handled = True
    try:
        yield
    finally:
        _handled = False
        signal.signal(signal.SIGALRM, before)


class Slowest:
    """The longest that a call took, in seconds."""

    took_s = 0.0


@contextlib.contextmanager
def unbounded() -> Iterator[Slowest]:
    """Let every call of the body take its time, and tell the longest: where time is virtual the host's says nothing."""
    global _unbounded
    before, _unbounded = _unbounded, Slowest()
    try:
        yield _unbounded
    finally:
        _unbounded = before


def bounded(call: Callable[[], T], bound_s: float = BOUND_S) -> T:
    """Answer a call; interrupt it with `TookTooLong` once it has taken `bound_s` seconds."""
    started_s = time.monotonic()
    if _unbounded:
        answer = call()
        _unbounded.took_s = max(_unbounded.took_s, time.monotonic() - started_s)
        return answer
    if _handled and threading.current_thread() is threading.main_thread():
        due_s, again_s = signal.setitimer(signal.ITIMER_REAL, bound_s)
        try:
            try:
                answer = call()
            finally:  # a timer that was running goes on: a test runner's
                left_s = max(1e-6, due_s - (time.monotonic() - started_s)) if due_s else 0.0
                signal.setitimer(signal.ITIMER_REAL, left_s, again_s)
        except Interrupted:
            raise TookTooLong(f"did not come to an end within {bound_s:g} s") from None
    elif threading.current_thread() is threading.main_thread():
        with handling():
            return bounded(call, bound_s)
    else:
        answer = call()
    took_s = time.monotonic() - started_s
    if took_s > bound_s:
        raise TookTooLong(f"took {took_s:.2f} s; the bound is {bound_s:g} s")
    return answer


def bounded_again(call: Callable[[], T], bound_s: float = BOUND_S) -> T:
    """Answer a call that changes nothing; one that passes its bound is made once more, within half of it.

    The clock runs on while the host stands still (a virtual machine that moves, a laptop that sleeps), so that one late
    call says nothing about the plug-in. Raises `TookTooLong` where both are late.
    """
    try:
        return bounded(call, bound_s)
    except TookTooLong as late:
        logger.warning("plug-in called again: it %s", late)
        try:
            return bounded(call, bound_s / 2)
        except TookTooLong as again:
            raise TookTooLong(f"{late}; called again, it {again}") from again


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted
