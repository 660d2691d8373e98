"""Report of a finished demo: `report.json`, its figures as rows of text, and the file of its sessions.

Each start is a session. It appends its phases, peaks and outcome to the file, also before it is killed.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from replaybuf.errors import NotFound
from replaybuf.lab.demo.changes import Change, paired_change, window_change
from replaybuf.launch.progress import (
    Evaluation,
    GroupCounts,
    LineReader,
    Progress,
    Staleness,
    TrainerLine,
    Waiting,
)
from replaybuf.launch.view import clock, megabytes, percent, whole_seconds

NumberT = TypeVar("NumberT", int, float)
KILLED = "killed"
"""Outcome of a session that wrote no other outcome."""
SESSION_EVERY_S = 5.0
"""Maximum time of a session that `kill -9` leaves out of the report."""


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
    wait_s: list[float]
    train_s: list[float]
    publish_s: list[float]


class GeneratorWaiting(msgspec.Struct, frozen=True):
    """Reports of the generator, and the share of them in which it waited, in all and by reason, 0..1."""

    reports: int
    share: float
    by_reason: dict[str, float]


class Report(msgspec.Struct, frozen=True):
    """One demo, from its first start to its end, resumes included (`sessions`: number of starts).

    `steps`: as the service counts them; `curve`: the steps in the trainer's metrics file. `changes`: accuracy and
    reward with their errors. `staleness_shares`: share of the trained tokens by staleness. `hyperparameters` by part.
    `wall_s` and `phases` sum all sessions; `killed` sessions ended by `kill -9` and lack their last seconds.
    `peak_memory_bytes`: largest resident size of each process; `cpu_s`: its processor seconds.
    """

    seed: int
    steps: int
    wall_s: float
    accuracy: Accuracy
    changes: dict[str, Change]
    staleness: Staleness
    staleness_shares: dict[str, float]
    waiting: Waiting
    generator_waiting: GeneratorWaiting
    phases: dict[str, float]
    peak_memory_bytes: dict[str, int]
    cpu_s: dict[str, float]
    groups: GroupCounts
    trained_tokens: int
    evaluations: list[Evaluation]
    curve: Curve
    hyperparameters: dict[str, dict[str, Any]]
    sessions: int
    killed: int
    cores: int | None
    versions: dict[str, str]

    @property
    def strategy(self) -> str:
        """Name of the strategy of the run."""
        return str(self.hyperparameters["run"]["strategy"])


def build_report(progress: Progress, sessions: Sequence[Session], hyperparameters: dict[str, dict[str, Any]]) -> Report:
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
        changes=_changes(before, after, [line.reward_mean for line in lines]),
        staleness=progress.staleness(),
        staleness_shares=_staleness_shares(lines),
        waiting=progress.waiting(),
        generator_waiting=_generator_waiting(progress),
        phases=_rounded(phases),
        peak_memory_bytes=dict(peaks),
        cpu_s=_rounded(cpu_s),
        groups=progress.group_counts(),
        trained_tokens=sum(line.tokens for line in lines),
        evaluations=progress.evaluations,
        curve=_curve(lines),
        hyperparameters=hyperparameters,
        sessions=len(sessions),
        killed=sum(session.outcome == KILLED for session in sessions),
        cores=os.cpu_count(),
        versions={"replaybuf": version("replaybuf"), "python": platform.python_version()},
    )


def _changes(before: Evaluation, after: Evaluation, rewards: Sequence[float]) -> dict[str, Change]:
    """Return the changes that could be computed, by name."""
    gains = [
        {name: score - greedy[name] for name, score in sampled.items() if name in greedy}
        for sampled, greedy in ((point.sampled_by_problem, point.greedy_by_problem) for point in (before, after))
    ]
    changes = {
        "sampled": paired_change(before.sampled_by_problem, after.sampled_by_problem),
        "greedy": paired_change(before.greedy_by_problem, after.greedy_by_problem),
        "sampled - greedy": paired_change(*gains),
        "reward": window_change(rewards),
    }
    return {name: change for name, change in changes.items() if change is not None}


def _staleness_shares(lines: Sequence[TrainerLine]) -> dict[str, float]:
    tokens = Counter[str]()
    for line in lines:
        tokens.update({age: share.loss_tokens for age, share in line.by_staleness.items()})
    return {age: count / tokens.total() for age, count in sorted(tokens.items())}


def _generator_waiting(progress: Progress) -> GeneratorWaiting:
    reports, held_back = len(progress.generated), progress.held_back()
    shares = {reason: count / reports for reason, count in held_back.most_common()}
    return GeneratorWaiting(reports, sum(shares.values()), shares)


def _curve(lines: Sequence[TrainerLine]) -> Curve:
    return Curve(
        step=[line.step for line in lines],
        reward=[line.reward_mean for line in lines],
        staleness_mean=[line.staleness_mean for line in lines],
        wait_s=[line.wait_s for line in lines],
        train_s=[line.train_s for line in lines],
        publish_s=[line.publish_s for line in lines],
    )


def accuracy_rows(report: Report) -> list[list[str]]:
    """Return the accuracy with its errors as rows of cells, heading first, with one column for each evaluation."""
    last = report.steps
    when = {point.step: f"step {point.step}" if point.step < last else "after" for point in report.evaluations} | {
        0: "before"
    }
    return [
        ["held-out accuracy", *(when[point.step] for point in report.evaluations)],
        ["sampled, T = 1", *(_with_error(point.sampled, point.sampled_error) for point in report.evaluations)],
        ["greedy", *(_with_error(point.greedy, point.greedy_error) for point in report.evaluations)],
    ]


def figure_rows(report: Report) -> list[tuple[str, str]]:
    """Return name and text of each figure."""
    groups = report.groups
    dropped = {reason: count for reason, count in groups.dropped.items() if count}
    killed = f", {report.killed} killed: up to {SESSION_EVERY_S:g} s of each are not counted" if report.killed else ""
    return [
        ("wall time", f"{clock(report.wall_s)} ({_joined(report.phases, clock)})"),
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


def _with_error(share: float | None, error: float | None) -> str:
    return percent(share) if share is None or error is None else f"{100 * share:.1f} ± {100 * error:.1f}%"


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in seconds.items()}


def _joined(values: Mapping[str, NumberT], write: Callable[[NumberT], str]) -> str:
    return ", ".join(f"{name} {write(value)}" for name, value in values.items())


def _in_brackets(values: Mapping[str, NumberT], write: Callable[[NumberT], str]) -> str:
    return f" ({_joined(values, write)})" if values else ""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a session, at `started` (seconds since the epoch), and its outcome.

    It is written repeatedly and the last line counts. `phases`: seconds by phase; `peaks`, `cpu_s`: peak bytes and
    processor seconds by process.
    """

    started: float
    phases: dict[str, float]
    peaks: dict[str, int]
    outcome: str
    cpu_s: dict[str, float] = {}


def append_line(path: Path, line: msgspec.Struct) -> None:
    """Append one JSON line to a file."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def read_sessions(path: Path) -> list[Session]:
    """Read the last line of each session."""
    return list({line.started: line for line in LineReader(path, Session).new_lines()}.values())
