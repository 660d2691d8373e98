"""What is known about the demo while it runs: metrics files, the run's state, accuracy, processes.

Everything the view and the report show is read from here. The trainer's and the generator's metrics files are JSON
lines that only grow; a resumed trainer repeats the steps after its checkpoint, which voids what stood there before.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from replaybuf.lab.demo.processes import ProcessState

KILLED = "killed"
"""How a start ended of which nothing was heard any more."""
SESSION_EVERY_S = 5.0
"""How much of a start's time `kill -9` may leave out of the report."""
RECENT_STEPS = 40
RECENT_LINES = 4

StructT = TypeVar("StructT", bound=msgspec.Struct)


class TrainerLine(msgspec.Struct, frozen=True, kw_only=True):
    """One step as the trainer logs it; `time` in seconds since the epoch, `wait_reasons` seconds by reason."""

    step: int
    version: int = 0
    loss: float = 0.0
    reward_mean: float = 0.0
    grad_norm: float = 0.0
    clip_fraction: float = 0.0
    tokens: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    wait_s: float = 0.0
    wait_reasons: dict[str, float] = {}
    train_s: float = 0.0
    publish_s: float = 0.0
    tokens_per_s: float = 0.0
    time: float = 0.0


class GeneratorLine(msgspec.Struct, frozen=True, kw_only=True):
    """The generator's counters since its start, at one moment; `time` in seconds since the epoch."""

    time: float = 0.0
    generated_tokens: int = 0
    groups: int = 0


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy on the held-out problems, 0..1, with `samples` completions per problem at T = 1 and one greedy."""

    step: int
    problems: int
    samples: int
    sampled: float
    greedy: float | None = None


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the demo, at `started` (seconds since the epoch), and how it ended.

    It is written again as it goes on, and the last line counts: one that says `KILLED` was the last before `kill -9`.
    `phases`: seconds by phase; `peaks`, `cpu_s`: peak bytes and processor seconds by process.
    """

    started: float
    phases: dict[str, float]
    peaks: dict[str, int]
    outcome: str
    cpu_s: dict[str, float] = {}


def starts(lines: Iterable[Session]) -> list[Session]:
    """Keep the last line of each start."""
    return list({line.started: line for line in lines}.values())


