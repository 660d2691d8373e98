"""State of a run after single records; `test_state_model.py` compares whole histories with a model."""

from __future__ import annotations

import unittest.mock
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import LedgerGap, ReplaybufError
from replaybuf.kernel.decide.records import decide_attach, decide_policy
from replaybuf.kernel.state.history import add_rewind, lost_version_since
from replaybuf.kernel.state.pool import COUNTED_LATE
from replaybuf.kernel.state.queries import find_batch_entry, find_group_state, list_purgeable
from replaybuf.kernel.state.run_state import FEEDBACK_STEPS, RunState
from replaybuf.kernel.state.snapshot import encode_snapshot, restore, take
from replaybuf.wire.contract import AttachRequest
from replaybuf.wire.ledger import (
    EPOCHS_OF_RESTORE,
    AckRecord,
    AnyRecord,
    AttachRecord,
    CheckpointRecord,
    DeadLetterRecord,
    EvictRecord,
    LossRecord,
    PolicyRecord,
    PurgeRecord,
    RewindRecord,
    TicketRecord,
    TrimRecord,
)
from tests.builders import batch_entry, batch_record, config_record, entries
from tests.kernel.listing import list_numbers

PLACES = ("live", "in_batches", "retired", "evicted", "dead_lettered")
OnResume = Literal["redeliver", "resample"]


class Run:
    """A state with short methods that apply one record each."""

    def __init__(self, max_uses: int | None = 1, **config: Any) -> None:
        self.state = RunState()
        self.apply(config_record(max_uses, **config))

    def apply(self, record: AnyRecord) -> list[int]:
        freed: list[int] = self.state.apply(self.state.entries + 1, record).tolist()
        return freed

    def store(self, *newest_versions: int) -> None:
        first = self.state.stored + 1
        numbers = np.arange(first, first + len(newest_versions))
        self.state.store(numbers, entries(*({"policy_version_max": version} for version in newest_versions)))

    def batch(self, *numbers: int) -> int:
        state = self.state
        self.apply(batch_record(state.next_step, [batch_entry(n) for n in numbers], generation=state.generation))
        return state.entries

    def train(self, *numbers: int) -> int:
        made = self.batch(*numbers)
        self.apply(AckRecord(step=self.state.step, epoch=1))
        self.apply(PolicyRecord(version=self.state.step, weights_uri="w", adapter="", epoch=1))
        return made

    def evict(self, *numbers: int, reason: str = "too_stale") -> None:
        self.apply(EvictRecord(step=self.state.next_step, numbers={reason: list(numbers)}))

    def checkpoint(self, step: int, keep: int = 1) -> list[int]:
        return self.apply(CheckpointRecord(step=step, keep=keep))

    def rewind(self, step: int, on_resume: OnResume) -> None:
        self.apply(
            RewindRecord(
                step=step,
                generation=self.state.generation + 1,
                on_resume=on_resume,
                version=step,
                until=self.state.stored,
            )
        )

    def places(self) -> list[str]:
        states = [find_group_state(self.state, number) for number in range(1, self.state.stored + 1)]
        return [place if reason is None else f"{place}: {reason}" for place, reason in states]


def test_a_rewind_evicts_groups_of_lost_versions_unless_a_current_batch_holds_them() -> None:
    """A rewind to step 1 loses version 2: its groups leave the buffer, except those of a redelivered batch."""
    run = Run()
    run.store(0, 1)
    run.train(1)
    run.train(2)
    run.store(1, 2, 2)
    run.batch(4)
    run.rewind(1, "redeliver")
    assert run.places() == ["in_batches", "in_batches", "live", "in_batches", "evicted: lost_lineage"]
    assert run.state.published == {"": 1} and run.state.weights_uri == {"": None}
    assert (run.state.step, run.state.next_step) == (1, 3)
    assert [batch.acked for batch in run.state.batches.values()] == [True, False, False]


