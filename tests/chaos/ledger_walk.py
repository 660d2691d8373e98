"""Second, plain fold of the ledger, independent of `kernel.state`: each entry with the state before it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator

from replaybuf.wire.ledger import (
    AckRecord,
    AnyRecord,
    AttachRecord,
    BatchRecord,
    CheckpointRecord,
    ConfigRecord,
    RewindRecord,
)


@dataclasses.dataclass
class WalkState:
    """State of a run by its ledger: `standing` has the surviving batches by step, `uses` counts by group number.

    `step` is the next unacked step, `next_step` the next one to assemble. `mix` names the sources of a strategy that
    takes no other ones. `own`: of each adapter the groups of its own batch and its steps per publication; `before`: by
    step, how many groups of each adapter the batches before it hold.
    """

    epoch: int = 0
    step: int = 0
    next_step: int = 0
    generation: int = 0
    max_uses: int | None = 1
    max_staleness: int | None = None
    cooldown: int = 0
    mix: frozenset[str] = frozenset()
    steps_per_publish: int = 1
    own: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    standing: dict[int, BatchRecord] = dataclasses.field(default_factory=dict)
    uses: Counter[int] = dataclasses.field(default_factory=Counter)
    before: dict[int, Counter[str]] = dataclasses.field(default_factory=lambda: {0: Counter()})
    checkpoints: list[int] = dataclasses.field(default_factory=list)

    @property
    def oldest_step(self) -> int:
        """Lowest step that may be resumed."""
        return self.checkpoints[0] if self.checkpoints else 0

    def groups_before(self, step: int, adapter: str) -> int:
        """Count the groups of an adapter in the batches before `step`."""
        return self.before[step][adapter]

    def own_step(self, step: int, adapter: str) -> int:
        """Return the own step that an adapter trains at the run's `step`; without adapters the same step."""
        return self.groups_before(step, adapter) // self.own[adapter][0] if adapter else step

    def version(self, step: int, adapter: str) -> int:
        """Return the version of a policy that the run's `step` trains."""
        per_publish = self.own[adapter][1] if adapter else self.steps_per_publish
        return self.own_step(step, adapter) // per_publish

    def turn(self, step: int) -> str:
        """Return the adapter with the first turn at `step`; "" = the first by name."""
        return self.standing[step - 1].turn if step - 1 in self.standing else ""

    def rests_until(self, number: int) -> int:
        """Return the first step that may use a group again."""
        used = [
            step for step, record in self.standing.items() if any(entry.number == number for entry in record.groups)
        ]
        return max(used, default=-1 - self.cooldown) + self.cooldown + 1

    def apply(self, record: AnyRecord) -> None:
        """Apply one record."""
        match record:
            case ConfigRecord():
                self.max_uses = record.max_uses
                self.steps_per_publish = record.config.get("steps_per_publish", 1)
                self.own = {
                    name: (spec["groups_per_batch"], spec.get("steps_per_publish") or self.steps_per_publish)
                    for name, spec in sorted(record.config.get("adapters", {}).items())
                }
                strategy = record.config["strategy"]
                self.max_staleness = _max_staleness(strategy)
                self.cooldown = strategy["options"].get("cooldown", 0)
                self.mix = frozenset(strategy["options"].get("mix", {}))
            case AttachRecord():
                self.epoch = record.epoch
            case RewindRecord():
                self._rewind(record)
            case BatchRecord():
                self.standing[record.step] = record
                self.uses.update(group.number for group in record.groups)
                self.next_step = record.step + 1
                earlier = self.before.get(record.step, Counter())
                self.before[self.next_step] = earlier + Counter(group.adapter for group in record.groups)
            case AckRecord():
                self.step = record.step + 1
            case CheckpointRecord():
                self.checkpoints = sorted({*self.checkpoints, record.step})[-record.keep :]

    def _rewind(self, record: RewindRecord) -> None:
        if record.on_resume == "resample":
            for step in [step for step in self.standing if step >= record.step]:
                self.uses.subtract(group.number for group in self.standing.pop(step).groups)
        self.step = record.step
        self.next_step = max([record.step, *(step + 1 for step in self.standing)])
        self.generation = record.generation
        self.checkpoints = [step for step in self.checkpoints if step <= record.step]


def walk(ledger: Iterable[tuple[int, AnyRecord]]) -> Iterator[tuple[int, AnyRecord, WalkState]]:
    """Yield every entry with the state before it. The state is one object that changes after each entry."""
    state = WalkState()
    for entry, record in ledger:
        yield entry, record, state
        state.apply(record)


def final_state(ledger: Iterable[tuple[int, AnyRecord]]) -> WalkState:
    """Return the state after the last entry."""
    state = WalkState()
    for _, record in ledger:
        state.apply(record)
    return state


def _max_staleness(strategy: dict[str, object]) -> int | None:
    """Return the max_staleness of a strategy, by its name and options, without its code."""
    options = strategy.get("options")
    bound = options.get("max_staleness") if isinstance(options, dict) else None
    return 0 if strategy["name"] == "on-policy" else bound if isinstance(bound, int) else None
