"""Numbers as text, for view and report."""

from __future__ import annotations


def clock(seconds: float) -> str:
    """Return a duration as minutes:seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def megabytes(size: int | None) -> str:
    """Return a size in MB (10^6 bytes); `-` if unknown."""
    return "-" if size is None else f"{size / 1e6:,.0f} MB"


def whole_seconds(duration_s: float | None) -> str:
    """Return a duration in whole seconds; `-` if unknown."""
    return "-" if duration_s is None else f"{duration_s:,.0f} s"


def percent(share: float | None) -> str:
    """Return a share, 0..1, in percent; `-` if unknown."""
    return "-" if share is None else f"{share:.1%}"