def test_the_weights_of_a_version_are_announced_again_after_a_rewind() -> None:
    """A rewind forgets where they are: the trainer that resumes writes them again. A repetition changes nothing."""
    run = Run()
    run.store(0, 1)
    run.train(1)
    run.train(2)

    def announce(uri: str | None) -> PolicyRecord | None:
        return decide_policy(run.state, run.state.published[""], 1, uri, "", 0.0)

    assert announce("again") is None
    run.rewind(1, "redeliver")
    assert announce(None) is None
    record = announce("again")
    assert record is not None and (record.version, record.weights_uri) == (1, "again")
    run.apply(record)
    assert run.state.weights_uri == {"": "again"} and announce("again") is None


def test_a_group_of_a_lost_version_never_comes_back_from_a_batch_voided_later() -> None:
    """Version 2 is trained again after the rewind; groups of the lost version 2 must not count as its groups."""
    run = Run()
    run.store(0, 1)
    run.train(1)
    run.train(2)
    run.store(2)
    run.batch(3)
    run.rewind(1, "redeliver")
    run.apply(AckRecord(step=1, epoch=2))
    run.rewind(2, "resample")
    assert run.places() == ["in_batches", "in_batches", "evicted: lost_lineage"]
    assert run.state.totals.evicted == {"lost_lineage": 1}


def test_a_group_of_a_lost_version_never_comes_back_from_an_eviction_after_the_step() -> None:
    """A rewind that keeps the batches keeps the eviction too, but not for work of a lost version."""
    run = Run()
    run.store(0, 1)
    run.train(1)
    run.train(2)
    run.store(2)
    run.evict(3, reason="overlong")
    run.rewind(1, "redeliver")
    assert run.places()[2] == "evicted: lost_lineage"
    run.apply(AckRecord(step=1, epoch=2))
    run.rewind(2, "resample")
    assert run.places() == ["in_batches", "in_batches", "evicted: lost_lineage"]


def test_groups_stored_after_a_rewind_are_not_of_a_lost_version() -> None:
    """A restart folds the whole index stream before the ledger, so `until` must bound what a rewind evicts."""
    state = RunState()
    values = entries({"policy_version_max": 1}, {"policy_version_max": 1})
    state.store(np.array([1, 2]), values)
    state.apply(1, config_record())
    state.apply(2, RewindRecord(step=0, generation=1, on_resume="resample", version=0, until=1))
    assert [find_group_state(state, number)[0] for number in (1, 2)] == ["evicted", "live"]


def test_resample_undoes_uses_and_evictions_recorded_after_the_step() -> None:
    """An eviction recorded at the step itself stays: no batch from there on may use the group."""
    run = Run()
    run.store(0, 0, 0, 0)
    run.train(1)
    run.evict(2, reason="overlong")
    run.train(3)
    run.evict(4)
    run.rewind(1, "resample")
    assert run.places() == ["in_batches", "evicted: overlong", "live", "live"]
    assert run.state.index["times_sampled"].tolist() == [1, 0, 0, 0]
    assert +run.state.totals.evicted == {"overlong": 1}
    assert (run.state.step, run.state.next_step, list(run.state.batches)) == (1, 1, [0])


def test_redeliver_keeps_batches_uses_and_evictions() -> None:
    run = Run()
    run.store(0, 0, 0)
    run.train(1)
    run.train(2)
    run.evict(3)
    run.rewind(1, "redeliver")
    assert run.places() == ["in_batches", "in_batches", "evicted: too_stale"]
    assert (run.state.step, run.state.next_step) == (1, 2)
    assert not run.state.batches[1].acked


def test_voiding_a_use_restores_the_step_of_the_use_before_even_of_a_freed_batch() -> None:
    """`last_step` -1 means never used; a group used in step 0 must not look fresh after step 1 is voided."""
    run = Run(max_uses=None)
    run.store(0, 0)
    run.train(1)
    run.train(1, 2)
    run.checkpoint(1)
    run.rewind(1, "resample")
    assert run.state.index["times_sampled"].tolist() == [1, 0]
    assert run.state.index["last_step"].tolist() == [0, -1]


