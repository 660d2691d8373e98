"""The fold of index stream and ledger, against a model of lists and dicts; then single decisions, one by one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replaybuf.errors import ReplaybufError
from replaybuf.index import IN_BATCHES, LIVE
from replaybuf.ledger import (
    AckRecord,
    AnyRecord,
    AttachRecord,
    CheckpointRecord,
    DeadLetterRecord,
    EvictRecord,
    PolicyRecord,
    PurgeRecord,
    RewindRecord,
    TicketRecord,
    decode_record,
    encode_record,
)
from replaybuf.state import LOST_LINEAGE, RunState
from tests.builders import batch_entry, batch_record, config_record, entries

PLACES = ("live", "in_batches", "retired", "evicted", "dead_lettered")
OnResume = Literal["redeliver", "resample"]

# ---------------------------------------------------------------------- the model


@dataclasses.dataclass
class ModelGroup:
    """One group: which steps of the surviving history used it, and what else happened to it."""

    number: int
    version: int
    newest: int
    tokens: int
    uses: list[int] = dataclasses.field(default_factory=list)
    evicted: tuple[int, str] | None = None
    poison: str | None = None
    freed: bool = False
    retired: bool = False

    def place(self, max_uses: int | None) -> tuple[str, str | None]:
        if self.retired:
            return "retired", None
        if self.poison:
            return "dead_lettered", self.poison
        if self.evicted and not self.uses:
            return "evicted", self.evicted[1]
        used_up = max_uses is not None and len(self.uses) >= max_uses
        return ("in_batches" if self.evicted or used_up else "live"), None


@dataclasses.dataclass
class ModelBatch:
    """One batch that was ever made: who it holds, and in which generations it was part of the history."""

    step: int
    entry: int
    numbers: list[int]
    born: int
    void_from: int | None = None
    acked: bool = False
    freed: bool = False


class Model:
    """A run told as a story: what is in each list follows from the words of design section 2, 3 and 5 alone."""

    def __init__(self, steps_per_publish: int) -> None:
        self.steps_per_publish = steps_per_publish
        self.groups: dict[int, ModelGroup] = {}
        self.made: list[ModelBatch] = []
        self.max_uses: int | None = 1
        self.step = self.next_step = self.generation = self.published = self.entries = 0
        self.checkpoints: list[int] = []

    def version_of(self, step: int) -> int:
        return step // self.steps_per_publish

    @property
    def oldest(self) -> int:
        return min(self.checkpoints, default=0)

    @property
    def batches(self) -> dict[int, ModelBatch]:
        return {b.step: b for b in self.made if b.void_from is None and not b.freed}

    def at(self, place: str) -> list[ModelGroup]:
        return [g for g in self.groups.values() if g.place(self.max_uses)[0] == place]

    def rewind(self, step: int, mode: OnResume, until: int) -> None:
        self.generation += 1
        for batch in list(self.batches.values()):
            if batch.step >= step and mode == "resample":
                batch.void_from = self.generation
                for number in batch.numbers:
                    self.groups[number].uses.remove(batch.step)
            elif batch.step >= step:
                batch.acked = False
        version = self.version_of(step)
        for group in self.groups.values():
            later = group.evicted is not None and group.evicted[0] > step
            if mode == "resample" and later:
                group.evicted = None
            lost = group.newest > version and group.number <= until
            if lost and (group.evicted is None or later) and not group.freed and not group.poison:
                group.evicted = (step, LOST_LINEAGE)
        self.step, self.published = step, version
        self.next_step = max([step, *(s + 1 for s in self.batches)])
        self.checkpoints = [c for c in self.checkpoints if c <= step]

    def checkpoint(self, step: int, keep: int) -> set[int]:
        self.checkpoints = sorted({*self.checkpoints, step})[-keep:]
        for batch in self.made:
            batch.freed = batch.freed or batch.step < self.oldest
        freed = set()
        for group in self.groups.values():
            place = group.place(self.max_uses)[0]
            may_return = group.evicted is not None and group.evicted[0] > self.oldest
            if group.freed or may_return or place not in ("in_batches", "evicted"):
                continue
            if place == "in_batches" and max(group.uses) >= self.oldest:
                continue
            group.freed, group.retired = True, place == "in_batches"
            freed.add(group.number)
        return freed

    def batch_of(self, step: int, generation: int) -> int | None:
        found = [
            b
            for b in self.made
            if b.step == step and b.born <= generation and (b.void_from is None or generation < b.void_from)
        ]
        kept = [b for b in found if b.void_from is None or not b.freed]
        return kept[0].entry if kept and generation <= self.generation else None


def story_of(state: RunState) -> dict[str, Any]:
    """Tell everything that two folds of the same history must agree on."""
    index = state.index
    numbers = range(1, state.stored + 1)
    kept = {int(n): row for n in numbers for row in index.rows_of([n]).tolist()}
    return {
        "steps": (state.step, state.next_step, state.generation, state.oldest_step, state.state),
        "published": (state.published, state.weights_uri),
        "places": [state.place_of(n) for n in numbers],
        "uses": {n: (int(index["times_sampled"][row]), int(index["last_step"][row])) for n, row in kept.items()},
        "tokens": state.live_tokens(),
        "batches": {s: (b.entry, b.generation, b.numbers.tolist(), b.acked) for s, b in state.batches.items()},
        "records": (state.records, state.voided, state.checkpoints, state.rewinds),
        "counts": (state.stored, state.retired, +state.evicted, +state.dead_lettered, +state.evicted_since_batch),
        "used": (state.groups_used, state.tokens_used, state.used_staleness),
        "words": (state.epoch, state.failed_prompts, state.config, state.max_uses, state.entries),
    }


class RunStateMachine(RuleBasedStateMachine):
    """Everything a service may write, in any order that the service allows."""

    @initialize(data=st.data(), steps_per_publish=st.sampled_from([1, 2]), max_uses=st.sampled_from([1, 2, None]))
    def start(self, data: st.DataObject, steps_per_publish: int, max_uses: int | None) -> None:
        self.state = RunState()
        self.model = Model(steps_per_publish)
        self.ledger: list[bytes] = []
        self.stream: list[Any] = []
        self.most_uses: int | None = 1
        self.configure(max_uses)
        self.store(data, 5)

    # -- writing

    def write(self, record: AnyRecord) -> set[int]:
        raw = encode_record(record)
        self.ledger.append(raw)
        self.model.entries += 1
        freed = self.state.apply(self.model.entries, decode_record(raw)).tolist()
        assert len(freed) == len(set(freed))
        return set(freed)

    def configure(self, max_uses: int | None) -> None:
        assert not self.write(config_record(max_uses, steps_per_publish=self.model.steps_per_publish))
        self.model.max_uses = max_uses
        self.most_uses = None if max_uses is None or self.most_uses is None else max(self.most_uses, max_uses)

    # -- rules

    @rule(data=st.data(), count=st.integers(1, 5))
    def store(self, data: st.DataObject, count: int) -> None:
        fresh = []
        for _ in range(count):
            newest = data.draw(st.integers(0, self.model.published))
            number = len(self.model.groups) + 1
            group = ModelGroup(number, data.draw(st.integers(0, newest)), newest, data.draw(st.integers(2, 90)))
            self.model.groups[number] = group
            fresh.append(group)
        values = entries(
            *({"policy_version": g.version, "policy_version_max": g.newest, "tokens": g.tokens} for g in fresh)
        )
        self.stream.append(values)
        self.state.store(np.array([g.number for g in fresh], np.int64), values)

    @precondition(lambda self: self.model.next_step <= self.model.step + 1 and self.model.at("live"))
    @rule(data=st.data())
    def assemble(self, data: st.DataObject) -> None:
        model, live = self.model, self.model.at("live")
        chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=4, unique_by=lambda g: g.number))
        step = model.next_step
        for group in chosen:
            group.uses.append(step)
        record = batch_record(
            step,
            [batch_entry(g.number, version=g.version, times_sampled=len(g.uses)) for g in chosen],
            generation=model.generation,
            version=model.version_of(step),
        )
        assert not self.write(record)
        model.made.append(ModelBatch(step, model.entries, [g.number for g in chosen], model.generation))
        model.next_step += 1

    @precondition(lambda self: self.model.next_step == self.model.step and self.model.at("live"))
    @rule(data=st.data(), count=st.integers(1, 3))
    def train(self, data: st.DataObject, count: int) -> None:
        """A whole step, and fresh groups of the version it makes."""
        self.assemble(data)
        self.ack()
        if self.model.published < self.model.version_of(self.model.step):
            self.publish()
        self.store(data, count)

    @precondition(lambda self: self.model.step in self.model.batches)
    @rule()
    def ack(self) -> None:
        assert not self.write(AckRecord(step=self.model.step, epoch=1))
        self.model.batches[self.model.step].acked = True
        self.model.step += 1

    @precondition(lambda self: self.model.published < self.model.version_of(self.model.step))
    @rule()
    def publish(self) -> None:
        self.model.published = self.model.version_of(self.model.step)
        self.write(PolicyRecord(version=self.model.published, weights_uri="w", adapter="", epoch=1))

    @precondition(lambda self: self.model.at("live"))
    @rule(data=st.data(), reason=st.sampled_from(["too_stale", "overlong"]))
    def evict(self, data: st.DataObject, reason: str) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.model.at("live")), unique_by=lambda g: g.number, min_size=1))
        for group in chosen:
            group.evicted = (self.model.next_step, reason)
        self.write(EvictRecord(step=self.model.next_step, numbers={reason: [g.number for g in chosen]}))

    @precondition(lambda self: self.model.at("live"))
    @rule(data=st.data())
    def bury(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.model.at("live")))
        group.poison = "bad_checksum"
        self.write(DeadLetterRecord(numbers={"bad_checksum": [group.number]}))

    @precondition(lambda self: any(not g.freed for g in self.model.at("dead_lettered")))
    @rule()
    def purge(self) -> None:
        dead = {g.number for g in self.model.at("dead_lettered") if not g.freed}
        for number in dead:
            self.model.groups[number].freed = True
        assert self.write(PurgeRecord(numbers=sorted(dead))) == dead

    @precondition(lambda self: self.model.step > self.model.oldest)
    @rule(data=st.data(), keep=st.integers(1, 3))
    def checkpoint(self, data: st.DataObject, keep: int) -> None:
        step = data.draw(st.sampled_from(range(self.model.step, self.model.oldest - 1, -1)))
        freed = self.write(CheckpointRecord(step=step, keep=keep))
        assert freed == self.model.checkpoint(step, keep), "exactly what no resume needs is freed"

    @precondition(lambda self: self.model.next_step > self.model.oldest)
    @rule(data=st.data(), mode=st.sampled_from(["redeliver", "resample"]))
    def rewind(self, data: st.DataObject, mode: OnResume) -> None:
        model = self.model
        step = data.draw(st.integers(model.oldest, model.step))
        until = len(model.groups)
        model.rewind(step, mode, until)
        self.write(
            RewindRecord(
                step=step, generation=model.generation, on_resume=mode, version=model.version_of(step), until=until
            )
        )

    @precondition(lambda self: self.model.next_step > 1)
    @rule(max_uses=st.sampled_from([1, 2, 3, None]))
    def change_max_uses(self, max_uses: int | None) -> None:
        unacked = [g for b in self.model.batches.values() if not b.acked for g in b.numbers]
        if max_uses is None or all(len(self.model.groups[n].uses) <= max_uses for n in unacked):
            self.configure(max_uses)

    # -- what holds after every step

    @invariant()
    def every_group_stands_where_the_model_has_it(self) -> None:
        expected = [group.place(self.model.max_uses) for group in self.model.groups.values()]
        assert [self.state.place_of(number) for number in self.model.groups] == expected

    @invariant()
    def the_books_balance(self) -> None:
        state = self.state
        live, in_batches = state.count(LIVE), state.count(IN_BATCHES)
        evicted, dead = sum(state.evicted.values()), sum(state.dead_lettered.values())
        assert state.stored == len(self.model.groups)
        assert state.stored == live + in_batches + state.retired + evicted + dead
        counts = {place: len(self.model.at(place)) for place in PLACES}
        assert counts == dict(zip(PLACES, (live, in_batches, state.retired, evicted, dead), strict=True))
        reasons = Counter(g.place(self.model.max_uses)[1] for g in self.model.at("evicted"))
        assert +state.evicted == reasons
        assert state.live_tokens() == sum(g.tokens for g in self.model.at("live"))

    @invariant()
    def uses_are_counted_and_bounded(self) -> None:
        index = self.state.index
        for group in self.model.groups.values():
            assert self.most_uses is None or len(group.uses) <= self.most_uses
            rows = index.rows_of([group.number])
            assert len(rows) == (not group.freed)
            if len(rows):
                assert index["times_sampled"][rows[0]] == len(group.uses)
                assert index["last_step"][rows[0]] == max(group.uses, default=-1)
                retained = [s for s, b in sorted(self.model.batches.items()) if group.number in b.numbers]
                assert self.state.steps_of(group.number) == retained

    @invariant()
    def the_history_is_the_models(self) -> None:
        state, model = self.state, self.model
        assert (state.step, state.next_step, state.generation) == (model.step, model.next_step, model.generation)
        assert state.published == {"": model.published}
        assert state.oldest_step == model.oldest
        batches = {s: (b.entry, b.numbers.tolist(), b.acked) for s, b in state.batches.items()}
        assert batches == {s: (b.entry, b.numbers, b.acked) for s, b in model.batches.items()}
        for step in range(model.next_step + 1):
            current = [b.entry for b in model.made if b.step == step and b.void_from is None]
            assert state.batch_entry(step) == (current[0] if current else None)
            for generation in range(model.generation + 2):
                assert state.batch_entry(step, generation) == model.batch_of(step, generation)

    @invariant()
    def a_page_lists_the_groups_of_a_place(self) -> None:
        for place in PLACES:
            numbers = [g.number for g in self.model.at(place)]
            assert self.state.numbers_at(place, 0, 1000) == numbers
            assert self.state.numbers_at(place, 2, 3) == [n for n in numbers if n > 2][:3]

    def teardown(self) -> None:
        """A restart reads the whole index stream, then the ledger: the state is the same."""
        if not hasattr(self, "model"):
            return
        again = RunState()
        if self.stream:
            values = np.concatenate(self.stream)
            again.store(np.arange(1, len(values) + 1), values)
        for number, raw in enumerate(self.ledger, 1):
            again.apply(number, decode_record(raw))
        assert story_of(again) == story_of(self.state)


TestRunStateAgainstAModel = RunStateMachine.TestCase
TestRunStateAgainstAModel.settings = settings(max_examples=120, stateful_step_count=40, derandomize=True, deadline=None)


# ---------------------------------------------------------------------- single decisions


class Run:
    """A state with its ledger's next number, and a line for each decision."""

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
        told = [self.state.place_of(number) for number in range(1, self.state.stored + 1)]
        return [place if reason is None else f"{place}: {reason}" for place, reason in told]


