"""The fold of index stream and ledger, against a model of lists and dicts; then single decisions, one by one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, Literal

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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

    @initialize(steps_per_publish=st.integers(1, 2), max_uses=st.sampled_from([1, 2, None]))
    def start(self, steps_per_publish: int, max_uses: int | None) -> None:
        self.state = RunState()
        self.model = Model(steps_per_publish)
        self.ledger: list[bytes] = []
        self.stream: list[Any] = []
        self.most_uses: int | None = 1
        self.configure(max_uses)

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

    @rule(data=st.data(), keep=st.integers(1, 3))
    def checkpoint(self, data: st.DataObject, keep: int) -> None:
        step = data.draw(st.integers(self.model.oldest, self.model.step))
        freed = self.write(CheckpointRecord(step=step, keep=keep))
        assert freed == self.model.checkpoint(step, keep), "exactly what no resume needs is freed"

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

    @rule(max_uses=st.sampled_from([1, 2, 3, None]))
    def change_max_uses(self, max_uses: int | None) -> None:
        unacked = [g for b in self.model.batches.values() if not b.acked for g in b.numbers]
        if max_uses is None or all(len(self.model.groups[n].uses) <= max_uses for n in unacked):
            self.configure(max_uses)

    @rule(ranks=st.integers(1, 8))
    def attach(self, ranks: int) -> None:
        epoch = self.state.epoch + 1
        self.write(AttachRecord(epoch=epoch, step=0, dp_world_size=ranks, seq_len=64, pad_to_multiple_of=1))
        assert self.state.epoch == epoch

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
TestRunStateAgainstAModel.settings = settings(max_examples=4000, stateful_step_count=60, derandomize=False, deadline=None)
