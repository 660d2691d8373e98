"""What the demo measured: `report.json`, the closing table, and the sentences that keep it honest."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TypeVar

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from replaybuf.errors import NotFound
from replaybuf.lab.demo.folder import Request
from replaybuf.lab.demo.progress import KILLED, SESSION_EVERY_S, Evaluation, Progress, Session, TrainerLine, Waited
from replaybuf.lab.demo.view import clock, megabytes, percent, whole_seconds

NumberT = TypeVar("NumberT", int, float)

NOTES = (
    "The model did not start from nothing: before any reinforcement learning, a short supervised warm start on the "
    "training problems brought its sampled accuracy to about 25%. What came after that is due to rewards alone.",
    "Sampled accuracy (temperature 1) rises more than greedy accuracy (temperature 0): with a warm-started model "
    "of this size, reinforcement learning mostly sharpens what the model can already do.",
    "Accuracy is the share of completions that the environment's own scorer gives full marks, on held-out problems "
    "that are never trained on.",
)
"""Said wherever the figures are shown."""


class Pair(msgspec.Struct, frozen=True):
    """A figure before the first step and after the last, 0..1."""

    before: float
    after: float

    @property
    def gain(self) -> float:
        """After minus before."""
        return self.after - self.before


class Accuracy(msgspec.Struct, frozen=True):
    """Held-out accuracy: sampled at temperature 1, and greedy."""

    sampled: Pair
    greedy: Pair


class Staleness(msgspec.Struct, frozen=True):
    """Staleness of the rollouts at use, in policy versions, over all steps."""

    mean: float
    max: int


class Waiting(msgspec.Struct, frozen=True):
    """How long the trainer waited for batches: seconds, share of its steps' time, and share by reason, 0..1."""

    seconds: float
    share: float
    by_reason: dict[str, float]


class GroupCounts(msgspec.Struct, frozen=True):
    """Groups of the run at its end; `dropped` and `rejected` by reason."""

    stored: int
    used: int
    live: int
    dropped: dict[str, int]
    rejected: dict[str, int]


class Curve(msgspec.Struct, frozen=True):
    """Figures of each step, lists of equal length; seconds for `wait_s`, `train_s`, `publish_s`."""

    step: list[int]
    reward: list[float]
    staleness_mean: list[float]
    staleness_max: list[int]
    wait_s: list[float]
    train_s: list[float]
    publish_s: list[float]


class Report(msgspec.Struct, frozen=True):
    """One demo, from its first start to its end, resumes included (`sessions`: how many starts it took).

    `steps`: of the run, as the service counts them; `curve` has those whose figures the trainer wrote down.
    `wall_s` and `phases` add up all starts; of the `killed` ones, ended by `kill -9`, the last seconds are missing.
    `peak_memory_bytes`: largest resident size of each process; `cpu_s`: processor seconds it used.
    """

    seed: int
    steps: int
    wall_s: float
    accuracy: Accuracy
    staleness: Staleness
    waiting: Waiting
    phases: dict[str, float]
    peak_memory_bytes: dict[str, int]
    cpu_s: dict[str, float]
    groups: GroupCounts
    trained_tokens: int
    evaluations: list[Evaluation]
    curve: Curve
    sessions: int
    killed: int
    cores: int | None
    versions: dict[str, str]
    notes: tuple[str, ...] = NOTES


def build_report(request: Request, progress: Progress, sessions: Sequence[Session]) -> Report:
    """Put the report together from all that was measured. Raises `NotFound` where the accuracy was not."""
    before, after, lines = progress.before, progress.after, progress.ordered
    if before is None or before.greedy is None or after is None or after.greedy is None:
        raise NotFound("accuracy was not measured before and after the training; start the demo anew with --overwrite")
    phases = _summed(session.phases for session in sessions)
    return Report(
        seed=request.seed,
        steps=progress.state["step"],
        wall_s=round(sum(phases.values()), 2),
        accuracy=Accuracy(Pair(before.sampled, after.sampled), Pair(before.greedy, after.greedy)),
        staleness=_staleness(lines),
        waiting=_waiting(progress.waited()),
        phases={name: round(seconds, 2) for name, seconds in phases.items()},
        peak_memory_bytes=_peaks(sessions),
        cpu_s={name: round(seconds, 2) for name, seconds in _summed(session.cpu_s for session in sessions).items()},
        groups=_groups(progress),
        trained_tokens=sum(line.tokens for line in lines),
        evaluations=progress.evaluations,
        curve=_curve(lines),
        sessions=len(sessions),
        killed=sum(session.outcome == KILLED for session in sessions),
        cores=os.cpu_count(),
        versions={"replaybuf": version("replaybuf"), "python": platform.python_version()},
    )


def _staleness(lines: Sequence[TrainerLine]) -> Staleness:
    return Staleness(
        mean=sum(line.staleness_mean for line in lines) / max(1, len(lines)),
        max=max((line.staleness_max for line in lines), default=0),
    )