def test_a_rewind_evicts_groups_of_lost_versions_unless_a_standing_batch_holds_them() -> None:
    """Back at step 1 version 2 never was: a batch that holds such a group is redelivered, the pool loses the rest."""
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


def test_a_group_of_a_lost_version_never_comes_back_from_a_batch_voided_later() -> None:
    """Version 2 is trained anew after the rewind; what the lost version 2 sampled must not pass for its work."""
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
    assert run.state.evicted == {LOST_LINEAGE: 1}


def test_groups_stored_after_a_rewind_are_not_of_a_lost_version() -> None:
    """A restart folds the whole index stream before the ledger, so `until` must bound what a rewind evicts."""
    state = RunState()
    values = entries({"policy_version_max": 1}, {"policy_version_max": 1})
    state.store(np.array([1, 2]), values)
    state.apply(1, config_record())
    state.apply(2, RewindRecord(step=0, generation=1, on_resume="resample", version=0, until=1))
    assert [state.place_of(number)[0] for number in (1, 2)] == ["evicted", "live"]


def test_resample_gives_uses_back_and_undoes_evictions_recorded_after_the_step() -> None:
    """An eviction recorded at the step itself stands: no batch from there on may use the group."""
    run = Run()
    run.store(0, 0, 0, 0)
    run.train(1)
    run.evict(2, reason="overlong")
    run.train(3)
    run.evict(4)
    run.rewind(1, "resample")
    assert run.places() == ["in_batches", "evicted: overlong", "live", "live"]
    assert run.state.index["times_sampled"].tolist() == [1, 0, 0, 0]
    assert +run.state.evicted == {"overlong": 1}
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


