"""What is known about one run, and what can be told from it: where groups stand, steps, versions, sums.

Where a group stands (guarantee 3, conservation)::

    stored ──► live ──select──► in_batches ──checkpoint──► retired
                │  ◄──resample──┘
                ├──evict──► evicted          (given back by a resample to an earlier step)
                └──poison─► dead_lettered   (from in_batches too: its batch cannot be served again)

    stored = live + in_batches + retired + sum(evicted) + dead_lettered
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from replaybuf.errors import Gone
from replaybuf.kernel.histograms import GroupHistograms
from replaybuf.kernel.index import DEAD, EVICTED, FREED, LIVE, Index, Numbers
from replaybuf.kernel.prompt_set import PromptSet
from replaybuf.kernel.rotation import Rotation
from replaybuf.wire.config import Cost, RunConfig
from replaybuf.wire.group import hash_name
from replaybuf.wire.ledger import TicketRecord
from replaybuf.wire.run_status import Progress

RETIRED = "retired"
GROUP_STATES = ("live", "in_batches", "evicted", "dead_lettered", RETIRED)
"""Names of the states of an index row, in their order there; a freed row was retired, or evicted before."""
PURGED = 128
"""Bit of a fate: the group was a dead letter."""
KEPT_FAILURES = 10_000
LONGEST_REASON = 200
"""Characters that are kept of why a prompt failed; with `KEPT_FAILURES` that is 4 MB at most."""
NO_ROTATION = Rotation()


@dataclasses.dataclass(slots=True)
class BatchState:
    """A batch of the current history: where its record stands and which groups it holds.

    `earlier`: by number, the last step before this one of the groups that were used before; `turns` of the adapters
    before this batch.
    """

    entry: int
    generation: int
    numbers: Numbers
    earlier: dict[int, int]
    acked: bool = False
    rotation: Rotation = NO_ROTATION


@dataclasses.dataclass(frozen=True, slots=True)
class VoidedBatch:
    """A batch that a resample voided: born in `generation`, void from `until_generation` on."""

    entry: int
    generation: int
    until_generation: int


class LiveTotals(NamedTuple):
    """What the live groups sum up to: how many, their tokens, how many were never used, all their uses."""

    groups: int
    tokens: int
    fresh: int
    uses: int

    @classmethod
    def of(cls, tokens: npt.NDArray[np.int32], uses: npt.NDArray[np.int32]) -> LiveTotals:
        """Sum up groups by their tokens and uses, [groups] each."""
        fresh = len(uses) - int(np.count_nonzero(uses))
        return cls(len(uses), int(tokens.sum(dtype=np.int64)), fresh, int(uses.sum(dtype=np.int64)))


@dataclasses.dataclass(slots=True)
class AdapterCounts:
    """Groups of one adapter that its rows in the index do not tell, or no longer: see conservation above.

    `used`, `tokens_used`, `used_staleness` count all uses, as those of the run; so do `tallies`.
    """

    stored: int = 0
    used: int = 0
    tokens_used: int = 0
    used_staleness: dict[int, int] = dataclasses.field(default_factory=dict)
    tallies: GroupHistograms = dataclasses.field(default_factory=GroupHistograms)
    retired: int = 0
    evicted: dict[str, int] = dataclasses.field(default_factory=dict)
    dead_lettered: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Attachment:
    """The trainer that holds the run: how its ranks want their batches."""

    epoch: int
    dp_world_size: int
    seq_len: int
    pad_to_multiple_of: int
    cost: Cost | None = None


class Known:
    """Everything that is known about one run, in fields that a fold changes; `RunState` is that fold.

    - `step`: next unacked step; `next_step`: next step to assemble; `generation`: rewinds so far
    - `batches`: batches of the current history that a resume may need, by step
    - `records`: ledger entry of the assembled batches of the current history, by step, freed ones too until they are
      trimmed; `made`: generation and number of groups of each
    - `trimmed`, `trimmed_entries`: last group and last ledger entry whose history is trimmed; groups up to `trimmed`
      that are not freed stay
    - `freed_as`: what became of freed groups, one byte each, the first for number `trimmed` + 1 at position 1: an index
      into `reasons`, with the bit `PURGED` for a dead letter; 0 = in the index
    - `groups_used` counts all uses, `uses` those of the surviving history
    - `rewinds`: by policy, (generation, version), see `remembered_rewinds`
    - `failed_prompts`, all of them; `failures` tells why, of the newest `KEPT_FAILURES` in the order of their records
    - `tallies`: histograms of lengths, ages and reuse; coverage of prompts. Groups up to number `tallied` are in it as
      stored; the others join when it is looked at, many at a time, before anything becomes of them
    - `turns` of the adapters before the next batch; `standings`: what the run has of each adapter, by code
    - `feedback`: of the newest `FEEDBACK_STEPS` acked steps of the surviving history that had any, by step, as msgpack;
      replaced by another dict where it changes
    - `checkpoints`: kept ones, ascending; `oldest_step`: lowest step a trainer may resume at
    """

    def __init__(self) -> None:
        self.config: RunConfig | None = None
        self.config_state: Literal["running", "paused", "finished"] = "running"
        self.config_reason: str | None = None
        self.max_uses: int | None = 1
        self.attachment: Attachment | None = None
        self.step = 0
        self.next_step = 0
        self.generation = 0
        self.published: dict[str, int] = {"": 0}
        self.weights_uri: dict[str, str | None] = {"": None}
        self.batches: dict[int, BatchState] = {}
        self.records: dict[int, int] = {}
        self.voided: dict[int, list[VoidedBatch]] = {}
        self.checkpoints: list[int] = []
        self.feedback: dict[int, bytes] = {}
        self.rewinds: dict[str, list[tuple[int, int]]] = {}
        self.rotation = NO_ROTATION
        self.standings: dict[int, AdapterCounts] = {}
        self.failed_prompts = PromptSet()
        self.failures: dict[tuple[str, int], TicketRecord] = {}
        self.index = Index()
        self.entries = 0
        self.stored = 0
        self.trimmed = 0
        self.trimmed_entries = 0
        self.retired = 0
        self.evicted: Counter[str] = Counter()
        self.dead_lettered: Counter[str] = Counter()
        self.evicted_since_batch: Counter[str] = Counter()
        self.used_staleness: Counter[int] = Counter()
        self.groups_used = 0
        self.uses = 0
        self.tokens_used = 0
        self.tallied = 0
        self._tallies = GroupHistograms()
        self.made: dict[int, tuple[int, int]] = {}
        self.reasons: list[str] = ["", RETIRED]
        self.freed_as = bytearray(1)
        self._live: LiveTotals | None = None

    # ------------------------------------------------------------------ derived

    @property
    def epoch(self) -> int:
        """Epoch of the attached trainer; 0 before the first."""
        return self.attachment.epoch if self.attachment else 0

    @property
    def state(self) -> Literal["running", "paused", "finished"]:
        """Say `running`, `paused` or `finished`."""
        done = self.config is not None and self.config.max_steps is not None and self.step >= self.config.max_steps
        return "finished" if done else self.config_state

    @property
    def oldest_step(self) -> int:
        """Lowest step a trainer may resume at."""
        return self.checkpoints[0] if self.checkpoints else 0

    @property
    def histograms(self) -> GroupHistograms:
        """Everything that is counted of groups and prompts, up to now."""
        self._tally_stored()
        return self._tallies

    def _tally_stored(self) -> None:
        """Count the groups that came in since, many at a time."""
        if self.tallied < self.stored:
            first = int(np.searchsorted(self.index["number"], self.tallied, "right"))
            self._tallies.store(self.index, slice(first, None))
            for standing, its in self.by_adapter(np.arange(first, len(self.index))):
                standing.tallies.store(self.index, its)
            self.tallied = self.stored

    def resume_histograms(self, tallies: GroupHistograms, tallied: int) -> None:
        """Go on counting from `tallies`, which hold the groups up to number `tallied`."""
        self._tallies, self.tallied = tallies, tallied

    def count(self, state: int) -> int:
        """Count the groups in a state of the index."""
        return int(np.count_nonzero(self.index["state"] == state))

    def live_totals(self) -> LiveTotals:
        """Sum up the live groups: kept while groups come in, counted again after a record that moves some."""
        if self._live is None:
            rows = self.index.live()
            self._live = LiveTotals.of(self.index["tokens"][rows], self.index["times_sampled"][rows])
        return self._live

    def recount(self) -> None:
        """Forget the sums of `live_totals`: the index was changed by other means than `store` and `apply`."""
        self._live = None

    def live_bytes(self) -> int:
        """Sum the frames of live groups, in bytes."""
        return int(self.index["frame_bytes"][self.index["state"] == LIVE].sum(dtype=np.int64))

    def group_state(self, number: int) -> tuple[str, str | None]:
        """Say where group `number` stands: (state as `GET /groups/{group_id}` names it, reason).

        Raises `Gone` for a freed group whose history is trimmed.
        """
        if number > self.stored:
            return "live", None  # stored a moment ago and not taken in yet
        rows = self.index.rows_of([number])
        if not len(rows):
            if number <= self.trimmed:
                raise Gone(
                    f"group number {number} was freed and its history trimmed; trimmed is all up to {self.trimmed}",
                    name="number",
                    value=number,
                    bound=self.trimmed,
                )
            fate = self.freed_as[number - self.trimmed]
            reason = self.reasons[fate & ~PURGED]
            if reason == RETIRED:
                return RETIRED, None
            return ("dead_lettered" if fate & PURGED else "evicted"), reason
        state = int(self.index["state"][rows[0]])
        told = self.reasons[self.index["reason"][rows[0]]] if state in (EVICTED, DEAD) else None
        return GROUP_STATES[state], told

    def list_numbers(self, place: str | None, after: int, limit: int) -> list[int]:
        """List up to `limit` numbers above `after` of groups that stand at `place` (None = anywhere), ascending."""
        index = self.index
        known = max(after, self.trimmed)
        if place is None:
            old = index["number"][: np.searchsorted(index["number"], self.trimmed, "right")]
            held = old[(old > after) & (index["state"][: len(old)] != FREED)][:limit].tolist()
            return [*held, *range(known + 1, min(self.stored, known + limit - len(held)) + 1)]
        here = (index["state"] == GROUP_STATES.index(place)) & (index["state"] != FREED) & (index["number"] > after)
        found = index["number"][here]
        freed_as = np.frombuffer(self.freed_as, np.uint8)[known - self.trimmed + 1 :]
        retired = freed_as == self._code(RETIRED)
        purged = (freed_as & PURGED) > 0
        freed = {RETIRED: retired, "dead_lettered": purged, "evicted": (freed_as > 0) & ~retired & ~purged}
        if place in freed:
            found = np.union1d(found, np.flatnonzero(freed[place]) + known + 1)
        numbers: list[int] = found[:limit].tolist()
        return numbers

    def purgeable(self) -> list[int]:
        """List the dead letters whose bytes may go: those that no batch holds which a trainer may ask for again."""
        index = self.index
        numbers: list[int] = index["number"][
            (index["state"] == DEAD) & (index["last_step"] < self.oldest_step)
        ].tolist()
        return numbers

    def steps_of(self, number: int) -> list[int]:
        """List the steps of the current, retained history that hold group `number`."""
        return [step for step, batch in sorted(self.batches.items()) if number in batch.numbers]

    def lost_version_since(self, generation: int, adapter: str = "") -> int | None:
        """Return the lowest version that rewinds after `generation` went back to; later ones of that time are lost."""
        gone_back = self.rewinds.get(adapter, [])
        return min((version for reached, version in gone_back if reached > generation), default=None)

    def by_adapter(self, rows: npt.NDArray[np.int64]) -> Iterator[tuple[AdapterCounts, npt.NDArray[np.int64]]]:
        """Part rows by their adapter, leaving out those without one."""
        codes = self.index["adapter"][rows]
        for code in np.unique(codes[codes != 0]).tolist():
            yield self.standings.setdefault(code, AdapterCounts()), rows[codes == code]

    def counts_of(self, adapter: str) -> AdapterCounts:
        """Tell what the run has of an adapter besides its rows, up to now."""
        self._tally_stored()
        return self.standings.get(hash_name(adapter), AdapterCounts())

    def groups_of(self, adapter: str, step: int) -> int:
        """Count the groups of an adapter in the batch of `step`, one of `batches`."""
        following = self.batches.get(step + 1)
        after = following.rotation if following else self.rotation
        return after.used.get(adapter, 0) - self.batches[step].rotation.used.get(adapter, 0)

    def stale_since_batch(self, adapter: str = "") -> bool:
        """Say whether groups, of an adapter, were evicted as too stale since the last batch was made."""
        if not adapter:
            return bool(self.evicted_since_batch.get("too_stale"))
        rows = np.flatnonzero(self.index["evicted_at"] == self.next_step)
        stale = rows[self.index["reason"][rows] == self._code("too_stale")]
        return bool((self.index["adapter"][stale] == hash_name(adapter)).any())

    def progress_at(self, step: int, adapter: str) -> Progress:
        """Tell how far an adapter is before the batch of `step`: one of `batches`, or the next one."""
        batch = self.batches.get(step)
        size = self.config.groups_per_batch_of(adapter) if self.config else None
        return (batch.rotation if batch else self.rotation).progress(adapter, size or 1)

    def own_step(self, step: int, adapter: str = "") -> int:
        """Tell which step of the policy that is the run's `step`: the same one where there are no adapters."""
        return self.progress_at(step, adapter).step if adapter else step

    def version_at(self, step: int, adapter: str = "") -> int:
        """Tell the version of a policy that the run's `step` trains."""
        own = self.own_step(step, adapter)
        return self.config.version_of(own, adapter) if self.config else own

    def versions_at(self, step: int, rows: npt.NDArray[np.int64]) -> int | npt.NDArray[np.int64]:
        """Tell the version, at the run's `step`, of the policy that each of these rows is for."""
        if self.config is None or not self.config.adapters:
            return self.version_at(step)
        versions = np.zeros(len(rows), np.int64)
        for name in self.config.adapter_names:
            versions[self.index["adapter"][rows] == hash_name(name)] = self.version_at(step, name)
        return versions

    def batch_entry(self, step: int, generation: int | None = None) -> int | None:
        """Find the ledger entry of the batch of `step`, in the current history or as generation `generation` saw it."""
        if generation is None:
            return self.records.get(step)
        for voided in self.voided.get(step, []):
            if voided.generation <= generation < voided.until_generation:
                return voided.entry
        born = self.made[step][0] if step in self.made else 0
        return self.records.get(step) if born <= generation <= self.generation else None

    def check_record_kept(self, step: int) -> None:
        """Raise `Gone` where the record of `step`, of the current history, is trimmed."""
        oldest = min(self.records, default=self.next_step)
        if 0 <= step < min(oldest, self.next_step):
            raise Gone(
                f"the record of step {step} is trimmed; the oldest one kept is that of step {oldest}",
                name="step",
                value=step,
                bound=oldest,
            )

    def _code(self, reason: str) -> int:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason)
