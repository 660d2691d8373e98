"""Changes of a figure, each with its standard error, and what may be said about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

MEASURED_ERRORS = 2.0
"""A change counts as measured if it is larger than so many standard errors."""
WINDOW_SHARE = 0.25
"""Share of the steps at the start, and at the end, whose rewards are compared."""
LEAST_VALUES = 2
"""A standard error needs so many values on each side."""


class Change(msgspec.Struct, frozen=True):
    """A figure before and after, 0..1, and the standard error of the difference; None: too few values for one."""

    before: float
    after: float
    error: float | None

    @property
    def difference(self) -> float:
        """How much larger the figure is afterwards."""
        return self.after - self.before

    @property
    def direction(self) -> int:
        """1 if the figure rose, -1 if it fell, 0 if the change is within the noise or cannot be judged."""
        if self.error is None or abs(self.difference) <= MEASURED_ERRORS * self.error:
            return 0
        return 1 if self.difference > 0 else -1

    def describe(self, name: str) -> str:
        """Return a sentence about the change, in points."""
        figures = f"from {100 * self.before:.1f} to {100 * self.after:.1f}"
        if self.error is None:
            return f"{name} went {figures} %; there are too few values to judge the change."
        verb = {1: "rose", -1: "fell", 0: "did not change measurably"}[self.direction]
        return f"{name} {verb}: {figures} %, {points(self)} points."


def points(change: Change) -> str:
    """Return the difference with its error, as `+9.9 ± 2.0`."""
    error = "" if change.error is None else f" ± {100 * change.error:.1f}"
    return f"{100 * change.difference:+.1f}{error}"


def paired_change(before: Mapping[str, float], after: Mapping[str, float]) -> Change | None:
    """Compare the same problems before and after; None if there are none. The error is over the problems."""
    names = [name for name in before if name in after]
    if not names:
        return None
    early, late = (np.array([side[name] for name in names]) for side in (before, after))
    return Change(float(early.mean()), float(late.mean()), _error(late - early))


def window_change(values: Sequence[float]) -> Change | None:
    """Compare the mean of the first quarter of `values` with that of the last; None if there are none.

    The error is over the values of both quarters.
    """
    if not values:
        return None
    early, late = (np.array(part) for part in windows(values))
    errors = [_error(part) for part in (early, late)]
    error = None if None in errors else float(np.hypot(*errors))  # type: ignore[arg-type]
    return Change(float(early.mean()), float(late.mean()), error)


def windows(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the first and the last quarter of values, at least one value each."""
    size = max(1, round(WINDOW_SHARE * len(values)))
    return values[:size], values[-size:]


def _error(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float | None:
    """Return the standard error of the mean."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) >= LEAST_VALUES else None