def test_voiding_a_use_leaves_the_last_step_of_the_use_before_even_where_that_batch_was_freed() -> None:
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
    """Resumable from step 1 on: the batch of step 0 goes, and what was evicted before step 1; nothing else."""
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
    assert run.state.retired == 2 and run.state.evicted == {"too_stale": 3}


def test_older_checkpoints_stay_resumable_as_long_as_they_are_kept() -> None:
    run = Run()
    run.store(0, 0, 0)
    for number in (1, 2, 3):
        run.train(number)
    assert run.checkpoint(1, keep=2) == [1]
    assert run.checkpoint(3, keep=2) == []
    assert run.state.checkpoints == [1, 3]
    assert sorted(run.checkpoint(3, keep=1)) == [2, 3]


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
    assert run.places() == ["in_batches"] and not +run.state.evicted
    assert run.checkpoint(1) == [1]
    assert run.places() == ["retired"]


def test_a_purged_dead_letter_is_still_told_as_one() -> None:
    run = Run()
    run.store(0, 0)
    run.apply(DeadLetterRecord(numbers={"bad_checksum": [1]}))
    assert run.apply(PurgeRecord(numbers=[1])) == [1]
    assert run.places() == ["dead_lettered: bad_checksum", "live"]
    assert run.state.dead_lettered == {"bad_checksum": 1}
    assert run.state.numbers_at("dead_lettered", 0, 9) == [1]
    assert run.state.numbers_at("retired", 0, 9) == []


