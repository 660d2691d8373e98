"""Report of a finished demo: `report.json`, and its figures as rows of text."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TypeVar

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from replaybuf.errors import NotFound
from replaybuf.launch.progress import (
    KILLED,
    SESSION_EVERY_S,
    Evaluation,
    GroupCounts,
    Progress,
    Session,
    Staleness,
    TrainerLine,
    Waiting,
)
from replaybuf.launch.text import clock, megabytes, percent, whole_seconds

NumberT = TypeVar("NumberT", int, float)


class Pair(msgspec.Struct, frozen=True):
    """A figure before the first step and after the last, 0..1."""

    before: float
    after: float


class Accuracy(msgspec.Struct, frozen=True):
    """Held-out accuracy: sampled at temperature 1, and greedy."""

    sampled: Pair
    greedy: Pair


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
    """One demo, from its first start to its end, resumes included (`sessions`: number of starts).

    `steps`: as the service counts them; `curve`: the steps in the trainer's metrics file. `wall_s` and `phases` sum
    all sessions; `killed` sessions ended by `kill -9` and lack their last seconds. `peak_memory_bytes`: largest
    resident size of each process; `cpu_s`: its processor seconds.
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
    notes: tuple[str, ...]


def build_report(progress: Progress, sessions: Sequence[Session]) -> Report:
    """Return the report of a finished demo. Raises `NotFound` if the accuracy was not measured."""
    before, after, lines = progress.before, progress.after, progress.lines
    if before is None or before.greedy is None or after is None or after.greedy is None:
        raise NotFound("accuracy was not measured before and after the training; start again with --overwrite")
    phases, cpu_s, peaks = Counter[str](), Counter[str](), Counter[str]()
    for session in sessions:
        phases.update(session.phases)
        cpu_s.update(session.cpu_s)
        peaks |= Counter(session.peaks)
    return Report(
        seed=progress.seed,
        steps=progress.state["step"],
        wall_s=round(sum(phases.values()), 2),
        accuracy=Accuracy(Pair(before.sampled, after.sampled), Pair(before.greedy, after.greedy)),
        staleness=progress.staleness(),
        waiting=progress.waiting(),
        phases=_rounded(phases),
        peak_memory_bytes=dict(peaks),
        cpu_s=_rounded(cpu_s),
        groups=progress.group_counts(),
        trained_tokens=sum(line.tokens for line in lines),
        evaluations=progress.evaluations,
        curve=_curve(lines),
        sessions=len(sessions),
        killed=sum(session.outcome == KILLED for session in sessions),
        cores=os.cpu_count(),
        versions={"replaybuf": version("replaybuf"), "python": platform.python_version()},
        notes=_notes(before, after),
    )


def headline(report: Report) -> str:
    """Return the result in one sentence."""
    sampled, greedy = report.accuracy.sampled, report.accuracy.greedy
    return (
        f"sampled accuracy {percent(sampled.before)} → {percent(sampled.after)}, "
        f"greedy {percent(greedy.before)} → {percent(greedy.after)}, "
        f"{report.steps} steps in {clock(report.wall_s)}"
    )


def accuracy_rows(report: Report) -> list[list[str]]:
    """Return the accuracy as rows of cells, heading first, with one column for each evaluation."""
    last = report.steps
    when = {one.step: f"step {one.step}" if one.step < last else "after" for one in report.evaluations} | {0: "before"}
    return [
        ["held-out accuracy", *(when[one.step] for one in report.evaluations)],
        ["sampled, T = 1", *(percent(one.sampled) for one in report.evaluations)],
        ["greedy", *(percent(one.greedy) for one in report.evaluations)],
    ]


def figure_rows(report: Report) -> list[tuple[str, str]]:
    """Return name and text of each figure."""
    groups, waiting = report.groups, report.waiting
    reasons = {reason: share for reason, share in waiting.by_reason.items() if share >= 0.0005}
    dropped = {reason: count for reason, count in groups.dropped.items() if count}
    killed = f", {report.killed} killed: up to {SESSION_EVERY_S:g} s of each are not counted" if report.killed else ""
    return [
        ("wall time", f"{clock(report.wall_s)} ({_joined(report.phases, clock)})"),
        ("staleness", f"mean {report.staleness.mean:.2f}, max {report.staleness.max}"),
        ("trainer waited", f"{percent(waiting.share)} of its steps' time{_in_brackets(reasons, percent)}"),
        (
            "groups",
            f"{groups.stored:,} stored, {groups.used:,} used, {sum(dropped.values()):,} dropped"
            f"{_in_brackets(dropped, str)}, {groups.live:,} left",
        ),
        ("tokens trained", f"{report.trained_tokens:,}"),
        ("peak memory", _joined(report.peak_memory_bytes, megabytes) or "not known on this system"),
        ("processor time", _joined(report.cpu_s, whole_seconds) or "not known on this system"),
        *([("starts", f"{report.sessions}{killed}")] if report.sessions > 1 else []),
    ]


def print_report(console: Console, report: Report, paths: Sequence[object]) -> None:
    """Print the figures, the notes and the paths of the files."""
    heading, *body = accuracy_rows(report)
    accuracy = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for position, name in enumerate(heading):
        accuracy.add_column(name, justify="right" if position else "left", header_style="dim")
    for row in body:
        accuracy.add_row(*row)
    figures = Table.grid(padding=(0, 2))
    figures.add_column(style="dim", no_wrap=True)
    figures.add_column()
    for name, text in figure_rows(report):
        figures.add_row(name, text)
    console.print(Group(Text(headline(report), style="bold"), accuracy, Text(), figures, Text()))
    for note in report.notes:
        console.print(f"- {note}", style="dim", highlight=False)
    console.print()
    for path in paths:
        console.print(str(path), highlight=False, soft_wrap=True)


def _notes(before: Evaluation, after: Evaluation) -> tuple[str, ...]:
    """Return what a reader must know to judge the figures."""
    sampled, greedy = after.sampled - before.sampled, after.greedy - before.greedy  # type: ignore[operator]
    return (
        "The model did not start from nothing: before any reinforcement learning, a short supervised warm start on "
        f"the training problems brought its sampled accuracy on the held-out problems to {percent(before.sampled)}. "
        "Everything after that comes from rewards only.",
        f"Sampled accuracy (temperature 1) changed by {100 * sampled:+.1f} points, greedy accuracy (temperature 0) by "
        f"{100 * greedy:+.1f} points: if sampled accuracy gains more, reinforcement learning has mostly sharpened "
        "what the model could already do.",
        "Accuracy is the share of completions that get full marks from the environment's own scorer, on held-out "
        "problems that are never trained on.",
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


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in seconds.items()}


def _joined(values: Mapping[str, NumberT], write: Callable[[NumberT], str]) -> str:
    return ", ".join(f"{name} {write(value)}" for name, value in values.items())


def _in_brackets(values: Mapping[str, NumberT], write: Callable[[NumberT], str]) -> str:
    return f" ({_joined(values, write)})" if values else ""
