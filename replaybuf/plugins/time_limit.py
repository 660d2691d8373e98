"""Time limit on calls to plug-ins: one that hangs must pause its own run and not hold the service.

Plug-ins run in the event loop's thread. In the main thread, where a service runs its loop, the timer signal SIGALRM
interrupts the call; that costs 16 µs. In another thread, and in C code that does not return to Python, a call is found
too slow only once it has returned.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

IMPORT_LIMIT_S = 5.0
"""An import may load a large library; every run of the service waits meanwhile."""
CALL_LIMIT_S = 1.0
"""A call to a strategy takes about a millisecond; a thousand times as long holds up every run of the service."""
STARVED_CALLS = 5
AGAIN_S = 0.1
"""The timer fires again: Python drops an exception that is raised in a destructor, and a plug-in may catch it."""
PLUGIN_ERRORS = (Exception, SystemExit)
"""What a plug-in may raise without ending the service."""


class TookTooLong(Exception):
    """A call exceeded its time limit."""


class _Interrupted(BaseException):
    """Raised in the call by the timer; not an `Exception`, because plug-ins catch those."""


def call_limited(call: Callable[[], T], limit_s: float | None = None) -> T:
    """Return the result of a call. Raises `TookTooLong` if it takes longer than `limit_s`, None = `CALL_LIMIT_S`."""
    limit_s = CALL_LIMIT_S if limit_s is None else limit_s
    started_s = time.monotonic()
    try:
        with _timer(limit_s):
            result = call()
    except _Interrupted:
        raise TookTooLong(f"did not return within {limit_s:g} s") from None
    took_s = time.monotonic() - started_s
    if took_s > limit_s:
        raise TookTooLong(f"took {took_s:.2f} s; the limit is {limit_s:g} s")
    return result


def call_twice_limited(call: Callable[[], T], limit_s: float | None = None) -> T:
    """Return the result of a call that changes nothing; repeat it once, within half the limit, if it is too slow.

    The clock runs on while the host is suspended, so one slow call proves nothing. Nor does a repeated one that was
    ready to run and had no processor for half of its time: it is repeated again, up to `STARVED_CALLS` times. Raises
    `TookTooLong` after that.
    """
    limit_s = CALL_LIMIT_S if limit_s is None else limit_s
    try:
        return call_limited(call, limit_s)
    except TookTooLong as error:
        first = error
    logger.warning("plug-in called again: it %s", first)
    calls = 0
    while True:
        calls, before_s = calls + 1, _starved_s()
        try:
            return call_limited(call, limit_s / 2)
        except TookTooLong as again:
            starved = _starved_s() - before_s > limit_s / 4
            if not starved or calls == STARVED_CALLS:
                raise TookTooLong(f"{first}; called again, it {again}") from again


def _starved_s() -> float:
    """Return how long this thread has been ready to run without a processor; 0 where the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


@contextlib.contextmanager
def _timer(limit_s: float) -> Iterator[None]:
    """Raise `_Interrupted` in the body after `limit_s`, and again every `AGAIN_S`, in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    started_s = time.monotonic()
    handler = signal.signal(signal.SIGALRM, _interrupt)
    try:
        due_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
        try:
            yield
        finally:  # a timer that was running, of a test runner, goes on
            left_s = max(1e-6, due_s - (time.monotonic() - started_s)) if due_s else 0.0
            signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
    finally:
        signal.signal(signal.SIGALRM, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Interrupted