class LineReader(Generic[StructT]):
    """Read the lines that a growing JSON-lines file gained since the last call."""

    def __init__(self, path: Path, shape: type[StructT]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(shape)
        self._offset = 0

    def new_lines(self) -> list[StructT]:
        """Return the new complete lines; a half-written last line is left for the next call, a broken one skipped.

        A line is broken where its writer was killed in the middle and went on in the same file afterwards.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete, newline, _ = data.rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        return [line for raw in complete.splitlines() if (line := self._decoded(raw)) is not None]

    def _decoded(self, raw: bytes) -> StructT | None:
        try:
            return self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


def append_line(path: Path, line: msgspec.Struct) -> None:
    """Add one JSON line to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


class Phases:
    """Wall time by phase, in the order in which they came."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.current = ""
        self._since = time.monotonic()

    def enter(self, name: str) -> None:
        """End the phase that is on and begin another; the same name again goes on adding to it."""
        self.leave()
        self.current = name

    def add_up(self) -> None:
        """Add the time of the phase that is on, up to now."""
        now = time.monotonic()
        if self.current:
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + now - self._since
        self._since = now

    def leave(self) -> None:
        """End the phase that is on."""
        self.add_up()
        self.current = ""


@dataclasses.dataclass(slots=True)
class Progress:
    """All that is known now. Owned by the event loop; the view only reads it."""

    seed: int
    total_steps: int
    phases: Phases = dataclasses.field(default_factory=Phases)
    note: str = ""
    steps: dict[int, TrainerLine] = dataclasses.field(default_factory=dict)
    first_step: int = 0
    generated: list[GeneratorLine] = dataclasses.field(default_factory=list)
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    processes: list[ProcessState] = dataclasses.field(default_factory=list)
    peaks: dict[str, int] = dataclasses.field(default_factory=dict)
    cpu_s: dict[str, float] = dataclasses.field(default_factory=dict)

    def add_steps(self, lines: Iterable[TrainerLine]) -> None:
        """Take lines of the trainer. A line voids what an earlier start wrote of its step and the steps after it."""
        for line in lines:
            for voided in [step for step in self.steps if step >= line.step]:
                del self.steps[voided]
            self.steps[line.step] = line

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Take an evaluation; the last one of a step counts."""
        others = [other for other in self.evaluations if other.step != evaluation.step]
        self.evaluations = sorted([*others, evaluation], key=lambda one: one.step)

    def add_processes(self, found: Sequence[ProcessState]) -> None:
        """Take a look at the processes; peak and processor time of each name are kept after it has ended."""
        self.processes = list(found)
        for process in found:
            if process.cpu_s is not None:
                self.cpu_s[process.name] = process.cpu_s
            if process.peak_bytes is not None:
                self.peaks[process.name] = max(self.peaks.get(process.name, 0), process.peak_bytes)

    @property
    def ordered(self) -> list[TrainerLine]:
        """Lines of the trainer in the order of steps, one per step."""
        return [self.steps[step] for step in sorted(self.steps)]

    @property
    def done_steps(self) -> int:
        """Steps the trainer has done."""
        return max(self.steps, default=-1) + 1

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the training time left, from the recent steps; None while there are too few."""
        recent = [line.time for line in self.ordered[-RECENT_STEPS:] if line.step >= self.first_step]
        if len(recent) < 3 or recent[-1] <= recent[0]:
            return None
        return (self.total_steps - self.done_steps) * (recent[-1] - recent[0]) / (len(recent) - 1)

    @property
    def before(self) -> Evaluation | None:
        """Accuracy before the first step."""
        return next((evaluation for evaluation in self.evaluations if evaluation.step == 0), None)

    @property
    def after(self) -> Evaluation | None:
        """Accuracy after the last step; None before it was measured, greedy too."""
        last = self.evaluations[-1] if self.evaluations else None
        return last if last and last.step >= self.total_steps and last.greedy is not None else None

    @property
    def generated_tokens_per_s(self) -> float | None:
        """Completion tokens generated per second lately."""
        recent = self.generated[-RECENT_LINES:]
        if len(recent) < 2 or recent[-1].time <= recent[0].time:
            return None
        return (recent[-1].generated_tokens - recent[0].generated_tokens) / (recent[-1].time - recent[0].time)

    @property
    def trained_tokens_per_s(self) -> float | None:
        """Tokens trained per second lately, waiting included."""
        recent = [line for line in self.ordered[-RECENT_STEPS:] if line.step >= self.first_step]
        if len(recent) < 2 or recent[-1].time <= recent[0].time:
            return None
        return sum(line.tokens for line in recent[1:]) / (recent[-1].time - recent[0].time)

    def waited(self) -> Waited:
        """Sum up how long the trainer waited for batches, and why."""
        return waited(self.ordered)


@dataclasses.dataclass(frozen=True, slots=True)
class Waited:
    """The trainer's waiting: `seconds` in all and by reason, of `busy_s + seconds` that its steps took."""

    seconds: float
    busy_s: float
    by_reason: dict[str, float]

    @property
    def share(self) -> float:
        """Part of the steps' time spent waiting for a batch, 0..1."""
        return self._part(self.seconds)

    def shares(self) -> dict[str, float]:
        """Part of the steps' time by reason, 0..1, largest first."""
        return {reason: self._part(s) for reason, s in sorted(self.by_reason.items(), key=lambda item: -item[1])}

    def _part(self, seconds: float) -> float:
        return seconds / (self.seconds + self.busy_s) if self.seconds else 0.0


def waited(lines: Sequence[TrainerLine]) -> Waited:
    """Sum up the waiting of some steps. Time inside a request that was answered with a batch counts as `fetching`."""
    by_reason: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        for reason, seconds in line.wait_reasons.items():
            by_reason[reason] += seconds
        unexplained = line.wait_s - sum(line.wait_reasons.values())
        if unexplained > 0:
            by_reason["fetching"] += unexplained
    return Waited(
        seconds=sum(line.wait_s for line in lines),
        busy_s=sum(line.train_s + line.publish_s for line in lines),
        by_reason=dict(by_reason),
    )
