"""Picture of a demo: reward and held-out accuracy. The page has all charts of the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from replaybuf.lab.demo.findings import headline
from replaybuf.lab.demo.report import Report
from replaybuf.launch.view import percent

Floats = npt.NDArray[np.float64]

WINDOW_STEPS = 15
INK, QUIET, GRID = "#1f2933", "#6b7785", "#e4e8ec"
BLUE, ORANGE, GREEN, RED, LIGHT = "#2563a8", "#d97a1d", "#2f8f5b", "#c2413b", "#a9c4e2"
STYLE = {
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": "#c3cad2",
    "axes.labelcolor": QUIET,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "legend.frameon": False,
}


def draw(report: Report, path: Path) -> None:
    """Write the picture as PNG, 1800 x 750 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # optional, and slow to import
    from matplotlib.figure import Figure
    from matplotlib.style import context

    with context(STYLE):
        figure = Figure(figsize=(12, 5), dpi=150, facecolor="white")
        FigureCanvasAgg(figure)
        for axis, panel in zip(figure.subplots(1, 2), (_reward, _accuracy), strict=True):
            panel(axis, report)
            axis.set_xlabel("step")
            axis.set_xlim(0, max(report.steps, 1))
        figure.suptitle(headline(report, "\n"), x=0.06, y=0.98, ha="left", fontsize=13, fontweight="bold")
        subtitle = f"seed {report.seed}: GRPO, strategy {report.strategy}, after a short supervised warm start"
        figure.text(0.06, 0.84, subtitle, color=QUIET)
        figure.subplots_adjust(left=0.06, right=0.98, top=0.76, bottom=0.11, wspace=0.16)
        figure.savefig(path)


def rolling(values: Sequence[float], window: int = WINDOW_STEPS) -> Floats:
    """Return the mean of up to `window` values around each value; same length."""
    return np.array([part.mean() for part in _windows(values, window)])


def rolling_error(values: Sequence[float], window: int = WINDOW_STEPS) -> Floats:
    """Return the standard error of each rolling mean; 0 for a single value."""
    return np.array(
        [part.std(ddof=1) / len(part) ** 0.5 if len(part) > 1 else 0.0 for part in _windows(values, window)]
    )


def _windows(values: Sequence[float], window: int) -> list[Floats]:
    array = np.asarray(values, np.float64)
    return [array[max(0, i - window // 2) : i + window // 2 + 1] for i in range(len(array))]


def _reward(axis: Any, report: Report) -> None:
    curve = report.curve
    mean, error = rolling(curve.reward), rolling_error(curve.reward)
    axis.set_title("Reward of the trained batch")
    axis.plot(curve.step, curve.reward, color=LIGHT, linewidth=1, label="a batch")
    axis.fill_between(curve.step, mean - error, mean + error, color=BLUE, alpha=0.2, linewidth=0)
    axis.plot(curve.step, mean, color=BLUE, linewidth=2.2, label=f"mean of {WINDOW_STEPS} steps ± standard error")
    axis.legend(loc="lower right")


def _accuracy(axis: Any, report: Report) -> None:
    axis.set_title("Accuracy on held-out problems, ± standard error")
    sampled = [(point.step, point.sampled, point.sampled_error or 0.0) for point in report.evaluations]
    greedy = [
        (point.step, point.greedy, point.greedy_error or 0.0)
        for point in report.evaluations
        if point.greedy is not None
    ]
    # the label of the first point is below a rising line, so that they do not overlap
    _line(axis, sampled, first_label_y=-24, color=BLUE, marker="o", label="sampled, T = 1")
    _line(axis, greedy, first_label_y=15, color=ORANGE, marker="s", label="greedy")
    axis.set_ylim(0, 1.08)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0%", "25%", "50%", "75%", "100%"])
    axis.legend(loc="lower right")


def _line(
    axis: Any, points: Sequence[tuple[int, float, float]], *, first_label_y: int, color: str, marker: str, label: str
) -> None:
    """Draw a line through (step, value, error), and label its ends; `first_label_y`: offset in points."""
    steps, values, errors = zip(*points, strict=True)
    style = {"marker": marker, "linewidth": 2, "capsize": 3, "clip_on": False, "zorder": 3}
    axis.errorbar(steps, values, errors, color=color, label=label, **style)
    text = {"textcoords": "offset points", "color": color, "weight": "bold"}
    axis.annotate(percent(values[0]), (steps[0], values[0]), (0, first_label_y), ha="left", **text)
    axis.annotate(percent(values[-1]), (steps[-1], values[-1]), (0, 15), ha="right", **text)
