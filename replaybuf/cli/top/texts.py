"""Short texts for numbers, ages and reasons in narrow columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from replaybuf.wire.answer.overview import RunRow
from replaybuf.wire.contract import WaitingAnswer

BARS = "▁▂▃▄▅▆▇█"


def age(seconds: float | None) -> str:
    """Write an age in one unit: 0.4s, 12s, 3m, 5h, 2d; "never" without one."""
    if seconds is None:
        return "never"
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"


def count(value: float) -> str:
    """Write a number in at most five characters: 950, 12.3k, 4.5M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            scaled = value / size
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.1f}{unit}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def waits(row: RunRow) -> str:
    """Write what the next batch waits for: reason, what is there of what is needed, who has to act."""
    if row.paused_reason:
        return f"paused: {row.paused_reason}"
    if row.waiting is None:
        return "ready"
    waiting = row.waiting
    return f"{waiting.reason}{amount(waiting)}{since(row)} <- {waiting.blocked_on}"


def since(row: RunRow) -> str:
    """Write for how long the run has waited for its present reason."""
    return "" if row.waiting_s is None else f" for {age(row.waiting_s)}"


def amount(waiting: WaitingAnswer) -> str:
    """Write what is there of what is needed: groups, else tokens."""
    if waiting.need.groups:
        return f" {waiting.have.groups}/{waiting.need.groups}"
    return f" {count(waiting.have.tokens)}/{count(waiting.need.tokens)}" if waiting.need.tokens else ""


def sparkline(values: Sequence[float], points: int) -> str:
    """Return values as a row of bars from lowest to highest, each the mean of an equal share of the values."""
    if not values:
        return ""
    points = min(points, len(values))
    edges = [round(i * len(values) / points) for i in range(points + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    lowest, span = min(means), max(means) - min(means)
    return "".join(BARS[int((mean - lowest) / span * (len(BARS) - 1))] if span else BARS[0] for mean in means)
