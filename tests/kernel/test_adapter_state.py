"""State of a run with adapters, compared with lists: progress, turns, versions and group counts of each adapter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from replaybuf.kernel.rows.index import FREED, IN_BATCHES, LIVE
from replaybuf.kernel.state.history import lost_version_since
from replaybuf.kernel.state.rotation import AdapterShare, Rotation, share_batch
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.snapshot import decode_snapshot, encode_snapshot, restore, take
from replaybuf.wire.config import AdapterSpec
from replaybuf.wire.group import hash_name
from replaybuf.wire.ledger import (
    AckRecord,
    AdapterStep,
    AnyRecord,
    CheckpointRecord,
    DeadLetterRecord,
    EvictRecord,
    FailedPromptRecord,
    PolicyRecord,
    RewindRecord,
    decode_record,
    encode_record,
)
from tests.builders import batch_entry, batch_record, config_record, entries

SIZES = {"a": 2, "b": 3, "c": 1}
STEPS_PER_PUBLISH = {"a": 1, "b": 2, "c": 1}
TOKENS = 40
"""A batch holds four of the groups, which have 10 tokens each."""


class Run:
    """A run of three adapters, with its streams, and lists of what happened to every group."""

    def __init__(self) -> None:
        self.state = RunState()
        self.stream: list[np.ndarray[Any, Any]] = []
        self.ledger: list[bytes] = []
        self.groups: list[tuple[str, int]] = []
        self.history: list[dict[str, list[int]]] = []
        self.made: list[dict[str, list[int]]] = []
        self.rotation = [Rotation()]
        self.acked = 0
        adapters = {
            name: AdapterSpec(groups_per_batch=size, steps_per_publish=STEPS_PER_PUBLISH[name])
            for name, size in SIZES.items()
        }
        self.write(config_record(1, adapters=adapters))

    def write(self, record: AnyRecord) -> None:
        self.ledger.append(encode_record(record))
        self.state.apply(len(self.ledger), decode_record(self.ledger[-1]))

    def own_step(self, adapter: str, step: int) -> int:
        """Count, from the lists, the steps that the adapter has completed before the run's `step`."""
        return sum(len(batch.get(adapter, [])) for batch in self.history[:step]) // SIZES[adapter]

    def version(self, adapter: str, step: int) -> int:
        return self.own_step(adapter, step) // STEPS_PER_PUBLISH[adapter]

    def store(self, adapter: str, version: int) -> None:
        made = entries(
            {
                "adapter": hash_name(adapter),
                "policy_version": version,
                "policy_version_max": version,
                "prompt_index": len(self.groups),
            }
        )
        self.stream.append(made)
        self.groups.append((adapter, version))
        self.state.store(np.array([len(self.groups)]), made)

    def live(self, adapter: str) -> list[int]:
        index = self.state.index
        own_rows = (index["state"] == LIVE) & (index["adapter"] == hash_name(adapter))
        numbers: list[int] = index["number"][own_rows].tolist()
        return numbers

    def batch(self) -> None:
        """Make a batch of ready adapters; oldest groups first, at most as many as the adapter's step needs."""

        def offer(name: str, tokens: int | None, lacking: int | None) -> AdapterShare | None:
            assert lacking is not None
            live, room = self.live(name), TOKENS if tokens is None else tokens
            taken = live[: min(lacking, room // 10)]
            complete = len(taken) == lacking or len(live) > len(taken)
            return AdapterShare(np.array(taken), None, 10 * len(taken)) if taken and complete else None

        shares, following = share_batch(self.state.rotation, SIZES, TOKENS, offer)
        if not shares:
            return
        step, state = self.state.next_step, self.state
        rows_by_name = {name: share.numbers.tolist() for name, share in shares.items()}
        parts = {}
        for name, numbers in rows_by_name.items():
            own = state.progress_at(step, name)
            done = own.groups + len(numbers) == SIZES[name]
            parts[name] = AdapterStep(own.steps, state.version_at(step, name), len(numbers), done)
        held = [
            msgspec.structs.replace(batch_entry(number), adapter=name)
            for name, numbers in rows_by_name.items()
            for number in numbers
        ]
        record = batch_record(step, held, generation=state.generation)
        self.write(msgspec.structs.replace(record, adapters=parts, turn=following))
        del self.history[step:], self.rotation[step + 1 :]
        self.history.append(rows_by_name)
        self.made.append(rows_by_name)
        self.rotation.append(self.state.rotation)

    def ack(self) -> None:
        step = self.state.step
        if step < self.state.next_step:
            self.write(AckRecord(step=step, epoch=1))
            for name in SIZES:
                version = self.version(name, step + 1)
                if version > self.state.published[name]:
                    self.write(PolicyRecord(version=version, weights_uri=name, adapter=name, epoch=1))

    def rewind(self, step: int, *, resample: bool) -> None:
        versions = {name: self.state.version_at(step, name) for name in SIZES}
        self.write(
            RewindRecord(
                step=step,
                generation=self.state.generation + 1,
                on_resume="resample" if resample else "redeliver",
                version=0,
                versions=versions,
                until=self.state.stored,
            )
        )
        if resample:
            del self.history[step:], self.rotation[step + 1 :]

    def rebuilt(self, snapshot: bytes | None) -> RunState:
        """Rebuild the state from the streams, after a snapshot or from the start."""
        again = RunState()
        stream = np.concatenate(self.stream) if self.stream else entries()
        again.store(np.arange(1, len(stream) + 1), stream)
        if snapshot:
            restore(again, decode_snapshot(snapshot))
        for number in range(again.entries, len(self.ledger)):
            again.apply(number + 1, decode_record(self.ledger[number]))
        return again

    def check(self) -> None:
        state, index = self.state, self.state.index
        assert state.rotation == self.rotation[state.next_step]
        for name, size in SIZES.items():
            used = sum(len(batch.get(name, [])) for batch in self.history)
            progress = state.progress_at(state.next_step, name)
            assert (progress.steps, progress.groups) == divmod(used, size)
            for step in [*state.batches, state.next_step]:
                assert state.own_step(step, name) == self.own_step(name, step)
                assert state.version_at(step, name) == self.version(name, step)
            counts = state.pool.counts_of(name)
            rows = index["state"][index["adapter"] == hash_name(name)]
            places = int(np.isin(rows, (LIVE, IN_BATCHES)).sum()) + counts.retired
            places += sum(counts.evicted.values()) + sum(counts.dead_lettered.values())
            assert counts.stored == places == sum(adapter == name for adapter, _ in self.groups)
        for field in ("stored", "retired"):
            assert getattr(state.totals, field) == sum(getattr(own, field) for own in state.pool.counts.values())
        assert state.totals.stored == state.stored
        assert state.totals.groups_used == sum(len(group) for batch in self.made for group in batch.values())
        all_counts = state.pool.counts.values()
        assert sum((Counter(own.used_staleness) for own in all_counts), Counter()) == state.totals.used_staleness
        for kind, lengths in state.totals.histograms.lengths.items():
            each = [own.histograms.lengths[kind].mean.counts for own in all_counts]
            assert [sum(counts) for counts in zip(*each, strict=True)] == (lengths.mean.counts if each else [])
        drops = {reason: total.versions.counts for reason, total in state.totals.histograms.drop_ages.items()}
        for reason, ages in drops.items():
            each = [
                own.histograms.drop_ages[reason].versions.counts
                for own in all_counts
                if reason in own.histograms.drop_ages
            ]
            assert ages == [sum(some) for some in zip(*each, strict=True)]


def adapter_state(state: RunState) -> dict[str, Any]:
    """Return the parts of a state that depend on adapters."""
    return {
        "turns": (state.rotation, {step: batch.rotation for step, batch in state.batches.items()}),
        "adapter counts": state.pool.counts,
        "published": (state.published, state.weights_uri, state.rewinds),
        "steps": (state.step, state.next_step, state.generation, state.checkpoints),
        "counts": (+state.totals.evicted, +state.totals.dead_lettered, state.totals.retired, state.totals.histograms),
        **{f"row {name}": state.index[name][state.index["state"] != FREED].tolist() for name in state.index.columns},
        "failed": state.failed.prompts,
    }


ADAPTERS = st.sampled_from([*SIZES])
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("store"), ADAPTERS, st.integers(1, 4)),
        st.tuples(st.just("batch"), st.just(""), st.just(0)),
        st.tuples(st.just("ack"), st.just(""), st.just(0)),
        st.tuples(st.sampled_from(["redeliver", "resample", "checkpoint"]), st.just(""), st.integers(0, 9)),
        st.tuples(st.sampled_from(["evict", "poison", "fail", "snapshot"]), ADAPTERS, st.integers(0, 9)),
    ),
    max_size=40,
)


