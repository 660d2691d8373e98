"""The state of a run as a fold of its index stream and its ledger.

`RunState.store` takes index entries, `RunState.apply` one ledger record; neither reads a clock, draws a number or does
I/O, so the same streams give the same state on start, on takeover and in a checker. The order between the two streams
does not matter: a record names groups by number. The fields that change here, and where a group stands, are told in
`replaybuf.kernel.state_view`.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import LedgerGap, Unreadable
from replaybuf.kernel.histograms import GroupHistograms, ages_ms
from replaybuf.kernel.index import DEAD, EVICTED, IN_BATCHES, LIVE, NEVER, NO_PROMPT_INDEX, Numbers
from replaybuf.kernel.state_view import (
    KEPT_FAILURES,
    LONGEST_REASON,
    PURGED,
    RETIRED,
    AdapterCounts,
    Attachment,
    BatchState,
    Known,
    LiveTotals,
    VoidedBatch,
)
from replaybuf.wire.config import RunConfig
from replaybuf.wire.group import hash_name
from replaybuf.wire.ledger import (
    AckRecord,
    AnyRecord,
    AttachRecord,
    BatchRecord,
    CheckpointRecord,
    ConfigRecord,
    DeadLetterRecord,
    EvictRecord,
    PolicyRecord,
    PurgeRecord,
    RewindRecord,
    TicketRecord,
    TrimRecord,
    newest_group,
)

LOST_LINEAGE = "lost_lineage"
BAD_INDEX_ENTRY = "bad_index_entry"
"""Dead letter that the fold itself makes: an entry of the index stream that no publish wrote."""
FEEDBACK_STEPS = 16
"""A strategy observes the feedback of so many steps; older one is forgotten."""
KEPT_REWINDS = 1_000
"""So many rewinds that still tell tickets apart are kept; 128 kB."""
_MOVES_NOTHING = (AckRecord, AttachRecord, PolicyRecord, TicketRecord)
"""Records after which the same groups are live, used as often as before."""
_NONE = np.empty(0, np.int64)
_NO_ROWS = np.empty(0, bool)


def remembered_rewinds(rewinds: list[tuple[int, int]], generation: int, version: int) -> list[tuple[int, int]]:
    """Add a rewind that made `generation` and went back to `version` to those that are remembered.

    `lost_version_since` asks for the least version behind a generation: a rewind is told by a later one that went as
    far back, so both numbers ascend. Of more than `KEPT_REWINDS` the oldest two become one: tickets from between are
    taken to have lost what older ones did, and have their prompts issued again.
    """
    kept = [*(earlier for earlier in rewinds if earlier[1] < version), (generation, version)]
    if len(kept) > KEPT_REWINDS:
        kept[:2] = [(kept[1][0], kept[0][1])]
    return kept


class RunState(Known):
    """The state of one run as its two streams give it; see the module docstring."""

    def start_after(self, trimmed: int) -> None:
        """Begin an empty state behind group number `trimmed`: what the stream still holds starts there."""
        self.trimmed = self.stored = trimmed

    def store(
        self, numbers: Numbers, entries: npt.NDArray[np.void], malformed: npt.NDArray[np.bool_] = _NO_ROWS
    ) -> None:
        """Take in groups from the index stream, in their order; numbers up to `trimmed` are ones set aside.

        Entries that are `malformed`, or whose numbers cannot be those of a group, become dead letters.
        """
        if not len(numbers):
            return
        first, last = int(numbers[0]), int(numbers[-1])
        if first > self.trimmed and (first != self.stored + 1 or last - first + 1 != len(numbers)):
            raise LedgerGap(
                f"index entries {first} to {last} ({len(numbers)} of them) follow {self.stored}; the stream has a gap",
                name="number",
                value=first,
                bound=self.stored + 1,
            )
        unfit = (entries["tokens"] < 1) | (entries["rollouts"] < 1) | (entries["policy_version"] < 0)
        unfit |= entries["policy_version_max"] < entries["policy_version"]
        unfit[: len(malformed)] |= malformed
        if unfit.any():
            blank = np.zeros(1, entries.dtype)
            blank["prompt_index"] = NO_PROMPT_INDEX
            entries = np.where(unfit, blank, entries)
        self.index.insert(numbers, entries)
        if self._live is not None:
            groups, tokens, fresh, uses = self._live
            new, new_tokens = len(numbers), int(entries["tokens"].sum(dtype=np.int64))
            self._live = LiveTotals(groups + new, tokens + new_tokens, fresh + new, uses)
        self.count_stored(entries["adapter"][numbers > self.trimmed])
        self.stored = max(self.stored, last)
        self.freed_as.extend(bytes(self.stored - self.trimmed + 1 - len(self.freed_as)))
        if unfit.any():
            # At whatever ledger entry the stream is read: of an entry that tells nothing the age is not known.
            self._dead_letter(self.index.rows_of(numbers[unfit]), BAD_INDEX_ENTRY, step=0, at_s=0.0)
        self.forgive(entries["adapter"], entries["prompt_index"])

    def count_stored(self, adapters: npt.NDArray[np.int32]) -> None:
        """Count groups as stored by the code of their adapter."""
        if adapters.any():
            for code, number in zip(*np.unique(adapters[adapters != 0], return_counts=True), strict=True):
                self.standings.setdefault(int(code), AdapterCounts()).stored += int(number)

    def forgive(self, adapters: npt.NDArray[np.int32], prompt_indexes: npt.NDArray[np.int64]) -> None:
        """Take back the failure of prompts, by code of the adapter and index, whose group came late after all."""
        if self.failed_prompts and self.config:
            names = {hash_name(name): name for name in self.config.adapter_names}
            for code, index in zip(adapters.tolist(), prompt_indexes.tolist(), strict=True):
                self.failed_prompts.discard(names.get(code, ""), index)
                self.failures.pop((names.get(code, ""), index), None)

    def apply(self, entry: int, record: AnyRecord) -> Numbers:
        """Take in ledger record number `entry`; return the numbers of groups whose payload is no longer needed.

        Raises `LedgerGap` where records before it, or groups that it names, are missing, and `Unreadable` for a
        configuration that this release does not know.
        """
        if entry != self.entries + 1:
            raise LedgerGap(
                f"ledger entry {entry} follows {self.entries}; the ledger has a gap", name="entry", value=entry
            )
        if (newest := newest_group(record)) > self.stored:
            raise LedgerGap(
                f"ledger entry {entry} names group {newest}; the index stream was read up to {self.stored} and has no "
                "more: it was trimmed",
                name="number",
                value=newest,
                bound=self.stored,
            )
        self.entries = entry
        if not isinstance(record, _MOVES_NOTHING):
            self.recount()
        match record:
            case ConfigRecord():
                self._configure(record)
            case AttachRecord():
                self.attachment = Attachment(
                    record.epoch, record.dp_world_size, record.seq_len, record.pad_to_multiple_of, record.cost
                )
            case RewindRecord():
                self._rewind(record)
            case BatchRecord():
                self._assemble(entry, record)
            case AckRecord():
                self.step = record.step + 1
                self.batches[record.step].acked = True
                for number, priority in record.priorities.items():
                    self.index["priority"][self.index.rows_of([number])] = priority
                if record.feedback:
                    kept = list(self.feedback.items())[1 - FEEDBACK_STEPS :]
                    self.feedback = dict([*kept, (record.step, msgspec.msgpack.encode(record.feedback))])
            case EvictRecord():
                for reason, numbers in record.numbers.items():
                    self._evict(self.index.rows_of(numbers), reason, record.step, record.at_s)
            case DeadLetterRecord():
                for reason, numbers in record.numbers.items():
                    self._dead_letter(self.index.rows_of(numbers), reason, self.next_step, record.at_s)
            case PurgeRecord():
                return self._free(self.index.rows_of(record.numbers), purged=True)
            case CheckpointRecord():
                return self._checkpoint(record)
            case PolicyRecord():
                self.published[record.adapter] = record.version
                self.weights_uri[record.adapter] = record.weights_uri
            case TicketRecord():
                if not self._has_group(record.adapter, record.prompt_index):
                    self._fail(record)
            case TrimRecord():
                self._trim(record)
        return _NONE

    def _fail(self, record: TicketRecord) -> None:
        prompt = record.adapter, record.prompt_index
        self.failed_prompts.add(*prompt)
        self.failures[prompt] = msgspec.structs.replace(record, reason=record.reason[:LONGEST_REASON])
        if len(self.failures) > KEPT_FAILURES:
            del self.failures[next(iter(self.failures))]

    def _has_group(self, adapter: str, prompt_index: int) -> bool:
        """Say whether the group of a prompt is stored.

        Looking at the rows at hand is enough: whoever has taken the group in strikes its prompt's tickets, so the
        record of a failure always precedes whatever could have freed the row.
        """
        its = self.index["adapter"] == hash_name(adapter)
        return bool((its & (self.index["prompt_index"] == prompt_index)).any())

    def _configure(self, record: ConfigRecord) -> None:
        try:
            self.config = msgspec.convert(record.config, RunConfig)
        except msgspec.ValidationError as error:
            raise Unreadable(f"the configuration in ledger entry {self.entries} does not decode: {error}") from error
        self.published |= {name: self.published.get(name, 0) for name in self.config.adapters}
        self.weights_uri |= {name: self.weights_uri.get(name) for name in self.config.adapters}
        if record.state == "running" and self.config_state == "paused" and self.config_reason != "operator":
            self.feedback = {}  # it may be what the strategy failed at: resumed, the run leaves it behind
        self.config_state, self.config_reason = record.state, record.reason
        if record.max_uses != self.max_uses:
            self.max_uses = record.max_uses
            states = self.index["state"]
            settled = (states == IN_BATCHES) & (self.index["evicted_at"] == NEVER) | (states == LIVE)
            self._settle(np.flatnonzero(settled))

    def _assemble(self, entry: int, record: BatchRecord) -> None:
        numbers = np.array([group.number for group in record.groups], np.int64)
        rows = self.index.rows_of(numbers)
        used = rows[self.index["last_step"][rows] != NEVER]
        earlier = dict(zip(self.index["number"][used].tolist(), self.index["last_step"][used].tolist(), strict=True))
        self.index["times_sampled"][rows] += 1
        self.index["last_step"][rows] = record.step
        self.batches[record.step] = BatchState(entry, record.generation, numbers, earlier, rotation=self.rotation)
        self.rotation = self.rotation.after({name: part.groups for name, part in record.adapters.items()}, record.turn)
        self.records[record.step] = entry
        self.made[record.step] = (record.generation, len(numbers))
        self.next_step = record.step + 1
        self.evicted_since_batch.clear()
        self.used_staleness.update(group.staleness for group in record.groups)
        self.groups_used += len(numbers)
        self.uses += len(numbers)
        self.tokens_used += record.tokens
        self.histograms.use(self.index, rows, record.at_s)
        for standing, its in self.by_adapter(rows):
            standing.used += len(its)
            standing.tokens_used += int(self.index["tokens"][its].sum(dtype=np.int64))
            standing.tallies.use(self.index, its, record.at_s)
        if record.adapters:
            for group in record.groups:
                ages = self.standings[hash_name(group.adapter)].used_staleness
                ages[group.staleness] = ages.get(group.staleness, 0) + 1
        self._settle(rows)

    def _settle(self, rows: npt.NDArray[np.int64]) -> None:
        """Make rows live or used up by their count of uses."""
        used_up = (
            np.zeros(len(rows), bool) if self.max_uses is None else self.index["times_sampled"][rows] >= self.max_uses
        )
        self.index["state"][rows] = np.where(used_up, IN_BATCHES, LIVE)

    def _evict(self, rows: npt.NDArray[np.int64], reason: str, step: int, at_s: float) -> None:
        states = self.index["state"][rows]
        rows = rows[((states == LIVE) | (states == IN_BATCHES)) & (self.index["evicted_at"][rows] == NEVER)]
        self.evicted_since_batch[reason] += int((self.index["state"][rows] == LIVE).sum())
        self.index["state"][rows] = IN_BATCHES
        self.index["reason"][rows] = self._code(reason)
        self.index["evicted_at"][rows] = step
        self.index["evicted_version"][rows] = self.versions_at(step, rows)
        self.index["evicted_age_ms"][rows] = ages_ms(self.index["arrival_s"][rows], at_s)
        self._drop_unused(rows)

    def _drop_unused(self, rows: npt.NDArray[np.int64]) -> None:
        """Count as evicted those of these evicted rows that no batch of the surviving history used."""
        unused = rows[(self.index["times_sampled"][rows] == 0) & (self.index["state"][rows] == IN_BATCHES)]
        self.index["state"][unused] = EVICTED
        self._count_evicted(unused, 1)

    def _count_evicted(self, rows: npt.NDArray[np.int64], sign: int) -> None:
        """Count evicted groups by reason and age, or take that back with `sign` -1: their rows tell both."""
        codes = self.index["reason"][rows]
        for code in sorted({*codes.tolist()}):
            of_it = rows[codes == code]
            self.evicted[self.reasons[code]] += sign * len(of_it)
            self._tally_evicted(self.histograms, of_it, sign)
            for standing, its in self.by_adapter(of_it):
                self._tally_evicted(standing.tallies, its, sign)
                standing.evicted[self.reasons[code]] = standing.evicted.get(self.reasons[code], 0) + sign * len(its)

    def _tally_evicted(self, tallies: GroupHistograms, rows: npt.NDArray[np.int64], sign: int) -> None:
        """Count rows of one reason as dropped, or take that back."""
        versions, ages = self.index["evicted_version"][rows], self.index["evicted_age_ms"][rows]
        tallies.drop(self.index, rows, self.reasons[int(self.index["reason"][rows[0]])], versions, ages, sign)

    def _restore(self, rows: npt.NDArray[np.int64]) -> None:
        """Undo evictions."""
        self._count_evicted(rows[self.index["state"][rows] == EVICTED], -1)
        self.index["reason"][rows] = 0
        self.index["evicted_at"][rows] = NEVER
        self.index["evicted_version"][rows] = NEVER
        self.index["evicted_age_ms"][rows] = NEVER
        self._settle(rows)

    def _dead_letter(self, rows: npt.NDArray[np.int64], reason: str, step: int, at_s: float) -> None:
        """Take groups out for good, also out of a standing batch, which cannot be served again as it was."""
        states = self.index["state"][rows]
        rows = rows[(states == LIVE) | (states == IN_BATCHES)]
        self.recount()
        self.index["state"][rows] = DEAD
        for undone in ("evicted_at", "evicted_version", "evicted_age_ms"):  # else a rewind would bring them back
            self.index[undone][rows] = NEVER
        self.index["reason"][rows] = self._code(reason)
        self.dead_lettered[reason] += len(rows)
        ages = ages_ms(self.index["arrival_s"][rows], at_s)
        versions = self.versions_at(step, rows)
        self.histograms.drop(self.index, rows, reason, versions, ages)
        for standing, its in self.by_adapter(rows):
            of_its = self.index["adapter"][rows] == self.index["adapter"][its[0]]
            own = versions if isinstance(versions, int) else versions[of_its]
            standing.tallies.drop(self.index, its, reason, own, ages[of_its])
            standing.dead_lettered[reason] = standing.dead_lettered.get(reason, 0) + len(its)

    def _rewind(self, record: RewindRecord) -> None:
        lost = sorted(step for step in self.batches if step >= record.step)
        versions = {"": record.version} | record.versions
        for policy, version in versions.items():
            self.rewinds[policy] = remembered_rewinds(self.rewinds.get(policy, []), record.generation, version)
        self.generation = record.generation
        if record.on_resume == "resample":
            self._void(lost, record.generation)
            self._restore(np.flatnonzero(self.index["evicted_at"] > record.step))
        for step in lost:
            if step in self.batches:
                self.batches[step].acked = False
        self.step = record.step
        self.next_step = max((*self.batches, record.step - 1)) + 1
        self.checkpoints = [step for step in self.checkpoints if step <= record.step]
        self.feedback = {step: told for step, told in self.feedback.items() if step < record.step}
        self.published |= versions
        self.weights_uri = dict.fromkeys(self.weights_uri)
        if self.config_state == "finished" and self.config_reason != "operator":
            self.config_state, self.config_reason = "running", None
        self._evict_lost(record)

    def _evict_lost(self, record: RewindRecord) -> None:
        """Evict what holds tokens of a lost version, also what a standing batch holds or what was evicted later:

        were it sampled again after a further rewind, it would pass for the work of a later version of that number.
        """
        index = self.index
        newest = self.versions_at(record.step, np.arange(len(index)))
        lost = (index["policy_version_max"] > newest) & (index["number"] <= record.until)
        lost &= np.isin(index["state"], (LIVE, IN_BATCHES, EVICTED))
        lost &= (index["evicted_at"] == NEVER) | (index["evicted_at"] > record.step)
        self._restore(np.flatnonzero(lost))
        self._evict(np.flatnonzero(lost), LOST_LINEAGE, record.step, record.at_s)

    def _void(self, steps: list[int], generation: int) -> None:
        for step in reversed(steps):
            batch = self.batches.pop(step)
            self.rotation = batch.rotation
            del self.records[step], self.made[step]
            self.voided.setdefault(step, []).append(VoidedBatch(batch.entry, batch.generation, generation))
            rows = self.index.rows_of(batch.numbers)
            self.uses -= len(batch.numbers)
            self.index["times_sampled"][rows] -= 1
            self.histograms.unuse(self.index, rows)
            for standing, its in self.by_adapter(rows):
                standing.tallies.unuse(self.index, its)
            self.index["last_step"][rows] = NEVER
            for number, earlier in batch.earlier.items():
                self.index["last_step"][self.index.rows_of([number])] = earlier
            evicted = self.index["evicted_at"][rows] != NEVER
            self._drop_unused(rows[evicted])
            self._settle(rows[~evicted & (self.index["state"][rows] != DEAD)])

    def _checkpoint(self, record: CheckpointRecord) -> Numbers:
        self.checkpoints = sorted({*self.checkpoints, record.step})[-record.keep :]
        oldest = self.oldest_step
        for step in [step for step in self.batches if step < oldest]:
            del self.batches[step]
        for step in [step for step in self.voided if step < oldest]:
            del self.voided[step]
        index = self.index
        used_up = (index["state"] == IN_BATCHES) & (index["last_step"] < oldest) & (index["evicted_at"] <= oldest)
        for standing, its in self.by_adapter(np.flatnonzero(used_up)):
            standing.retired += len(its)
        retired = self._free(np.flatnonzero(used_up), RETIRED)
        self.retired += len(retired)
        gone = (self.index["state"] == EVICTED) & (self.index["evicted_at"] <= oldest)
        return np.concatenate([retired, self._free(np.flatnonzero(gone))])

    def _free(self, rows: npt.NDArray[np.int64], fate: str | None = None, *, purged: bool = False) -> Numbers:
        numbers: Numbers = self.index["number"][rows].copy()
        codes = np.full(len(rows), self._code(fate), np.uint8) if fate else self.index["reason"][rows]
        told = numbers > self.trimmed
        codes = codes | PURGED if purged else codes
        np.frombuffer(self.freed_as, np.uint8)[numbers[told] - self.trimmed] = codes[told]
        self.index.free(rows)
        return numbers

    def _trim(self, record: TrimRecord) -> None:
        del self.freed_as[: max(0, record.groups - self.trimmed)]
        self.freed_as[0] = 0
        self.trimmed = max(self.trimmed, record.groups)
        self.trimmed_entries = max(self.trimmed_entries, record.entries)
        for step in [step for step, entry in self.records.items() if entry <= self.trimmed_entries]:
            del self.records[step], self.made[step]
