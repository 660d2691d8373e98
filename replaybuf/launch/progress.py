"""State of a session: metrics files, state of the run, accuracy, processes. View and report read only this.

The metrics files of trainer and generator are JSON lines that only grow. A resumed trainer repeats the steps after its
checkpoint; its lines replace the earlier lines of these steps.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from replaybuf.launch.processes import ProcessUse

RECENT_STEPS = 40
RECENT_LINES = 4
LONGEST_LINE_BYTES = 1 << 20

StructT = TypeVar("StructT", bound=msgspec.Struct)


class StalenessLine(msgspec.Struct, frozen=True):
    """Loss tokens of one step whose rollouts had one staleness."""

    loss_tokens: float = 0.0


class TrainerLine(msgspec.Struct, frozen=True, kw_only=True):
    """One step in the trainer's metrics file; `time` in seconds since the epoch, `wait_reasons` seconds by reason."""

    step: int
    version: int = 0
    reward_mean: float = 0.0
    grad_norm: float = 0.0
    tokens: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    wait_s: float = 0.0
    wait_reasons: dict[str, float] = {}
    by_staleness: dict[str, StalenessLine] = {}
    train_s: float = 0.0
    publish_s: float = 0.0
    time: float = 0.0


class GeneratorLine(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that the generator has made since its start; `time` in seconds since the epoch.

    `waiting`: why it did less than it could at that moment; None where it did not wait.
    """

    time: float = 0.0
    generated_tokens: int = 0
    waiting: str | None = None


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """Completions of one held-out problem: the greedy one, and those sampled at T = 1; each right or not."""

    prompt: str
    answer: str | None
    greedy: str
    greedy_right: bool
    sampled: list[str]
    sampled_right: list[bool]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy on the held-out problems, 0..1: of `samples` completions per problem at T = 1, and of a greedy one.

    `..._error`: standard error over the problems; `..._by_problem`: accuracy by problem id. None and empty: not
    measured.
    """

    step: int
    problems: int
    samples: int
    sampled: float
    sampled_error: float | None = None
    sampled_by_problem: dict[str, float] = {}
    greedy: float | None = None
    greedy_error: float | None = None
    greedy_by_problem: dict[str, float] = {}
    examples: list[Example] = []


class Staleness(msgspec.Struct, frozen=True):
    """Staleness of the rollouts at use, in policy versions, over all steps."""

    mean: float
    max: int


class Waiting(msgspec.Struct, frozen=True):
    """Time that the trainer waited for batches: seconds, share of its steps' time, and share by reason, 0..1."""

    seconds: float
    share: float
    by_reason: dict[str, float]


class GroupCounts(msgspec.Struct, frozen=True):
    """Groups of the run; `dropped` (evicted or dead-lettered) and `rejected` by reason."""

    stored: int
    used: int
    live: int
    dropped: dict[str, int]
    rejected: dict[str, int]


class LineReader(Generic[StructT]):
    """Read the new lines of a growing JSON-lines file."""

    def __init__(self, path: Path, shape: type[StructT]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(shape)
        self._offset = 0

    def new_lines(self) -> list[StructT]:
        """Return the complete lines since the last call, without broken ones.

        A line is broken if its writer was killed in the middle and later appended to the same file.
        """
        if not self._path.exists():
            return []
        lines = []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while (raw := file.readline(LONGEST_LINE_BYTES)).endswith(b"\n") or len(raw) == LONGEST_LINE_BYTES:
                self._offset += len(raw)
                try:
                    lines.append(self._decoder.decode(raw))
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
        return lines


class Phases:
    """Wall time by phase, in the order of the phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.current = ""
        self._since = time.monotonic()

    def enter(self, name: str) -> None:
        """End the current phase and start another; an empty name starts none."""
        self.add_up()
        self.current = name

    def add_up(self) -> None:
        """Count the time of the current phase until now."""
        now = time.monotonic()
        if self.current:
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + now - self._since
        self._since = now


@dataclasses.dataclass(slots=True)
class Progress:
    """Everything known now. The event loop owns it; `state` is the state of the run as JSON.

    `total_steps` None: the run has no end. `peaks`, `cpu_s`: of processes by name, also after their end.
    """

    total_steps: int | None
    seed: int = 0
    phases: Phases = dataclasses.field(default_factory=Phases)
    note: str = ""
    steps: dict[int, TrainerLine] = dataclasses.field(default_factory=dict)
    first_step: int = 0
    generated: list[GeneratorLine] = dataclasses.field(default_factory=list)
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    peaks: dict[str, int] = dataclasses.field(default_factory=dict)
    cpu_s: dict[str, float] = dataclasses.field(default_factory=dict)

    def add_steps(self, lines: Iterable[TrainerLine]) -> None:
        """Add lines of the trainer. A line replaces the earlier lines of its step and of later steps."""
        for line in lines:
            while self.steps and next(reversed(self.steps)) >= line.step:
                self.steps.popitem()
            self.steps[line.step] = line

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Add an evaluation; it replaces an earlier one of the same step."""
        others = [other for other in self.evaluations if other.step != evaluation.step]
        self.evaluations = sorted([*others, evaluation], key=lambda entry: entry.step)

    def add_uses(self, uses: Iterable[ProcessUse]) -> None:
        """Add what processes have used until now."""
        for process in uses:
            self.cpu_s[process.name] = process.cpu_s
            if process.peak_bytes is not None:
                self.peaks[process.name] = max(self.peaks.get(process.name, 0), process.peak_bytes)

    @property
    def lines(self) -> list[TrainerLine]:
        """Lines of the trainer in the order of steps, one per step."""
        return list(self.steps.values())

    @property
    def done_steps(self) -> int:
        """Number of steps that the trainer has done; without its metrics, those that it has acked."""
        return max(self.steps) + 1 if self.steps else int(self.state.get("step", 0))

    @property
    def before(self) -> Evaluation | None:
        """Accuracy before the first step."""
        return next((evaluation for evaluation in self.evaluations if evaluation.step == 0), None)

    @property
    def after(self) -> Evaluation | None:
        """Accuracy after the last step, sampled and greedy."""
        last = self.evaluations[-1] if self.evaluations else None
        return last if last and last.step >= (self.total_steps or 0) and last.greedy is not None else None

    def seconds_left(self) -> float | None:
        """Estimate the remaining training time from the recent steps; None if they are few or the run has no end."""
        recent, elapsed_s = self._recent_steps()
        if self.total_steps is None or len(recent) < 3:
            return None
        return (self.total_steps - self.done_steps) * elapsed_s / (len(recent) - 1)

    def trained_tokens_per_s(self) -> float | None:
        """Return the tokens trained per second in the recent steps, waiting included."""
        recent, elapsed_s = self._recent_steps()
        return sum(line.tokens for line in recent[1:]) / elapsed_s if recent else None

    def generated_tokens_per_s(self) -> float | None:
        """Return the completion tokens generated per second in the recent reports."""
        recent = self.generated[-RECENT_LINES:]
        if len(recent) < 2 or recent[-1].time <= recent[0].time:
            return None
        return (recent[-1].generated_tokens - recent[0].generated_tokens) / (recent[-1].time - recent[0].time)

    def staleness(self) -> Staleness:
        """Return the staleness over all steps."""
        means = [line.staleness_mean for line in self.lines]
        return Staleness(sum(means) / max(1, len(means)), max((line.staleness_max for line in self.lines), default=0))

    def waiting(self) -> Waiting:
        """Return the waiting over all steps. Time inside a request that returned a batch counts as `fetching`."""
        by_reason: Counter[str] = Counter()
        for line in self.lines:
            fetching_s = max(0.0, line.wait_s - sum(line.wait_reasons.values()))
            by_reason.update(line.wait_reasons | ({"fetching": fetching_s} if fetching_s else {}))
        seconds = sum(line.wait_s for line in self.lines)
        total_s = (seconds + sum(line.train_s + line.publish_s for line in self.lines)) or 1.0
        return Waiting(seconds, seconds / total_s, {reason: s / total_s for reason, s in by_reason.most_common()})

    def held_back(self) -> Counter[str]:
        """Count the generator's reports in which it waited, by reason."""
        return Counter(line.waiting for line in self.generated if line.waiting not in (None, "finished"))

    def group_counts(self) -> GroupCounts:
        """Return the groups of the run by what became of them."""
        groups = self.state["groups"]
        dead = {"dead_lettered": groups["dead_lettered"]} if groups["dead_lettered"] else {}
        return GroupCounts(
            stored=groups["stored"],
            used=groups["in_batches"] + groups["retired"],
            live=groups["live"],
            dropped=groups["evicted"] | dead,
            rejected=dict(groups["rejected"]),
        )

    def _recent_steps(self) -> tuple[list[TrainerLine], float]:
        """Return the recent steps of this session and the seconds between first and last; no steps without time."""
        recent = [line for line in self.lines[-RECENT_STEPS:] if line.step >= self.first_step]
        elapsed_s = recent[-1].time - recent[0].time if recent else 0.0
        return (recent, elapsed_s) if elapsed_s > 0 else ([], 0.0)
