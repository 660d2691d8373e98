"""Line charts as SVG: a viewBox that fits any width, colours of the page, breaks where a value is missing."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

Values: TypeAlias = Sequence[float | None]
Place: TypeAlias = Callable[[float, float], tuple[float, float]]
"""Turns x and y into a point of the picture."""

WIDTH, HEIGHT = 360, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 8, 8, 20
COLOURS = 6


class Line(NamedTuple):
    """One line: name and values, [points]; None = missing."""

    name: str
    values: Values


class Chart(NamedTuple):
    """A chart of lines over `x`, [points], named `x_name`; with `band` the first two lines are edges of an area."""

    title: str
    unit: str
    x_name: str
    x: Sequence[float]
    lines: list[Line]
    band: bool = False

    def known(self) -> list[tuple[str, list[float]]]:
        """Return the lines that have a value, each with its name and the values that are not missing."""
        lines = ((line.name, [value for value in line.values if value is not None]) for line in self.lines)
        return [(name, values) for name, values in lines if values]

    def constant(self) -> bool:
        """Return whether each line has one value, so that a sentence says as much as a chart."""
        return all(len(set(values)) == 1 for _, values in self.known())


def number(value: float) -> str:
    """Write a number for people, with four digits; in full from 1,000 on."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e15 else f"{value:.4g}"


def draw(chart: Chart) -> str:
    """Return the SVG of a chart that has a value."""
    values = [value for _, line in chart.known() for value in line]
    low, high = min(values), max(values)
    first, last = min(chart.x), max(chart.x)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (WIDTH - _LEFT - _RIGHT) * _share(x, first, last)
        return across, HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * _share(y, low, high)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_label(chart)}">', _axes(chart, low, high)]
    if chart.band:
        parts.append(_area(chart, place))
    for position, line in enumerate(chart.lines):
        kind = "edge" if chart.band and position < 2 else f"line{0 if chart.band else position % COLOURS}"
        parts += [_path(points, kind) for points in _pieces(chart.x, line.values, place)]
    return "".join((*parts, "</svg>"))


def _share(value: float, low: float, high: float) -> float:
    """Return where a value lies between two bounds, 0 to 1. Halves, because a difference of floats may be infinite."""
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span else 0.0


def _label(chart: Chart) -> str:
    newest = ", ".join(f"{name} {number(values[-1])}" for name, values in chart.known())
    return html.escape(f"{chart.title} by {chart.x_name}. Newest: {newest}.")


def _axes(chart: Chart, low: float, high: float) -> str:
    bottom = HEIGHT - _BOTTOM
    texts = [
        (_LEFT - 4, _TOP + 8, "end", number(high)),
        (_LEFT - 4, bottom, "end", number(low)),
        (_LEFT, HEIGHT - 5, "start", f"{chart.x_name} {number(min(chart.x))}"),
        (WIDTH - _RIGHT, HEIGHT - 5, "end", number(max(chart.x))),
    ]
    labels = (f'<text x="{x}" y="{y}" text-anchor="{side}">{text}</text>' for x, y, side, text in texts)
    frame = f'<path class="frame" d="M{_LEFT} {_TOP}V{bottom}H{WIDTH - _RIGHT}"/>'
    return frame + "".join(labels)


def _area(chart: Chart, place: Place) -> str:
    upper, lower = (line.values for line in chart.lines[:2])
    inside = [(x, high, low) for x, high, low in zip(chart.x, upper, lower, strict=True) if None not in (high, low)]
    forth = [place(x, high) for x, high, _ in inside if high is not None]
    back = [place(x, low) for x, _, low in reversed(inside) if low is not None]
    return f'<polygon class="area" points="{_points((*forth, *back))}"/>'


def _pieces(x: Sequence[float], values: Values, place: Place) -> Iterable[list[tuple[float, float]]]:
    """Yield the points of each part of a line without a missing value."""
    piece: list[tuple[float, float]] = []
    for at, value in zip(x, values, strict=True):
        if value is not None:
            piece.append(place(at, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _path(points: list[tuple[float, float]], kind: str) -> str:
    if len(points) == 1:
        (x, y) = points[0]
        return f'<circle class="{kind} point" cx="{x:.1f}" cy="{y:.1f}" r="2"/>'
    return f'<polyline class="{kind}" points="{_points(points)}"/>'


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
