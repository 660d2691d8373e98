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
from replaybuf.kernel.state.lookups import find_group_state
from replaybuf.kernel.state.pool import COUNTED_LATE
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
    FailedPromptRecord,
    LossRecord,
    PolicyRecord,
    PurgeRecord,
    RewindRecord,
    TrimRecord,
)
from tests.builders import batch_entry, batch_record, config_record, entries

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


def test_the_newest_failures_keep_their_reason_until_a_late_group_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts stay failed; a long reason is cut."""
    monkeypatch.setattr("replaybuf.kernel.state.failed_prompts.MAX_FAILURES", 2)
    run = Run()
    for index, reason in enumerate(("first", "second", "third" + 300 * "!")):
        run.apply(
            FailedPromptRecord(adapter="", prompt_index=index, outcome="failed", attempts=3, reason=reason, at_s=9.0)
        )
    kept = [(failed.prompt_index, failed.reason) for failed in run.state.failed.newest.values()]
    assert kept == [(1, "second"), (2, "third" + 195 * "!")]
    assert len(run.state.failed.prompts) == 3
    run.state.store(np.array([1]), entries({"prompt_index": 1}))
    assert [failed.prompt_index for failed in run.state.failed.newest.values()] == [2]


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