BATCH, ACK = ("batch", "", 0), ("ack", "", 0)
FULL = [("store", "a", 4), ("store", "b", 4), ("store", "c", 2), BATCH, ACK, BATCH]
"""Two batches; the first one is acked."""


@given(MOVES)
@example([*FULL, ("snapshot", "a", 0), ACK, ("resample", "", 1), BATCH])
@example([*FULL, ("snapshot", "a", 0), ACK, BATCH, ("resample", "", 0)])
@example([*FULL, ACK, ("checkpoint", "", 1), BATCH, ("snapshot", "a", 0), BATCH])
def test_each_adapter_has_the_progress_turns_versions_and_groups_of_the_surviving_history(
    moves: list[tuple[str, str, int]],
) -> None:
    """After rewinds, checkpoints, evictions and restarts, with and without a snapshot."""
    run, snapshot = Run(), None
    for move, adapter, number in moves:
        state = run.state
        resumable = state.oldest_step + number % (state.step - state.oldest_step + 1)
        if move == "store":
            for _ in range(number):
                run.store(adapter, state.published[adapter])
        elif move == "batch":
            run.batch()
        elif move == "ack":
            run.ack()
        elif move in ("redeliver", "resample"):
            run.rewind(resumable, resample=move == "resample")
            for name in SIZES:
                assert run.state.published[name] == run.version(name, resumable)
                assert lost_version_since(run.state.rewinds[name], 0) is not None
                for number_ in run.live(name):
                    assert run.groups[number_ - 1][1] <= run.state.published[name]
        elif move == "checkpoint":
            run.write(CheckpointRecord(step=resumable, keep=1))
        elif move in ("evict", "poison") and run.live(adapter):
            numbers = {"too_stale": run.live(adapter)[:number]}
            step = state.next_step
            run.write(EvictRecord(step=step, numbers=numbers) if move == "evict" else DeadLetterRecord(numbers=numbers))
        elif move == "fail":
            failed = FailedPromptRecord(adapter=adapter, prompt_index=number, outcome="failed", attempts=1, reason="")
            run.write(failed)
            stored = number < len(run.groups) and run.groups[number][0] == adapter
            if not stored:
                assert (adapter, number) in run.state.failed.prompts
        elif move == "snapshot":
            snapshot = encode_snapshot(take(run.state))
        run.check()
    assert adapter_state(run.rebuilt(snapshot)) == adapter_state(run.rebuilt(None))
    assert adapter_state(run.rebuilt(snapshot))["adapter counts"] == adapter_state(run.state)["adapter counts"]


def test_a_rewind_evicts_groups_by_the_version_of_their_adapter() -> None:
    """Adapters a and c both published version 1; the rewind undoes a later version of a only."""
    run = Run()
    for adapter, groups in (("c", 1), ("a", 4)):
        for _ in range(groups):
            run.store(adapter, 0)
    run.batch()  # a: own step 0, c: own step 0
    run.ack()
    run.batch()  # a: own step 1
    run.ack()
    assert run.state.published == {"": 0, "a": 2, "b": 0, "c": 1}
    run.store("a", 2)
    run.store("c", 1)
    run.rewind(1, resample=False)
    assert run.state.published == {"": 0, "a": 1, "b": 0, "c": 1}
    assert [run.live("a"), run.live("c")] == [[], [7]]
    assert run.state.pool.counts_of("a").evicted == {"lost_lineage": 1}
    assert run.state.pool.counts_of("c").evicted == {}
