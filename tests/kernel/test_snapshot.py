"""Restore from a snapshot, compared with the whole history; trimming of history."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from replaybuf.errors import Gone, ReplaybufError
from replaybuf.kernel.decide.trimming import decide_trim
from replaybuf.kernel.rows.index import ENTRY, FREED
from replaybuf.kernel.state.lookups import check_record_kept, find_batch_entry, find_group_state
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.snapshot import MAGIC, decode_snapshot, encode_snapshot, restore, take
from replaybuf.wire.ledger import TrimRecord, decode_record
from tests.builders import entries
from tests.kernel.listing import list_numbers
from tests.kernel.test_state import Run
from tests.kernel.test_state_model import RunStateMachine, story_of

HEADER_BYTES = len(MAGIC) + 20


def restarted(state: RunState, stream: np.ndarray[Any, Any], raw: bytes) -> RunState:
    """Restore a snapshot with the entries that trimming keeps: those set aside and those after `trimmed`."""
    snapshot = decode_snapshot(raw)
    again = RunState()
    again.start_after(snapshot.trimmed)
    aside = np.frombuffer(snapshot.set_aside, np.int64)
    # If the service dies before deleting it, the entry of a freed group may still be set aside.
    extra = [1] if snapshot.trimmed and 1 not in aside else []
    numbers = np.array([*extra, *aside.tolist()], np.int64)
    again.store(numbers, stream[numbers - 1])
    rest = np.arange(snapshot.trimmed + 1, len(stream) + 1)
    again.store(rest, stream[rest - 1])
    restore(again, snapshot)
    return again


def records_of(state: RunState) -> dict[int, Any]:
    return {step: (record.entry, record.generation, record.numbers.tolist()) for step, record in state.records.items()}


def kept_story_of(state: RunState) -> dict[str, Any]:
    """Return the parts of a state that trimming keeps."""
    story = {key: value for key, value in story_of(state).items() if key != "places"} if not state.trimmed else {}
    index = state.index
    numbers = index["number"][index["state"] != FREED].tolist()
    kept = sorted({*numbers, *range(state.trimmed + 1, state.stored + 1)})
    rows = index.rows_of(kept)
    return story | {
        "places": {n: find_group_state(state, n) for n in kept},
        "rows": {name: index[name][rows].tolist() for name in index.columns},
        "trimmed": (state.trimmed, state.trimmed_entries, state.stored, state.entries, len(state.pool.freed_as)),
        "history": (records_of(state), state.voided, state.checkpoints, state.rewinds, state.oldest_step),
        "batches": {
            s: (b.entry, b.generation, b.numbers.tolist(), b.earlier, b.acked) for s, b in state.batches.items()
        },
        "counts": (
            state.totals.retired,
            +state.totals.evicted,
            +state.totals.dead_lettered,
            state.pool.stale_adapters,
        ),
        "used": (
            state.totals.groups_used,
            state.totals.tokens_used,
            state.masked_tokens,
            state.totals.used_staleness,
            state.totals.histograms,
        ),
        "feedback": state.feedback,
        "words": (state.attachment, state.config, state.max_uses, state.config_phase),
        "failed": (state.failed.prompts, state.failed.newest),
        "steps": (state.step, state.next_step, state.generation, state.published, state.weights_uri),
    }


class SnapshotMachine(RunStateMachine):
    """Everything that a service may write, with trimming and restarts from a snapshot."""

    def go_on_with(self, rebuilt: RunState) -> None:
        if self.model.coming:
            self.ingest()
        assert kept_story_of(rebuilt) == kept_story_of(self.state)
        self.state = rebuilt

    @rule(tail=st.integers(0, 3))
    def restart_from_a_snapshot(self, tail: int) -> None:
        """Restore a snapshot taken `tail` records ago and continue with that state."""
        if not hasattr(self, "snapshots"):
            self.snapshots: list[bytes] = []
        self.snapshots.append(encode_snapshot(take(self.state)))
        raw = self.snapshots[-min(tail + 1, len(self.snapshots))]
        again = restarted(self.state, np.concatenate(self.streams.index), raw)
        while again.entries < self.state.entries:
            again.apply(again.entries + 1, decode_record(self.streams.ledger[again.entries]))
        self.go_on_with(again)

    @precondition(lambda self: self.state.step > 0)
    @rule(kept=st.integers(0, 4))
    def trim(self, kept: int) -> None:
        record = decide_trim(self.state, kept, kept_entries=1)
        if record is not None:
            held = {s: b.entry for s, b in self.state.batches.items()}
            assert all(entry > record.entries for entry in held.values())
            assert not self.write(record)

    @invariant()
    def every_group_has_the_state_of_the_model(self) -> None:
        for group in self.model.groups.values():
            if group.number > self.state.trimmed or not group.freed:
                assert find_group_state(self.state, group.number) == group.place(self.model.max_uses)
            else:
                with pytest.raises(Gone, match=f"group number {group.number} was freed"):
                    find_group_state(self.state, group.number)

    @invariant()
    def the_history_equals_the_model(self) -> None:
        assert sorted(self.state.batches) == sorted(self.model.batches)
        for step in range(self.model.next_step):
            current = next(b.entry for b in self.model.made if b.step == step and b.void_from is None)
            if find_batch_entry(self.state, step) is None:
                assert current <= self.state.trimmed_entries and step not in self.state.batches
                with pytest.raises(Gone, match=f"record of step {step} is trimmed"):
                    check_record_kept(self.state, step)
            else:
                assert find_batch_entry(self.state, step) == current

    @invariant()
    def a_page_lists_the_groups_in_a_state(self) -> None:
        findable = [g for g in self.model.groups.values() if g.number > self.state.trimmed or not g.freed]
        assert list_numbers(self.state, None, 0, 1000) == [g.number for g in findable]
        assert list_numbers(self.state, None, 2, 3) == [g.number for g in findable if g.number > 2][:3]
        numbers = [g.number for g in findable if g.place(self.model.max_uses)[0] == self.place]
        assert list_numbers(self.state, self.place, 0, 1000) == numbers
        assert list_numbers(self.state, self.place, 2, 3) == [n for n in numbers if n > 2][:3]


TestSnapshotAgainstTheWholeHistory = SnapshotMachine.TestCase
TestSnapshotAgainstTheWholeHistory.settings = settings(
    max_examples=30, stateful_step_count=40, derandomize=True, deadline=None
)


def trained(steps: int) -> Run:
    """Train `steps` steps of one group each and keep only the last checkpoint."""
    run = Run()
    run.store(*[0] * (steps + 1))
    for number in range(1, steps + 1):
        run.train(number)
    run.checkpoint(steps)
    return run


def test_a_snapshot_of_unchanged_live_groups_is_small() -> None:
    """A hundred thousand groups: their index entries hold everything."""
    run = Run()
    run.state.store(np.arange(1, 100_001), np.repeat(entries({}), 100_000))
    assert len(encode_snapshot(take(run.state))) < 2000


def test_a_snapshot_of_another_format_is_rejected() -> None:
    with pytest.raises(ReplaybufError, match=r"format b'RBS9'; this release reads b'RBS4'"):
        decode_snapshot(b"RBS9" + encode_snapshot(take(RunState()))[len(MAGIC) :])
    with pytest.raises(ReplaybufError, match="does not decode"):
        decode_snapshot(encode_snapshot(take(RunState()))[:-3])


def test_a_snapshot_with_invalid_text_is_reported_as_undecodable() -> None:
    """A name is not UTF-8, and the checksum is right."""
    raw = encode_snapshot(take(RunState()))
    spoiled = zlib.decompress(raw[HEADER_BYTES:]).replace(b"running", b"r\xffnning")
    with pytest.raises(ReplaybufError, match="snapshot does not decode: 'utf-8' codec") as caught:
        decode_snapshot(raw[:HEADER_BYTES] + zlib.compress(spoiled))
    assert caught.value.name == "snapshot"


def test_a_snapshot_with_more_groups_than_the_stream_is_reported_as_lost_data() -> None:
    raw = encode_snapshot(take(trained(3).state))
    again = RunState()
    again.store(np.array([1, 2]), entries({}, {}))
    with pytest.raises(ReplaybufError, match=r"ends at group 2; .* has 4 groups: Redis lost data"):
        restore(again, decode_snapshot(raw))


def test_a_gap_in_the_index_stream_is_an_error() -> None:
    run = Run()
    run.store(0)
    with pytest.raises(ReplaybufError, match=r"entries 3 to 3 \(1 of them\) follow 1; the stream has a gap"):
        run.state.store(np.array([3]), entries({}))


@pytest.mark.parametrize("spoiled", ["tokens", "rollouts", "policy_version", "policy_version_max"])
def test_an_invalid_index_entry_becomes_a_dead_letter(spoiled: str) -> None:
    """The counts are the same with and without a snapshot."""
    run = Run()
    run.store(0)
    raw = encode_snapshot(take(run.state))
    stream = np.concatenate([entries({}), entries({spoiled: -1}), np.zeros(1, ENTRY), entries({})])
    run.state.store(np.array([2, 3]), stream[1:3], np.array([False, True]))
    run.store(0)
    assert run.places() == ["live", *["dead_lettered: bad_index_entry"] * 2, "live"]
    assert run.state.totals.dead_lettered == {"bad_index_entry": 2}
    assert kept_story_of(restarted(run.state, stream, raw)) == kept_story_of(run.state)
    assert kept_story_of(restarted(run.state, stream, encode_snapshot(take(run.state)))) == kept_story_of(run.state)


def test_trimming_keeps_the_history_of_the_newest_freed_groups() -> None:
    """Ten groups keep their history; trimming starts when a quarter more are freed."""
    run = trained(11)
    assert decide_trim(run.state, 10) is None
    run.store(0)
    run.train(12)
    run.checkpoint(12)
    point = decide_trim(run.state, 10)
    assert point == TrimRecord(groups=2, entries=0), "the newest ledger entries stay"
    run.apply(point)
    assert len(run.state.pool.freed_as) == run.state.stored - 2 + 1
    assert find_group_state(run.state, 3) == ("retired", None)
    assert decide_trim(run.state, 10) is None


def test_many_old_live_groups_delay_trimming_and_few_do_not() -> None:
    """A few live groups are set aside; if half of the groups are live, they stay in the stream."""
    run = Run(max_uses=2)
    run.store(*[0] * 40)
    for first in range(2, 40, 2):  # the odd ones stay live
        run.train(first)
        run.train(first)
    run.checkpoint(run.state.step)
    assert decide_trim(run.state, 2) is None or decide_trim(run.state, 2).groups == 0  # type: ignore[union-attr]
    sparse = Run(max_uses=2)
    sparse.store(*[0] * 40)
    for first in range(2, 40):
        sparse.train(first)
        sparse.train(first)
    sparse.checkpoint(sparse.state.step)
    point = decide_trim(sparse.state, 2)
    assert point is not None and point.groups == 37


def test_the_record_of_a_current_or_voided_batch_is_never_trimmed() -> None:
    """A resume may read both at any age."""
    run = Run(max_uses=1)
    run.store(*[0] * 400)
    for number in range(1, 151):
        run.train(number)
    run.checkpoint(150)
    voided = run.batch(151)
    run.rewind(150, "resample")
    for number in range(152, 300):
        run.train(number)
    run.apply(decide_trim(run.state, 0) or TrimRecord(groups=0, entries=0))
    assert run.state.trimmed_entries == voided - 1
    assert find_batch_entry(run.state, 150, 0) == voided


def test_partial_groups_are_counted_once_by_a_snapshot_and_what_came_after_it() -> None:
    """Three of four groups before the snapshot are partial, and one of two after it."""
    run = Run(group_size=4, min_group_size=1)
    sizes = (1, 3, 4, 2, 4, 3)
    stream = entries(*({"rollouts": size} for size in sizes))
    run.state.store(np.arange(1, 5), stream[:4])
    raw = encode_snapshot(take(run.state))
    run.state.store(np.arange(5, 7), stream[4:])
    again = restarted(run.state, stream, raw)
    for state in (run.state, again):
        assert (state.pool.count_partial(4), state.pool.count_partial(4, ""), state.pool.count_partial(4, "a")) == (
            4,
            4,
            0,
        )
