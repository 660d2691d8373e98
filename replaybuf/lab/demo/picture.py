"""Picture of a demo: reward, held-out accuracy, staleness and the trainer's time over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from replaybuf.lab.demo.report import Report, headline
from replaybuf.launch.text import percent

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
    """Write the picture as PNG, 1800 x 1200 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # optional, and slow to import
    from matplotlib.figure import Figure
    from matplotlib.style import context

    with context(STYLE):
        figure = Figure(figsize=(12, 8), dpi=150, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 2)
        _reward(axes[0, 0], report)
        _accuracy(axes[0, 1], report)
        _staleness(axes[1, 0], report)
        _time(axes[1, 1], report)
        for axis in axes.flat:
            axis.set_xlabel("step")
            axis.set_xlim(0, max(report.steps, 1))
        figure.suptitle(headline(report), x=0.06, y=0.975, ha="left", fontsize=15, fontweight="bold")
        subtitle = f"seed {report.seed}: GRPO, one step off-policy, after a short supervised warm start"
        figure.text(0.06, 0.925, subtitle, color=QUIET)
        figure.subplots_adjust(left=0.06, right=0.98, top=0.86, bottom=0.07, hspace=0.34, wspace=0.16)
        figure.savefig(path)


def rolling(values: Sequence[float], window: int = WINDOW_STEPS) -> Floats:
    """Return the mean of up to `window` values around each value; same length."""
    array = np.asarray(values, np.float64)
    sums = np.concatenate([[0.0], np.cumsum(array)])
    index = np.arange(len(array))
    low = np.maximum(0, index - window // 2)
    high = np.minimum(len(array), index + window // 2 + 1)
    smooth: Floats = (sums[high] - sums[low]) / (high - low)
    return smooth


def _reward(axis: Any, report: Report) -> None:
    curve = report.curve
    axis.set_title("Reward of the trained batch")
    axis.plot(curve.step, curve.reward, color=LIGHT, linewidth=1)
    axis.plot(curve.step, rolling(curve.reward), color=BLUE, linewidth=2.2, label=f"mean of {WINDOW_STEPS} steps")
    axis.legend(loc="lower right")


def _accuracy(axis: Any, report: Report) -> None:
    axis.set_title("Accuracy on held-out problems")
    sampled = [(one.step, one.sampled) for one in report.evaluations]
    greedy = [(one.step, one.greedy) for one in report.evaluations if one.greedy is not None]
    # the label of the first point is below a rising line, so that they do not overlap
    _line(axis, sampled, first_label_y=-18, color=BLUE, marker="o", label="sampled, T = 1")
    _line(axis, greedy, first_label_y=9, color=ORANGE, marker="s", label="greedy")
    axis.set_ylim(0, 1.08)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0%", "25%", "50%", "75%", "100%"])
    axis.legend(loc="lower right")


def _line(
    axis: Any, points: Sequence[tuple[int, float]], *, first_label_y: int, color: str, marker: str, label: str
) -> None:
    """Draw a line through points, with labels at the first and last point; `first_label_y`: offset in points."""
    axis.plot(*zip(*points, strict=True), color=color, marker=marker, label=label, linewidth=2, clip_on=False, zorder=3)
    text = {"textcoords": "offset points", "color": color, "weight": "bold"}
    axis.annotate(percent(points[0][1]), points[0], (0, first_label_y), ha="left", **text)
    axis.annotate(percent(points[-1][1]), points[-1], (0, 9), ha="right", **text)


def _staleness(axis: Any, report: Report) -> None:
    curve = report.curve
    axis.set_title("Staleness at use, in policy versions")
    axis.plot(curve.step, curve.staleness_max, color=RED, linewidth=1, label="largest of a batch")
    axis.fill_between(curve.step, curve.staleness_mean, color=LIGHT, alpha=0.6, linewidth=0)
    axis.plot(curve.step, curve.staleness_mean, color=BLUE, linewidth=1.8, label="mean of a batch")
    top = max(1, report.staleness.max)
    axis.set_ylim(0, top + 0.35)
    axis.set_yticks(range(top + 1))
    axis.legend(loc="lower right")


def _time(axis: Any, report: Report) -> None:
    curve = report.curve
    axis.set_title("Where the trainer's time went, per step")
    layers = [rolling(seconds) for seconds in (curve.train_s, curve.publish_s, curve.wait_s)]
    labels = ["training", "publishing weights", f"waiting for a batch ({percent(report.waiting.share)})"]
    axis.stackplot(curve.step, *layers, labels=labels, colors=[BLUE, GREEN, ORANGE], alpha=0.85)
    axis.set_ylabel("seconds")
    axis.set_ylim(0, float(np.sum(layers, axis=0).max(initial=0.01)) * 1.35)
    axis.legend(loc="upper right", ncols=3, fontsize=9, handlelength=1.2, columnspacing=1.2)