def test_the_entry_of_a_batch_is_that_of_the_generation_asked_for() -> None:
    """Step 1 was made in generation 0, stood in 1, was voided by 2 and made again."""
    run = Run()
    run.store(0, 0, 0)
    first = run.train(1)
    voided = run.train(2)
    run.rewind(1, "redeliver")
    run.rewind(1, "resample")
    assert run.state.batch_entry(1) is None
    again = run.train(3)
    assert run.state.batch_entry(1) == again
    assert [run.state.batch_entry(1, generation) for generation in range(4)] == [voided, voided, again, None]
    assert [run.state.batch_entry(0, generation) for generation in range(4)] == [first, first, first, None]
    assert run.state.batch_entry(2) is None


def test_a_freed_batch_keeps_its_entry_and_a_freed_voided_one_loses_it() -> None:
    run = Run()
    run.store(0, 0)
    run.train(1)
    run.rewind(0, "resample")
    again = run.train(2)
    run.checkpoint(1)
    assert run.state.batch_entry(0) == run.state.batch_entry(0, 1) == again
    assert run.state.batch_entry(0, 0) is None


def test_a_gap_in_the_ledger_is_an_error() -> None:
    run = Run()
    with pytest.raises(ReplaybufError, match="ledger entry 3 follows 1"):
        run.state.apply(3, AckRecord(step=0, epoch=1))