def test_a_checkpoint_frees_exactly_what_no_resume_needs() -> None:
    """A resume at step 1 or later needs neither the batch of step 0 nor groups evicted before step 1."""
    run = Run()
    run.store(0, 0, 0, 0, 0)
    run.evict(1)
    run.train(2)
    run.evict(3)
    run.train(4)
    run.evict(5)
    assert sorted(run.checkpoint(1)) == [1, 2, 3]
    assert run.places() == ["evicted: too_stale", "retired", "evicted: too_stale", "in_batches", "evicted: too_stale"]
    assert (run.state.oldest_step, list(run.state.batches)) == (1, [1])
    assert sorted(run.checkpoint(2)) == [4, 5]
    assert run.state.totals.retired == 2 and run.state.totals.evicted == {"too_stale": 3}


def test_older_checkpoints_stay_resumable_as_long_as_they_are_kept() -> None:
    run = Run()
    run.store(0, 0, 0)
    for number in (1, 2, 3):
        run.train(number)
    assert run.checkpoint(1, keep=2) == [1]
    assert run.checkpoint(3, keep=2) == []
    assert run.state.checkpoints == [1, 3]
    assert sorted(run.checkpoint(3, keep=1)) == [2, 3]


def test_a_rewind_forgets_checkpoints_of_steps_that_are_trained_again() -> None:
    """They hold weights of the lost history, and would free what the new one needs."""
    run = Run()
    run.store(0, 0, 0)
    for number in (1, 2, 3):
        run.train(number)
    run.checkpoint(1, keep=2)
    run.checkpoint(3, keep=2)
    run.rewind(1, "redeliver")
    assert run.state.checkpoints == [1]
    run.apply(AckRecord(step=1, epoch=2))
    run.checkpoint(2, keep=2)
    assert run.state.checkpoints == [1, 2]


def test_a_live_group_is_never_freed_by_a_checkpoint() -> None:
    run = Run(max_uses=2)
    run.store(0, 0)
    run.train(1)
    assert run.checkpoint(1) == []
    assert run.places() == ["live", "live"]


def test_a_used_group_that_is_evicted_stays_for_redelivery_and_is_retired_by_a_checkpoint() -> None:
    run = Run(max_uses=2)
    run.store(0)
    run.train(1)
    run.evict(1)
    assert run.places() == ["in_batches"] and not +run.state.totals.evicted
    assert run.checkpoint(1) == [1]
    assert run.places() == ["retired"]


def test_a_dead_letter_in_a_batch_that_may_be_asked_for_again_is_not_purged() -> None:
    """The group broke at its second use; a resume may need the batch of its first use until a checkpoint."""
    run = Run(max_uses=2)
    run.store(0, 0)
    run.train(1)
    run.apply(DeadLetterRecord(numbers={"bad_checksum": [1, 2]}))
    assert list_purgeable(run.state) == [2]
    run.checkpoint(1)
    assert list_purgeable(run.state) == [1, 2]


def test_no_rewind_restores_an_evicted_group_that_broke_in_its_batch() -> None:
    """Undoing the eviction must not make the broken group live again."""
    run = Run(max_uses=2)
    run.store(0, 0)
    run.train(1, 2)
    run.evict(1)
    run.apply(DeadLetterRecord(numbers={"bad_checksum": [1, 2]}))
    assert run.places() == ["dead_lettered: bad_checksum"] * 2
    run.rewind(0, "resample")
    assert run.places() == ["dead_lettered: bad_checksum"] * 2
    assert run.state.totals.dead_lettered == {"bad_checksum": 2} and not +run.state.totals.evicted


