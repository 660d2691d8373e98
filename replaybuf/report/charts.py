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
COLOURS = ("#0b6b57", "#b4542a", "#3f5fb0", "#8c4a8f", "#6b6b1f", "#4b7c8c", "#c28a00", "#a3264b")
"""Of the lines on a light page, in their order."""


class Line(NamedTuple):
    """One line: name and values, [points]; None = missing.

    `low` and `high` are the edges of an area around it, `x` its own places; by default there is no area, and the
    places are those of the chart.
    """

    name: str
    values: Values
    low: Values = ()
    high: Values = ()
    x: Sequence[float] = ()


class Chart(NamedTuple):
    """A chart of lines over `x`, [points], named `x_name`."""

    title: str
    unit: str
    x_name: str
    x: Sequence[float]
    lines: list[Line]

    def known(self) -> list[Line]:
        """Return the lines that have a value."""
        return [line for line in self.lines if known_values(line.values)]

    def constant(self) -> bool:
        """Return whether each line has one value, so that a sentence says as much as a chart."""
        edges = (edge for line in self.lines for edge in (line.values, line.low, line.high))
        return all(len(set(known_values(edge))) <= 1 for edge in edges)


def known_values(values: Values) -> list[float]:
    """Return the values that are not missing."""
    return [value for value in values if value is not None]


def number(value: float) -> str:
    """Write a number for people, with four digits; in full from 1,000 on."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e15 else f"{value:.4g}"


def draw(chart: Chart, attributes: str = "") -> str:
    """Return the SVG of a chart that has a value; `attributes` of the element place it inside another picture."""
    values = known_values(
        [value for line in chart.lines for edge in (line.values, line.low, line.high) for value in edge]
    )
    low, high = min(values), max(values)
    first, last = _range(chart)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (WIDTH - _LEFT - _RIGHT) * _share(x, first, last)
        return across, HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * _share(y, low, high)

    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_label(chart)}"{attributes}>'
    areas = [_area(line, line.x or chart.x, place, number) for number, line in enumerate(chart.lines) if line.low]
    lines = [
        _path(points, f"line{number % len(COLOURS)}")
        for number, line in enumerate(chart.lines)
        for points in _pieces(line.x or chart.x, line.values, place)
    ]
    return "".join((head, _axes(chart, low, high), *areas, *lines, "</svg>"))


def style_rules(colours: Sequence[str]) -> str:
    """Return the CSS of pictures whose lines have these colours."""
    return "\n".join(
        (
            ".frame, svg polyline { fill: none; }",
            "svg polyline { stroke-width: 1.6; }",
            *(
                f"svg .line{place} {{ stroke: {colour}; }} svg .line{place}.point, .area{place} {{ fill: {colour}; }} "
                f".area{place} {{ fill-opacity: .14; }} .name{place} {{ color: {colour}; fill: {colour}; }}"
                for place, colour in enumerate(colours)
            ),
        )
    )


def _range(chart: Chart) -> tuple[float, float]:
    places = [*chart.x, *(x for line in chart.lines for x in line.x)]
    return min(places), max(places)


def _share(value: float, low: float, high: float) -> float:
    """Return where a value lies between two bounds, 0 to 1. Halves, because a difference of floats may be infinite."""
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span else 0.0


def _label(chart: Chart) -> str:
    newest = ", ".join(f"{line.name} {number(known_values(line.values)[-1])}" for line in chart.known())
    return html.escape(f"{chart.title} by {chart.x_name}. Newest: {newest}.")


def _axes(chart: Chart, low: float, high: float) -> str:
    bottom = HEIGHT - _BOTTOM
    first, last = _range(chart)
    texts = [
        (_LEFT - 4, _TOP + 8, "end", number(high)),
        (_LEFT - 4, bottom, "end", number(low)),
        (_LEFT, HEIGHT - 5, "start", f"{chart.x_name} {number(first)}"),
        (WIDTH - _RIGHT, HEIGHT - 5, "end", number(last)),
    ]
    labels = (f'<text x="{x}" y="{y}" text-anchor="{side}">{text}</text>' for x, y, side, text in texts)
    frame = f'<path class="frame" d="M{_LEFT} {_TOP}V{bottom}H{WIDTH - _RIGHT}"/>'
    return frame + "".join(labels)


def _area(line: Line, x: Sequence[float], place: Place, number: int) -> str:
    edges = [(at, low, high) for at, low, high in zip(x, line.low, line.high, strict=True) if None not in (low, high)]
    forth = [place(at, high) for at, _, high in edges if high is not None]
    back = [place(at, low) for at, low, _ in reversed(edges) if low is not None]
    return f'<polygon class="area{number % len(COLOURS)}" points="{_points((*forth, *back))}"/>'


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