def test_a_run_is_finished_when_the_last_step_is_acked_and_running_again_after_a_rewind() -> None:
    run = Run(max_steps=1)
    run.store(0)
    assert run.state.state == "running"
    run.train(1)
    assert run.state.state == "finished"
    run.rewind(0, "redeliver")
    assert run.state.state == "running"


@pytest.mark.parametrize(("reason", "state"), [("prompts", "running"), ("operator", "finished")])
def test_a_rewind_reopens_a_run_that_ended_of_itself_not_one_that_an_operator_ended(reason: str, state: str) -> None:
    run = Run()
    run.apply(config_record(state="finished", reason=reason))
    run.rewind(0, "redeliver")
    assert run.state.state == state


def test_what_a_ticket_of_an_older_generation_lost_is_the_lowest_version_gone_back_to_since() -> None:
    run = Run()
    for step in (3, 1, 2):
        run.apply(
            RewindRecord(step=step, generation=run.state.generation + 1, on_resume="redeliver", version=step, until=0)
        )
    assert [run.state.lost_version_since(generation) for generation in range(4)] == [1, 1, 2, None]


def test_the_trainer_that_attached_last_holds_the_run() -> None:
    run = Run()
    assert run.state.epoch == 0
    for epoch in (1, 2):
        run.apply(AttachRecord(epoch=epoch, step=0, dp_world_size=4, seq_len=64, pad_to_multiple_of=8))
        assert run.state.epoch == epoch
    assert run.state.attached is not None and run.state.attached.dp_world_size == 4


def test_prompts_that_failed_are_remembered_with_their_reason() -> None:
    run = Run()
    run.apply(TicketRecord(adapter="", prompt_index=4, outcome="failed", attempts=3, reason="expired"))
    assert run.state.failed_prompts == {("", 4): "expired"}


def test_a_prompt_whose_group_comes_late_has_not_failed_whichever_stream_is_read_first() -> None:
    """Stored wins: one prompt never counts as failed and as stored."""
    failures = [
        TicketRecord(adapter="", prompt_index=index, outcome="failed", attempts=3, reason="expired") for index in (4, 5)
    ]
    late = entries({"prompt_index": 4}, {})
    before, after = Run(), Run()
    for record in failures:
        after.apply(record)
    assert set(after.state.failed_prompts) == {("", 4), ("", 5)}
    for run in (before, after):
        run.state.store(np.array([1, 2]), late)
    for record in failures:
        before.apply(record)
    assert before.state.failed_prompts == after.state.failed_prompts == {("", 5): "expired"}


def test_fewer_uses_allowed_use_groups_up_and_more_bring_them_back() -> None:
    """A group that was evicted does not come back with the number of uses."""
    run = Run(max_uses=None)
    run.store(0, 0, 0)
    run.train(1, 2)
    run.evict(2)
    run.apply(config_record(1))
    assert run.places() == ["in_batches", "in_batches", "live"]
    run.apply(config_record(2))
    assert run.places() == ["live", "in_batches", "live"]
