"""Skip runs that cannot be read, and retry them after growing pauses; the other runs are served meanwhile."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from replaybuf.errors import DataLost, LedgerGap, NoRoom, ReplaybufError, ServiceUnavailable, Unreadable

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""By then a leader has finished a trimming that interrupted the read."""
LONGEST_PAUSE_S = 60.0
"""Reading a run costs seconds of CPU; an operator who repairs one waits at most this long."""


@contextlib.contextmanager
def strange_values(run: str) -> Iterator[None]:
    """Raise `Unreadable` for the values of a run in Redis that no service wrote, whatever they break.

    The server must serve its other runs, and nobody can list all values that a program may write to Redis.
    """
    try:
        yield
    except (DataLost, ServiceUnavailable, NoRoom):
        raise
    except ReplaybufError as error:
        raise Unreadable(error.detail, name="run", value=run) from error
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        logger.debug("strange value run=%s", run, exc_info=True)
        raise Unreadable(f"a key has a value that no service wrote: {error!r}", name="run", value=run) from error


class UnreadableRuns:
    """Errors of the runs that could not be read, by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._errors: dict[str, DataLost | LedgerGap] = {}
        self._pauses: dict[str, tuple[float, float]] = {}

    @property
    def reasons(self) -> dict[str, str]:
        """Why each of these runs is not served."""
        return {name: error.detail for name, error in sorted(self._errors.items())}

    def check(self, name: str) -> None:
        """Raise the error of a run until its next retry is due."""
        if name in self._errors and self._clock() < self._pauses[name][0]:
            raise self._errors[name]

    def record_failure(self, name: str, error: DataLost | LedgerGap) -> DataLost | LedgerGap:
        """Record that a run could not be read; return the error for its callers."""
        pause_s = min(2 * self._pauses[name][1], LONGEST_PAUSE_S) if name in self._pauses else FIRST_PAUSE_S
        missing = {"entries": error.entries, "groups": error.groups} if isinstance(error, DataLost) else {}
        reported = type(error)(f"run {name} cannot be read: {error.detail}", name="run", value=name, **missing)
        if name not in self._errors or self._errors[name].detail != reported.detail:
            logger.error("%s; the service retries it and serves the other runs", reported.detail)
        self._errors[name], self._pauses[name] = reported, (self._clock() + pause_s, pause_s)
        return reported

    def record_success(self, name: str) -> None:
        """Record that a run was read."""
        if self._errors.pop(name, None):
            del self._pauses[name]
            logger.warning("run is readable again run=%s", name)