def test_a_purged_dead_letter_is_still_reported_as_dead_lettered() -> None:
    run = Run()
    run.store(0, 0)
    run.apply(DeadLetterRecord(numbers={"bad_checksum": [1]}))
    assert run.apply(PurgeRecord(numbers=[1])) == [1]
    assert run.places() == ["dead_lettered: bad_checksum", "live"]
    assert run.state.totals.dead_lettered == {"bad_checksum": 1}
    assert list_numbers(run.state, "dead_lettered", 0, 9) == [1]
    assert list_numbers(run.state, "retired", 0, 9) == []


def test_the_entry_of_a_batch_depends_on_the_requested_generation() -> None:
    """Step 1 was made in generation 0, kept in 1, voided by 2 and made again."""
    run = Run()
    run.store(0, 0, 0)
    first = run.train(1)
    voided = run.train(2)
    run.rewind(1, "redeliver")
    run.rewind(1, "resample")
    assert find_batch_entry(run.state, 1) is None
    again = run.train(3)
    assert find_batch_entry(run.state, 1) == again
    assert [find_batch_entry(run.state, 1, generation) for generation in range(4)] == [voided, voided, again, None]
    assert [find_batch_entry(run.state, 0, generation) for generation in range(4)] == [first, first, first, None]
    assert find_batch_entry(run.state, 2) is None


def test_a_freed_batch_keeps_its_entry_and_a_freed_voided_one_loses_it() -> None:
    run = Run()
    run.store(0, 0)
    run.train(1)
    run.rewind(0, "resample")
    again = run.train(2)
    run.checkpoint(1)
    assert find_batch_entry(run.state, 0) == find_batch_entry(run.state, 0, 1) == again
    assert find_batch_entry(run.state, 0, 0) is None


def test_a_gap_in_the_ledger_is_an_error() -> None:
    run = Run()
    with pytest.raises(ReplaybufError, match="ledger entry 3 follows 1"):
        run.state.apply(3, AckRecord(step=0, epoch=1))


