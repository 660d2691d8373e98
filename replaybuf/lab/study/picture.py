"""Picture of a study as one SVG: accuracy by each cost, a line and a confidence band per strategy."""

from __future__ import annotations

import html

from replaybuf.lab.study.report import AXES, StudyResult
from replaybuf.report.charts import COLOURS, HEIGHT, WIDTH, Chart, Line, draw, style_rules

_TITLE, _LEGEND = 28, 18
"""Height of the titles, and of one line of the legend."""
MARGIN = 0.25
"""Room for bands above and below the lines, as a share of the range of the lines."""
_STYLE = f"svg {{ font: 11px system-ui, sans-serif; }} .frame {{ stroke: #dedfd8; }} {style_rules(COLOURS)}"


def draw_study(result: StudyResult) -> str:
    """Return the SVG: one chart per cost, side by side, and a legend below."""
    titles = [strategy.title for strategy in result.strategies]
    means = [mean for strategy in result.strategies for band in strategy.bands.values() for mean in band.mean]
    low, high = min(means), max(means)
    margin = MARGIN * (high - low)
    width, bottom = WIDTH * len(AXES), _TITLE + HEIGHT
    height = bottom + _LEGEND * (len(titles) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(_label(result))}">',
        f'<style>{_STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for place, (axis, name) in enumerate(AXES.items()):
        left = place * WIDTH
        parts.append(f'<text x="{left + 8}" y="18" font-weight="bold">accuracy by {name}</text>')
        where = f' x="{left}" y="{_TITLE}" width="{WIDTH}" height="{HEIGHT}"'
        parts.append(draw(_chart(result, axis, name, low - margin, high + margin), where))
    for place, title in enumerate(titles):
        y, kind = bottom + _LEGEND * (place + 1), f"name{place % len(COLOURS)}"
        parts.append(f'<text class="{kind}" x="8" y="{y}" font-weight="bold">{html.escape(title)}</text>')
    return "\n".join((*parts, "</svg>\n"))


def _chart(result: StudyResult, axis: str, name: str, low: float, high: float) -> Chart:
    lines = []
    for strategy in result.strategies:
        band = strategy.bands[axis]
        # One seed has no band, and two seeds have one that would flatten all lines.
        lower, upper = (
            [min(max(value, low), high) for value in edge if value is not None] for edge in (band.low, band.high)
        )
        lines.append(Line(strategy.title, band.mean, lower, upper, band.cost))
    return Chart(f"Accuracy by {name}", "", name, [], lines)


def _label(result: StudyResult) -> str:
    final = ", ".join(f"{strategy.title} {strategy.final.mean:.3f}" for strategy in result.strategies)
    return f"Accuracy on held-out problems by cost. After the last step: {final}."
