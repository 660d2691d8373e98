"""Repetition of calls to a service or engines that are unreachable for a while."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from replaybuf.errors import ServiceUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


class Stopped(Exception):
    """`stop` was called while a call was repeated."""


class Retries:
    """Repeats calls for at most `timeout_s`; `stop`, from any thread or signal handler, ends the pauses."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._stopping = threading.Event()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Let the call in progress end, and raise `Stopped` where it would be repeated."""
        self._stopping.set()

    def call(self, call: Callable[[], T]) -> T:
        """Repeat a call while it raises `ServiceUnavailable`; after `timeout_s` raise that error. Raises `Stopped`."""
        deadline = time.monotonic() + self._timeout_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return call()
            except ServiceUnavailable as error:
                if self._stopping.is_set():
                    raise Stopped from error
                if time.monotonic() > deadline:
                    raise
                logger.warning("retrying: %s", error.detail)
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
