"""State of a run: the fold of its index stream and its ledger.

`RunState.store` folds index entries, `RunState.apply` one ledger record. Neither reads a clock, draws a random number
or does I/O, so the same streams give the same state at a start, at a takeover and in a checker. A record is
folded after the groups that it names by number; otherwise the order between the two streams does not matter.

`pool` holds what happens to groups; the rest is what happens to the run: configuration, steps, batches, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import LedgerGap
from replaybuf.kernel.figures.step_figures import StepFigures
from replaybuf.kernel.rows.index import EVICTED, IN_BATCHES, LIVE, NEVER, Numbers
from replaybuf.kernel.state.failed_prompts import FAILED_SHARE, FailedPrompts
from replaybuf.kernel.state.group_counts import AdapterCounts
from replaybuf.kernel.state.history import AttachedTrainer, BatchState, RecordedBatch, VoidedBatch, add_rewind
from replaybuf.kernel.state.pool import GroupPool
from replaybuf.kernel.state.reissues import Reissues
from replaybuf.kernel.state.rotation import AdapterProgress, Rotation
from replaybuf.wire.config import RunConfig, read_config
from replaybuf.wire.group import hash_name
from replaybuf.wire.ledger import (
    AckRecord,
    AnyRecord,
    AttachRecord,
    BatchRecord,
    CheckpointRecord,
    ColumnsRecord,
    ConfigRecord,
    DeadLetterRecord,
    EvictRecord,
    FailedPromptRecord,
    LossRecord,
    PolicyRecord,
    PurgeRecord,
    RewindRecord,
    TrimRecord,
    newest_group,
)

FEEDBACK_STEPS = 16
"""A strategy observes the feedback of this many newest steps."""
_KEEPS_LIVE_GROUPS = (AckRecord, AttachRecord, ColumnsRecord, PolicyRecord, FailedPromptRecord)
"""Records after which the sums of `pool.live` still hold; COLUMNS updates them itself."""
RunPhase = Literal["running", "paused", "finished"]
_NO_NUMBERS, _NOT_MALFORMED = np.empty(0, np.int64), np.empty(0, bool)


class RunState:
    """State of one run. A run without LoRA has the one adapter `""`.

    - `step`: next unacked step; `next_step`: next step to assemble; `generation`: rewinds, also lost ones
    - `batches`: batches of the current history that a resume may need, by step; `records`: all of them whose ledger
      record is kept; `voided`: by step, those that a resample took back
    - `published`, `weights_uri`, `rewinds` (`history.add_rewind`): by adapter
    - `rotation` of the adapters before the next batch
    - `failed`: prompts that ended without a group; `reissues`: prompts that were issued again
    - `feedback`: msgpack by step, of the newest `FEEDBACK_STEPS` acked steps that had any; replaced, never changed
    - `checkpoints`: steps of the kept ones, ascending
    - `masked_tokens`: sampled tokens that were too old for the loss of their batches, each use counted
    - `figures` of each step, for people; `fenced_epoch`: lost records may have given epochs up to it
    - `entries`: last folded ledger entry; `trimmed_entries`: last one that is trimmed
    """

    def __init__(self) -> None:
        self.config: RunConfig | None = None
        self.config_phase: RunPhase = "running"
        self.phase_reason: str | None = None
        self.attachment: AttachedTrainer | None = None
        self.step = self.next_step = self.generation = self.masked_tokens = self.fenced_epoch = 0
        self.published: dict[str, int] = {"": 0}
        self.weights_uri: dict[str, str | None] = {"": None}
        self.batches: dict[int, BatchState] = {}
        self.records: dict[int, RecordedBatch] = {}
        self.voided: dict[int, list[VoidedBatch]] = {}
        self.checkpoints: list[int] = []
        self.feedback: dict[int, bytes] = {}
        self.rewinds: dict[str, list[tuple[int, int]]] = {}
        self.rotation = Rotation()
        self.failed = FailedPrompts()
        self.reissues = Reissues()
        self.figures = StepFigures()
        self.pool = GroupPool()
        self.index = self.pool.index
        self.entries = self.trimmed_entries = 0
        self._totals: tuple[tuple[int, int], AdapterCounts] | None = None

    # ------------------------------------------------------------------ derived

    @property
    def epoch(self) -> int:
        """Epoch of the attached trainer, or the last one that is fenced; 0 before the first."""
        return max(self.fenced_epoch, self.attachment.epoch if self.attachment else 0)

    @property
    def token_budget(self) -> int | None:
        """Tokens of the next batch, for the newest layout; one rank before the first attach. None = no bound."""
        ranks = self.attachment.dp_world_size if self.attachment else 1
        return self.config.batch.token_budget(ranks) if self.config else None

    @property
    def phase(self) -> RunPhase:
        """Phase of the run, `running`, `paused` or `finished`, which the contract calls its state."""
        done = self.config is not None and self.config.max_steps is not None and self.step >= self.config.max_steps
        return "finished" if done else self.config_phase

    @property
    def stored(self) -> int:
        """Number of the last folded group."""
        return self.pool.stored

    @property
    def trimmed(self) -> int:
        """Number of the last group whose history is trimmed; groups up to it that are not freed stay in the index."""
        return self.pool.trimmed

    @property
    def max_uses(self) -> int | None:
        """Most batches that a group may be in; None = unbounded."""
        return self.pool.max_uses

    @property
    def oldest_step(self) -> int:
        """Lowest step that a trainer may resume at."""
        return self.checkpoints[0] if self.checkpoints else 0

    @property
    def totals(self) -> AdapterCounts:
        """Counts of the run: the sum over its adapters."""
        folded = self.entries, self.stored
        if self._totals is None or self._totals[0] != folded:
            self._totals = folded, self.pool.total()
        return self._totals[1]

    def count(self, row_state: int) -> int:
        """Count the groups in a state of the index."""
        return int(np.count_nonzero(self.index["state"] == row_state))

    def progress_at(self, step: int, adapter: str = "") -> AdapterProgress:
        """Return the progress of an adapter before the batch of `step`: one of `batches`, or the next batch."""
        batch = self.batches.get(step)
        return (batch.rotation if batch else self.rotation).progress(adapter)

    def own_step(self, step: int, adapter: str = "") -> int:
        """Return the adapter's own step in the run's `step`."""
        return self.progress_at(step, adapter).steps

    def version_at(self, step: int, adapter: str = "") -> int:
        """Return the version of an adapter that the run's `step` trains."""
        own = self.own_step(step, adapter)
        return self.config.version_of(own, adapter) if self.config else own

    def versions_at(self, step: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the version at the run's `step` of the adapter of each row, int64 [rows]; 0 for unknown adapters."""
        versions = np.zeros(len(rows), np.int64)
        for name in self._adapter_names():
            versions[self.index["adapter"][rows] == hash_name(name)] = self.version_at(step, name)
        return versions

    def _adapter_names(self) -> tuple[str, ...]:
        return self.config.adapter_names if self.config else ("",)

    # ------------------------------------------------------------------ index stream

    def start_after(self, trimmed: int) -> None:
        """Begin an empty state behind group number `trimmed`: the index stream starts there."""
        self.pool.trimmed = self.pool.stored = trimmed

    def store(
        self, numbers: Numbers, entries: npt.NDArray[np.void], malformed: npt.NDArray[np.bool_] = _NOT_MALFORMED
    ) -> None:
        """Add groups of the index stream, in order; numbers up to `trimmed` come from the entries set aside.

        Entries that are `malformed`, or whose values are impossible, become dead letters. Raises `LedgerGap`.
        """
        if not len(numbers):
            return
        pool, first, last = self.pool, int(numbers[0]), int(numbers[-1])
        if first > pool.trimmed and (first != pool.stored + 1 or last - first + 1 != len(numbers)):
            detail = (
                f"index entries {first} to {last} ({len(numbers)} of them) follow {self.stored}; the stream has a gap"
            )
            raise LedgerGap(detail, name="number", value=first, bound=self.stored + 1)
        entries = pool.store(numbers, entries, malformed)
        if self.failed.prompts or self.reissues.waiting:
            self.resolve_prompts(entries["adapter"], entries["prompt_index"])

    def resolve_prompts(self, adapters: npt.NDArray[np.int32], prompt_indexes: npt.NDArray[np.int64]) -> None:
        """Record that prompts have a group, by hash of the adapter and index: they neither failed nor wait for one."""
        if self.failed.prompts or self.reissues.waiting:
            names, pairs = self.adapters_by_hash, zip(adapters.tolist(), prompt_indexes.tolist(), strict=True)
            prompts = [(names.get(code, ""), prompt_index) for code, prompt_index in pairs]
            self.failed.forgive(prompts)
            self.reissues.end(prompts)

    @property
    def adapters_by_hash(self) -> dict[int, str]:
        """Return the adapters by the hashes of their names."""
        return {hash_name(name): name for name in self._adapter_names()}

    # ------------------------------------------------------------------ ledger

    def apply(self, entry: int, record: AnyRecord) -> Numbers:
        """Fold ledger record number `entry`; return the numbers of groups whose payload is no longer needed.

        Raises `LedgerGap` if records before it or groups that it names are missing, and `Unreadable` for a
        configuration that this release cannot read.
        """
        if entry != self.entries + 1:
            detail = f"ledger entry {entry} follows {self.entries}; the ledger has a gap"
            raise LedgerGap(detail, name="entry", value=entry)
        if (newest := newest_group(record)) > self.stored:
            detail = f"ledger entry {entry} names group {newest}; the index was read up to {self.stored} and is trimmed"
            raise LedgerGap(detail, name="number", value=newest, bound=self.stored)
        self.entries = entry
        if not isinstance(record, _KEEPS_LIVE_GROUPS):
            self.pool.live.forget()
        freed = _HANDLERS[type(record)](self, record)
        self._add_figures(record)
        return _NO_NUMBERS if freed is None else freed

    def _add_figures(self, record: AnyRecord) -> None:
        """Fold a record that is applied into the figures."""
        if isinstance(record, BatchRecord):
            rows = self.index.rows_of(self.batches[record.step].numbers)
            self.figures.add_batch(record, self.index, rows, self.versions_at(record.step, rows))
        else:
            self.figures.apply(record, entry=self.entries, step=self.step, oldest_step=self.oldest_step)

    def _attach(self, record: AttachRecord) -> None:
        self.attachment = AttachedTrainer(
            epoch=record.epoch,
            dp_world_size=record.dp_world_size,
            seq_len=record.seq_len,
            pad_to_multiple_of=record.pad_to_multiple_of,
            cost=record.cost,
            extras=record.extras,
            fixed=record.fixed,
            generation=self.generation + record.rewinds,
        )

    def _publish(self, record: PolicyRecord) -> None:
        self.published[record.adapter] = record.version
        self.weights_uri[record.adapter] = record.weights_uri

    def _evict_groups(self, record: EvictRecord) -> None:
        for reason, numbers in record.numbers.items():
            self._evict(self.index.rows_of(numbers), reason, record)
        if record.reissued:
            self.reissues.record(self.index, self.index.rows_of(record.reissued), self.adapters_by_hash)

    def _dead_letter(self, record: DeadLetterRecord) -> None:
        for reason, numbers in record.numbers.items():
            rows = self.index.rows_of(numbers)
            versions = self.versions_at(self.next_step, rows)
            self.figures.drop(reason, self.pool.dead_letter(rows, reason, versions, record.at_s))

    def _configure(self, record: ConfigRecord) -> None:
        before, phase = self.config, self.config_phase
        self.config = read_config(record.config, f"ledger entry {self.entries}")
        self.figures.changes.add_config(self.entries, self.step, record, before, phase, self.config)
        for name in self.config.adapter_names:
            self.published.setdefault(name, 0)
            self.weights_uri.setdefault(name, None)
        if record.state == "running" and self.config_phase == "paused" and self.phase_reason != "operator":
            self.feedback = {}  # the strategy may have failed at it, and would fail again
        self._set_phase(record.state, record.reason)
        if record.max_uses != self.max_uses:
            self.pool.change_max_uses(record.max_uses)

    def _set_phase(self, phase: RunPhase, reason: str | None) -> None:
        if phase == "running" and (self.phase_reason or "").startswith(FAILED_SHARE):
            self.failed.window.restart()
        self.config_phase, self.phase_reason = phase, reason

    def _add_batch(self, record: BatchRecord) -> None:
        entry, numbers = self.entries, record.numbers
        earlier = self.pool.use(numbers, record)
        self.batches[record.step] = BatchState(entry, record.generation, numbers, earlier, self.rotation)
        self.records[record.step] = RecordedBatch(entry, record.generation, numbers)
        self.rotation = self.rotation.after(record.parts, record.turn)
        self.next_step = record.step + 1
        self.masked_tokens += record.masked_tokens

    def _ack(self, record: AckRecord) -> None:
        self.step = record.step + 1
        self.batches[record.step].acked = True
        self.index.assign("priority", record.priorities)
        if record.feedback:
            kept = list(self.feedback.items())[1 - FEEDBACK_STEPS :]
            self.feedback = dict([*kept, (record.step, msgspec.msgpack.encode(record.feedback))])

    def _fail_prompt(self, record: FailedPromptRecord) -> None:
        # Rows still in the index are enough to find the prompt's group: the service completes the tickets of a group as
        # soon as it folds it, so this record precedes every record that could free the row.
        same_adapter = self.index["adapter"] == hash_name(record.adapter)
        stored = (same_adapter & (self.index["prompt_index"] == record.prompt_index)).any()
        if self.reissues.end([(record.adapter, record.prompt_index)]) or not stored:  # that of a reissue was dropped
            self.failed.add(record)

    def _accept_loss(self, record: LossRecord) -> None:
        self.fenced_epoch = self.epoch + record.entries + 1  # a lost entry was one attach, or one rewind, at most
        self.generation += record.entries + 1
        for name, version in self.published.items():
            self.rewinds[name] = add_rewind(self.rewinds.get(name, []), self.generation, version)

    def _evict(self, rows: npt.NDArray[np.int64], reason: str, record: EvictRecord | RewindRecord) -> None:
        versions = self.versions_at(record.step, rows)
        self.figures.drop(reason, self.pool.evict(rows, reason, record.step, versions, record.at_s))

    def _rewind(self, record: RewindRecord) -> None:
        lost = sorted(step for step in self.batches if step >= record.step)
        versions = {"": record.version} | record.versions
        for adapter, version in versions.items():
            self.rewinds[adapter] = add_rewind(self.rewinds.get(adapter, []), record.generation, version)
        self.generation = record.generation
        if record.on_resume == "resample":
            self._void(lost, record.generation)
            self.pool.restore(np.flatnonzero(self.index["evicted_at"] > record.step))
        else:
            for step in lost:
                self.batches[step].acked = False
        self.step = record.step
        self.next_step = max((*self.batches, record.step - 1)) + 1
        self.checkpoints = [step for step in self.checkpoints if step <= record.step]
        self.feedback = {step: feedback for step, feedback in self.feedback.items() if step < record.step}
        self.published |= versions
        self.weights_uri = dict.fromkeys(self.weights_uri)
        if self.config_phase == "finished" and self.phase_reason != "operator":
            self._set_phase("running", None)
        self._evict_lost(record)

    def _evict_lost(self, record: RewindRecord) -> None:
        """Evict groups with tokens of a lost version, also those in a batch and those evicted after the step.

        Without this a further rewind could sample them again as work of a later version with the same number.
        """
        index = self.index
        newest = self.versions_at(record.step, np.arange(len(index)))
        lost = (index["policy_version_max"] > newest) & (index["number"] <= record.until)
        if not lost.any():
            return
        lost &= np.isin(index["state"], (LIVE, IN_BATCHES, EVICTED))
        kept = (index["evicted_at"] == NEVER) & (index["state"] != EVICTED)  # see `STATE_ROW`
        lost &= kept | (index["evicted_at"] > record.step)
        self.pool.restore(np.flatnonzero(lost))
        self._evict(np.flatnonzero(lost), "lost_lineage", record)

    def _void(self, steps: list[int], generation: int) -> None:
        for step in reversed(steps):
            batch = self.batches.pop(step)
            self.rotation = batch.rotation
            del self.records[step]
            self.voided.setdefault(step, []).append(VoidedBatch(batch.entry, batch.generation, generation))
            self.pool.void_use(batch.numbers, batch.earlier)

    def _checkpoint(self, record: CheckpointRecord) -> Numbers:
        self.checkpoints = sorted({*self.checkpoints, record.step})[-record.keep :]
        oldest = self.oldest_step
        self.batches = {step: batch for step, batch in self.batches.items() if step >= oldest}
        self.voided = {step: batches for step, batches in self.voided.items() if step >= oldest}
        return self.pool.retire(oldest, record.kept_after, record.kept_from)

    def _trim(self, record: TrimRecord) -> None:
        self.pool.trim(record.groups)
        self.trimmed_entries = max(self.trimmed_entries, record.entries)
        self.records = {step: made for step, made in self.records.items() if made.entry > self.trimmed_entries}


_HANDLERS: dict[type[AnyRecord], Callable[[RunState, Any], Numbers | None]] = {
    ConfigRecord: RunState._configure,
    AttachRecord: RunState._attach,
    RewindRecord: RunState._rewind,
    BatchRecord: RunState._add_batch,
    AckRecord: RunState._ack,
    EvictRecord: RunState._evict_groups,
    DeadLetterRecord: RunState._dead_letter,
    PurgeRecord: lambda state, record: state.pool.free(state.index.rows_of(record.numbers), purged=True),
    CheckpointRecord: RunState._checkpoint,
    PolicyRecord: RunState._publish,
    FailedPromptRecord: RunState._fail_prompt,
    ColumnsRecord: lambda state, record: state.pool.add_columns(record.groups),
    TrimRecord: RunState._trim,
    LossRecord: RunState._accept_loss,
}
