"""Picture of a study as one SVG: accuracy by each cost, a line and a confidence band per strategy."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from replaybuf.lab.study.curves import Band
from replaybuf.lab.study.report import AXES, StudyResult
from replaybuf.report.charts import number

COLOURS = ("#0b6b57", "#b4542a", "#3f5fb0", "#8c4a8f", "#6b6b1f", "#4b7c8c", "#c28a00", "#a3264b")
PANEL, HEIGHT = 360, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 16, 40, 44
_LEGEND = 18
"""Height of one line of the legend."""
_TICKS = 4
MARGIN = 0.25
"""Room above and below the lines, as a share of their range. Two seeds have bands that would flatten all lines."""


def draw_study(result: StudyResult) -> str:
    """Return the SVG: one panel per cost, side by side, with the same accuracies."""
    titles = [strategy.title for strategy in result.strategies]
    bands = [band for strategy in result.strategies for band in strategy.bands.values()]
    means = [mean for band in bands for mean in band.mean]
    margin = MARGIN * (max(means) - min(means))
    low, high = max(0.0, min(means) - margin), min(1.0, max(means) + margin)
    width, height = PANEL * len(AXES), HEIGHT + _LEGEND * len(titles)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(_label(result))}" font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for place, (axis, name) in enumerate(AXES.items()):
        panel = _Panel(place * PANEL, low, high if high > low else low + 1.0, result, axis)
        parts += [*panel.axes(name), *panel.bands()]
    for place, title in enumerate(titles):
        y = HEIGHT + _LEGEND * place
        colour = COLOURS[place % len(COLOURS)]
        parts.append(f'<rect x="{_LEFT}" y="{y - 8}" width="16" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + 22}" y="{y}" fill="#1c1f1d">{html.escape(title)}</text>')
    return "\n".join((*parts, "</svg>\n"))


class _Panel:
    """One chart whose left edge is at `x0`."""

    def __init__(self, x0: int, low: float, high: float, result: StudyResult, axis: str) -> None:
        self._x0, self._low, self._high = x0, low, high
        self._bands = [strategy.bands[axis] for strategy in result.strategies]
        self._last = max(band.cost[-1] for band in self._bands) or 1.0

    def axes(self, name: str) -> Iterator[str]:
        """Yield frame, ticks and names."""
        left, right, bottom = self._x0 + _LEFT, self._x0 + PANEL - _RIGHT, HEIGHT - _BOTTOM
        yield f'<text x="{left}" y="{_TOP - 16}" font-weight="bold" fill="#1c1f1d">accuracy by {name}</text>'
        for tick in range(_TICKS + 1):
            share = tick / _TICKS
            accuracy, cost = self._low + share * (self._high - self._low), share * self._last
            x, y = self._place(cost, accuracy)
            yield f'<path d="M{left} {y:.1f}H{right}" stroke="#dedfd8" fill="none"/>'
            yield f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end" fill="#5b615c">{accuracy:.2f}</text>'
            yield f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle" fill="#5b615c">{_short(cost)}</text>'

    def bands(self) -> Iterator[str]:
        """Yield area and line of each strategy; all areas first, so that none hides a line."""
        for place, band in enumerate(self._bands):
            if points := self._area(band):
                yield f'<polygon points="{points}" fill="{COLOURS[place % len(COLOURS)]}" fill-opacity="0.15"/>'
        for place, band in enumerate(self._bands):
            line = self._points(band.cost, band.mean)
            colour = COLOURS[place % len(COLOURS)]
            yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>'

    def _area(self, band: Band) -> str:
        edges = [edge for edge in (band.low, band.high) if None not in edge]
        if len(edges) < 2:  # one seed has no band
            return ""
        low, high = ([value for value in edge if value is not None] for edge in edges)
        return f"{self._points(band.cost, high)} {self._points(band.cost[::-1], low[::-1])}"

    def _points(self, costs: Sequence[float], accuracies: Sequence[float]) -> str:
        places = (self._place(cost, accuracy) for cost, accuracy in zip(costs, accuracies, strict=True))
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)

    def _place(self, cost: float, accuracy: float) -> tuple[float, float]:
        inside = min(max(accuracy, self._low), self._high)  # a band may be wider than the picture
        up = (inside - self._low) / (self._high - self._low)
        across = (PANEL - _LEFT - _RIGHT) * cost / self._last
        return self._x0 + _LEFT + across, HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * up


def _short(cost: float) -> str:
    """Write a cost in few characters."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if cost >= 10 * size:
            return f"{cost / size:.0f}{unit}"
    return number(cost)


def _label(result: StudyResult) -> str:
    final = ", ".join(f"{strategy.title} {strategy.final.mean:.3f}" for strategy in result.strategies)
    return f"Accuracy on held-out problems by cost. After the last step: {final}."
