"""Draw a study: the trainer's time, use of groups, staleness, buffer, lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replaybuf.errors import MissingExtra
from replaybuf.lab.demo.picture import BLUE, GREEN, LIGHT, ORANGE, QUIET, RED, STYLE
from replaybuf.lab.simulate.figures import BINS, Figures, Lengths
from replaybuf.lab.simulate.report import Study, title_of

COLOURS = (BLUE, ORANGE, GREEN, RED, "#7a5ea8", QUIET)
WASTE_COLOURS = (RED, ORANGE, QUIET, "#7a5ea8")


def draw(study: Study, path: Path) -> None:
    """Write the picture as PNG, 1800 x 1200 pixels. Raises `MissingExtra` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # an optional dependency, and slow to import
        from matplotlib.figure import Figure
        from matplotlib.style import context
    except ModuleNotFoundError as error:
        raise MissingExtra("the picture of replaybuf simulate", "demo") from error
    with context(STYLE):
        figure = Figure(figsize=(12, 8), dpi=150, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 3)
        _trainer(axes[0, 0], study.runs)
        _groups(axes[0, 1], study.runs)
        _staleness(axes[0, 2], study.runs)
        _buffer(axes[1, 0], study.runs)
        kinds = [("generated_lengths", ":"), ("used_lengths", "-")]
        _lengths(axes[1, 1], study.runs, "Lengths: generated (dotted), used", kinds)
        _lengths(axes[1, 2], study.runs, "Lengths: dropped", [("dropped_lengths", "-")])
        handles = [axes[1, 0].plot([], [], color=_colour(n), linewidth=3)[0] for n in range(len(study.runs))]
        labels = [", ".join(title_of(run).split("\n")) for run in study.runs]
        figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.05, 0.99), ncols=min(3, len(labels)))
        figure.subplots_adjust(left=0.06, right=0.98, top=0.86, bottom=0.07, hspace=0.34, wspace=0.24)
        figure.savefig(path)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _stacked(axis: Any, runs: Sequence[Figures], layers: Sequence[tuple[str, str, list[float]]]) -> None:
    """Draw one bar per run of layers (label, colour, share of each run); tick labels have the run's colour."""
    at, below = np.arange(len(runs)), np.zeros(len(runs))
    for label, colour, shares in layers:
        axis.bar(at, shares, 0.6, bottom=below, color=colour, label=label)
        below += shares
    axis.set_xticks(at, [str(number + 1) for number in range(len(runs))])
    for number, tick in enumerate(axis.get_xticklabels()):
        tick.set_color(_colour(number))
        tick.set_fontweight("bold")
    axis.set_ylim(0, 1.3)
    axis.set_yticks([0, 0.5, 1.0], ["0%", "50%", "100%"])
    axis.legend(loc="upper left", ncols=3, fontsize=9, handlelength=1.2, columnspacing=1.0)


def _trainer(axis: Any, runs: Sequence[Figures]) -> None:
    axis.set_title("The trainer's time")
    layers = [
        ("trains", BLUE, [run.train_share for run in runs]),
        ("publishes", LIGHT, [run.publish_share for run in runs]),
        ("waits", ORANGE, [run.wait_share for run in runs]),
    ]
    _stacked(axis, runs, layers)


def _groups(axis: Any, runs: Sequence[Figures]) -> None:
    axis.set_title("Generated tokens")
    reasons = sorted({reason for run in runs for reason in run.waste})
    shares = {
        r: [run.waste[r].tokens / run.generated_tokens if r in run.waste else 0.0 for run in runs] for r in reasons
    }
    used = [1 - run.waste_share for run in runs]
    wasted = [(r, WASTE_COLOURS[n % len(WASTE_COLOURS)], shares[r]) for n, r in enumerate(reasons)]
    _stacked(axis, runs, [("used or live", GREEN, used), *wasted])


def _staleness(axis: Any, runs: Sequence[Figures]) -> None:
    axis.set_title("Staleness at use, in policy versions")
    width = 0.8 / len(runs)
    for number, run in enumerate(runs):
        uses = sum(run.staleness.values()) or 1
        ages = np.array(list(run.staleness), float)
        shares = [count / uses for count in run.staleness.values()]
        axis.bar(ages + (number - (len(runs) - 1) / 2) * width, shares, width, color=_colour(number))
    axis.set_ylabel("share of uses")


def _buffer(axis: Any, runs: Sequence[Figures]) -> None:
    axis.set_title("Live groups")
    for number, run in enumerate(runs):
        hours = np.array(run.buffer.t_s) / 3600
        axis.plot(hours, run.buffer.groups, color=_colour(number), linewidth=0.8, alpha=0.8)
    axis.set_xlabel("virtual hours")
    axis.set_ylim(0)


def _lengths(axis: Any, runs: Sequence[Figures], title: str, kinds: Sequence[tuple[str, str]]) -> None:
    """Draw the histogram of lengths of each kind (name of the figure, line style) and run."""
    axis.set_title(title)
    middles = np.sqrt(BINS[1:] * BINS[:-1])
    for number, run in enumerate(runs):
        for name, style in kinds:
            lengths: Lengths = getattr(run, name)
            shares = np.array(lengths.bins) / max(1, lengths.groups)
            axis.plot(middles, shares, color=_colour(number), linestyle=style, linewidth=1.5)
    seen = np.flatnonzero(np.sum([run.generated_lengths.bins for run in runs], axis=0))
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    if len(seen):
        axis.set_xlim(BINS[seen[0]], BINS[seen[-1] + 1])
    axis.set_xlabel("tokens per rollout")
    axis.set_ylabel("share of groups")