def _waiting(waited: Waited) -> Waiting:
    return Waiting(seconds=waited.seconds, share=waited.share, by_reason=waited.shares())


def _summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        for name, seconds in part.items():
            sums[name] += seconds
    return dict(sums)


def _peaks(sessions: Sequence[Session]) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for session in sessions:
        for name, size in session.peaks.items():
            peaks[name] = max(peaks.get(name, 0), size)
    return peaks


def _groups(progress: Progress) -> GroupCounts:
    groups = progress.state["groups"]
    dropped = dict(groups["evicted"])
    if groups["dead_lettered"]:
        dropped["dead_lettered"] = groups["dead_lettered"]
    return GroupCounts(
        stored=groups["stored"],
        used=groups["in_batches"] + groups["retired"],
        live=groups["live"],
        dropped=dropped,
        rejected=dict(groups["rejected"]),
    )


def _curve(lines: Sequence[TrainerLine]) -> Curve:
    return Curve(
        step=[line.step for line in lines],
        reward=[line.reward_mean for line in lines],
        staleness_mean=[line.staleness_mean for line in lines],
        staleness_max=[line.staleness_max for line in lines],
        wait_s=[line.wait_s for line in lines],
        train_s=[line.train_s for line in lines],
        publish_s=[line.publish_s for line in lines],
    )


def headline(report: Report) -> str:
    """Tell the result in one sentence."""
    sampled, greedy = report.accuracy.sampled, report.accuracy.greedy
    return (
        f"sampled accuracy {percent(sampled.before)} → {percent(sampled.after)}, "
        f"greedy {percent(greedy.before)} → {percent(greedy.after)}, "
        f"{report.steps} steps in {clock(report.wall_s)}"
    )


def rows(report: Report) -> list[tuple[str, str]]:
    """List the closing table: name and text of each figure."""
    groups, waiting = report.groups, report.waiting
    return [
        ("wall time", f"{clock(report.wall_s)} ({_joined(report.phases, clock)})"),
        ("staleness", f"mean {report.staleness.mean:.2f}, max {report.staleness.max}"),
        ("trainer waited", f"{percent(waiting.share)} of its steps' time" + _in_brackets(waiting.by_reason)),
        (
            "groups",
            f"{groups.stored:,} stored, {groups.used:,} used, {sum(groups.dropped.values()):,} dropped"
            f"{_counts(groups.dropped)}, {groups.live:,} left",
        ),
        ("tokens trained", f"{report.trained_tokens:,}"),
        ("peak memory", _joined(report.peak_memory_bytes, megabytes) or "not known on this system"),
        ("processor time", _joined(report.cpu_s, whole_seconds) or "not known on this system"),
        *([("starts", f"{report.sessions}{_killed(report)}")] if report.sessions > 1 else []),
    ]


def print_report(console: Console, report: Report, paths: Sequence[str]) -> None:
    """Print the closing table, the notes and where the files lie."""
    console.print(
        Group(Text(headline(report), style="bold"), _accuracy_table(report), Text(), _figures_table(report), Text())
    )
    for note in report.notes:
        console.print(f"- {note}", style="dim", highlight=False)
    console.print()
    for path in paths:
        console.print(path, highlight=False, soft_wrap=True)


def accuracy_rows(report: Report) -> list[list[str]]:
    """Tabulate the accuracy, heading first: one column for each evaluation."""
    return [
        ["held-out accuracy", *(_when(evaluation, report) for evaluation in report.evaluations)],
        ["sampled, T = 1", *(percent(evaluation.sampled) for evaluation in report.evaluations)],
        ["greedy", *(percent(evaluation.greedy) for evaluation in report.evaluations)],
    ]


def _accuracy_table(report: Report) -> RenderableType:
    heading, *body = accuracy_rows(report)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for position, name in enumerate(heading):
        table.add_column(name, justify="right" if position else "left", header_style="dim")
    for row in body:
        table.add_row(*row)
    return table


def _figures_table(report: Report) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in rows(report):
        table.add_row(name, text)
    return table


def _when(evaluation: Evaluation, report: Report) -> str:
    if evaluation.step == 0:
        return "before"
    return "after" if evaluation.step >= report.steps else f"step {evaluation.step}"


def _killed(report: Report) -> str:
    return f", {report.killed} killed: up to {SESSION_EVERY_S:g} s of each are not counted" if report.killed else ""


def _joined(values: Mapping[str, NumberT], write: Callable[[NumberT], str]) -> str:
    return ", ".join(f"{name} {write(value)}" for name, value in values.items())


def _in_brackets(shares: Mapping[str, float]) -> str:
    told = {reason: share for reason, share in shares.items() if share >= 0.0005}
    return f" ({_joined(told, percent)})" if told else ""


def _counts(dropped: Mapping[str, int]) -> str:
    told = {reason: count for reason, count in dropped.items() if count}
    return f" ({_joined(told, str)})" if told else ""