@pytest.mark.parametrize(
    "record",
    [
        batch_record(1, [batch_entry(2), batch_entry(3)]),
        EvictRecord(step=1, numbers={"too_stale": [2], "overlong": [3, 1]}),
        DeadLetterRecord(numbers={"broken_frame": [3]}),
        PurgeRecord(numbers=[3]),
        RewindRecord(step=0, generation=1, on_resume="redeliver", version=0, until=3),
        TrimRecord(groups=3, entries=1),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_of_unknown_groups_is_a_gap_and_changes_nothing(record: AnyRecord) -> None:
    """Their index entries were trimmed before this reader read them, so its state is too old to continue."""
    run = Run()
    run.store(0, 0)
    run.train(1)
    before = encode_snapshot(take(run.state))
    with pytest.raises(LedgerGap, match=f"entry {run.state.entries + 1} names group 3; .* read up to 2 and"):
        run.apply(record)
    assert encode_snapshot(take(run.state)) == before


def test_an_accepted_loss_fences_epochs_and_voids_versions_that_lost_records_may_have_given() -> None:
    run = Run()
    run.store(0)
    run.train(1)
    epoch, generation = run.state.epoch, run.state.generation
    run.apply(LossRecord(entries=3, groups=2))
    assert run.state.epoch > epoch + 3 and run.state.generation > generation + 3
    assert lost_version_since(run.state.rewinds[""], generation) == run.state.published[""]
    again = RunState()
    again.start_after(0)
    again.store(np.array([1]), entries({"policy_version_max": 0}))
    restore(again, take(run.state))
    assert (again.epoch, again.generation) == (run.state.epoch, run.state.generation)


@pytest.mark.parametrize("lost", [0, 3])
def test_a_trainer_of_a_restored_run_gets_an_epoch_above_all_that_others_may_have(lost: int) -> None:
    """Others attached after the backup, or after the restore to a Redis that then lost their attaches."""

    def attach(run: Run, epoch_base: int = 0) -> int:
        run.apply(decide_attach(run.state, AttachRequest(), 0.0, epoch_base))
        return run.state.epoch

    went_on, restored, lost_later = Run(), Run(), Run()
    base = 7 * EPOCHS_OF_RESTORE
    others = [attach(went_on) for _ in range(5)]
    for copy in (restored, lost_later):
        attach(copy)
    others += [attach(lost_later, base) for _ in range(lost)]
    if lost:
        restored.apply(LossRecord(entries=lost, groups=0))
    first = attach(restored, base)
    assert first > max(others) and attach(restored, base) == first + 1


def test_a_run_is_finished_when_the_last_step_is_acked_and_running_again_after_a_rewind() -> None:
    run = Run(max_steps=1)
    run.store(0)
    states = [run.state.phase]
    run.train(1)
    states.append(run.state.phase)
    run.rewind(0, "redeliver")
    states.append(run.state.phase)
    assert states == ["running", "finished", "running"]


@pytest.mark.parametrize(("reason", "state"), [("prompts", "running"), ("operator", "finished")])
def test_a_rewind_reopens_a_run_that_used_up_its_prompts_not_one_that_an_operator_finished(
    reason: str, state: str
) -> None:
    run = Run()
    run.apply(config_record(state="finished", reason=reason))
    run.rewind(0, "redeliver")
    assert run.state.phase == state


def test_a_ticket_has_lost_the_lowest_version_of_all_rewinds_since_its_generation() -> None:
    run = Run()
    for step in (3, 1, 2):
        run.apply(
            RewindRecord(step=step, generation=run.state.generation + 1, on_resume="redeliver", version=step, until=0)
        )
    assert [lost_version_since(run.state.rewinds[""], generation) for generation in range(4)] == [1, 1, 2, None]


@given(st.lists(st.integers(0, 12), max_size=30), st.integers(2, 6))
def test_few_rewinds_give_the_exact_lost_version_and_many_never_a_higher_one(versions: list[int], cap: int) -> None:
    """A rewind is dropped if a later one covers it; above the bound the oldest tickets get a lower version."""
    exact: list[tuple[int, int]] = []
    remembered: list[tuple[int, int]] = []
    bounded: list[tuple[int, int]] = []
    for generation, version in enumerate(versions, 1):
        exact.append((generation, version))
        remembered = add_rewind(remembered, generation, version)
        with unittest.mock.patch("replaybuf.kernel.state.history.MAX_REWINDS", cap):
            bounded = add_rewind(bounded, generation, version)
        assert len(bounded) <= cap
    for generation in range(len(versions) + 1):
        lost = min((version for reached, version in exact if reached > generation), default=None)
        assert lost_version_since(remembered, generation) == lost
        lost_version = lost_version_since(bounded, generation)
        assert lost_version == lost if lost is None else lost_version is not None and lost_version <= lost
    assert len(remembered) <= 13


def test_the_trainer_that_attached_last_holds_the_run() -> None:
    run = Run()
    assert run.state.epoch == 0
    for epoch in (1, 2):
        run.apply(AttachRecord(epoch=epoch, step=0, dp_world_size=4, seq_len=64, pad_to_multiple_of=8))
        assert run.state.epoch == epoch
    assert run.state.attachment is not None and run.state.attachment.dp_world_size == 4


def test_failed_prompts_are_kept() -> None:
    run = Run()
    run.apply(TicketRecord(adapter="", prompt_index=4, outcome="failed", attempts=3, reason="expired"))
    assert list(run.state.failed.prompts) == [("", 4)]


def test_the_newest_failures_keep_their_reason_until_a_late_group_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts stay failed; a long reason is cut."""
    monkeypatch.setattr("replaybuf.kernel.state.failed_prompts.MAX_FAILURES", 2)
    run = Run()
    for index, reason in enumerate(("first", "second", "third" + 300 * "!")):
        run.apply(TicketRecord(adapter="", prompt_index=index, outcome="failed", attempts=3, reason=reason, at_s=9.0))
    kept = [(failed.prompt_index, failed.reason) for failed in run.state.failed.newest.values()]
    assert kept == [(1, "second"), (2, "third" + 195 * "!")]
    assert len(run.state.failed.prompts) == 3
    run.state.store(np.array([1]), entries({"prompt_index": 1}))
    assert [failed.prompt_index for failed in run.state.failed.newest.values()] == [2]


def test_a_late_group_undoes_the_failure_of_its_prompt_in_either_order_of_the_streams() -> None:
    """A prompt never counts both as failed and as stored."""
    failures = [
        TicketRecord(adapter="", prompt_index=index, outcome="failed", attempts=3, reason="expired") for index in (4, 5)
    ]
    late = entries({"prompt_index": 4}, {})
    before, after = Run(), Run()
    for record in failures:
        after.apply(record)
    assert set(after.state.failed.prompts) == {("", 4), ("", 5)}
    for run in (before, after):
        run.state.store(np.array([1, 2]), late)
    for record in failures:
        before.apply(record)
    assert list(before.state.failed.prompts) == list(after.state.failed.prompts) == [("", 5)]


def test_a_lower_max_uses_uses_groups_up_and_a_higher_one_makes_them_live_again() -> None:
    """An evicted group stays evicted."""
    run = Run(max_uses=None)
    run.store(0, 0, 0)
    run.train(1, 2)
    run.evict(2)
    run.apply(config_record(1))
    assert run.places() == ["in_batches", "in_batches", "live"]
    run.apply(config_record(2))
    assert run.places() == ["live", "in_batches", "live"]


def test_an_invalid_index_entry_is_not_in_the_cached_sums_of_live_groups() -> None:
    state = RunState()
    state.store(np.array([1, 2]), entries({"tokens": 5, "frame_bytes": 50}, {"tokens": 7, "frame_bytes": 70}))
    assert state.pool.live.totals() == (2, 12, 2, 0, 120)
    state.store(np.array([3, 4]), entries({"tokens": 11, "frame_bytes": 110}, {"tokens": 0}))
    assert state.pool.live.totals() == (3, 23, 3, 0, 230)


def test_feedback_of_the_newest_steps_of_the_surviving_history_is_kept() -> None:
    """Steps without feedback do not count."""
    run = Run(max_uses=None)
    run.store(0)

    def train(feedback: dict[str, Any] | None) -> None:
        run.batch(1)
        run.apply(AckRecord(step=run.state.step, epoch=1, feedback=feedback))

    for step in range(FEEDBACK_STEPS + 4):
        train({"loss": step} if step != 2 else None)
    assert list(run.state.feedback) == list(range(4, FEEDBACK_STEPS + 4))
    assert msgspec.msgpack.decode(run.state.feedback[4]) == {"loss": 4}
    run.rewind(6, "redeliver")
    assert list(run.state.feedback) == [4, 5]


@pytest.mark.parametrize(("reason", "kept"), [("operator", [0]), ("strategy 's' raised in observe", [])])
def test_a_run_that_continues_after_its_strategy_failed_drops_its_feedback(reason: str, kept: list[int]) -> None:
    run = Run()
    run.store(0)
    run.batch(1)
    run.apply(AckRecord(step=0, epoch=1, feedback={"loss": 1}))
    for state in ("paused", "running"):
        run.apply(config_record(1, state=state, reason=reason if state == "paused" else None))
    assert list(run.state.feedback) == kept


def test_histograms_never_lack_more_groups_than_a_reader_counts_at_once() -> None:
    """The first reader after a start with a million groups counted all of them: 0.19 s."""
    state = RunState()
    for start in range(0, 4 * COUNTED_LATE, COUNTED_LATE // 2):
        numbers = np.arange(start + 1, start + 1 + COUNTED_LATE // 2)
        state.store(numbers, np.repeat(entries({}), len(numbers)))
        assert state.stored - state.pool.counted <= COUNTED_LATE
    assert state.totals.histograms.lengths["stored"].mean.count == 4 * COUNTED_LATE
