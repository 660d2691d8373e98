"""The fold of index stream and ledger against a model of dicts and lists, in any order that a service allows.

The machine plays the service: it appends to two streams what a service would write, folds them as its leader does, and
now and then goes on with a state that was rebuilt from the streams, in one of the orders in which a server may read
them. After every step the fold tells the same as the model.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, Literal

import msgspec
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replaybuf.kernel.figures.histograms import AGE_MS, TOKENS, VERSIONS, GroupHistograms, Histogram, Prompts
from replaybuf.kernel.rows.index import IN_BATCHES, LIVE
from replaybuf.kernel.state.lookups import find_batch_entry, find_group_state, list_purgeable, steps_by_group
from replaybuf.kernel.state.run_state import RunState
from replaybuf.wire.ledger import (
    AckRecord,
    AddedColumns,
    AnyRecord,
    AttachRecord,
    CheckpointRecord,
    ColumnsRecord,
    DeadLetterRecord,
    EvictRecord,
    FailedPromptRecord,
    PolicyRecord,
    PurgeRecord,
    RewindRecord,
    decode_record,
    encode_record,
)
from tests.builders import batch_entry, batch_record, config_record, entries
from tests.kernel.listing import list_numbers

PLACES = ("live", "in_batches", "retired", "evicted", "dead_lettered")
OnResume = Literal["redeliver", "resample"]
USES = st.sampled_from([1, 3, None])

# ---------------------------------------------------------------------- the model


@dataclasses.dataclass
class ModelGroup:
    """One group: which steps of the surviving history used it, and what else happened to it."""

    number: int
    version: int
    newest: int
    tokens: int
    prompt: int | None
    rollouts: int = 2
    longest: int = 6
    arrival_s: int = 0
    uses: list[int] = dataclasses.field(default_factory=list)
    evicted: tuple[int, str] | None = None
    evicted_s: int = 0
    reissued: bool = False
    poison: str | None = None
    poisoned: tuple[int, int] = (0, 0)
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
    """A run as lists, following sections 2, 3 and 5 of the design only.

    `groups` are those that the leader has ingested, `coming` those in the stream that it has not read.
    """

    def __init__(self, steps_per_publish: int) -> None:
        self.steps_per_publish = steps_per_publish
        self.groups: dict[int, ModelGroup] = {}
        self.coming: list[ModelGroup] = []
        self.made: list[ModelBatch] = []
        self.gave_up: dict[int, int] = {}
        self.max_uses: int | None = 1
        self.state, self.reason = "running", None
        self.step = self.next_step = self.generation = self.published = self.entries = self.epoch = 0
        self.checkpoints: list[int] = []
        self.all_uses: list[tuple[ModelGroup, int, int]] = []

    @property
    def now_s(self) -> int:
        """Return the time of the next record."""
        return 50 + 7 * self.entries

    def version_of(self, step: int) -> int:
        return step // self.steps_per_publish

    @property
    def oldest(self) -> int:
        return min(self.checkpoints, default=0)

    @property
    def batches(self) -> dict[int, ModelBatch]:
        return {b.step: b for b in self.made if b.void_from is None and not b.freed}

    @property
    def failed(self) -> set[int]:
        """Return the prompts that failed and have no group."""
        return {prompt for prompt, number in self.gave_up.items() if self.newest(prompt) <= number}

    def newest(self, prompt: int) -> int:
        """Return the number of the newest group of a prompt; 0 without one."""
        return max((group.number for group in self.groups.values() if group.prompt == prompt), default=0)

    def reissues(self, prompt: int) -> int:
        """Count how often a prompt was issued again."""
        return sum(group.reissued for group in self.groups.values() if group.prompt == prompt)

    @property
    def waiting(self) -> set[int]:
        """Return the prompts that were issued again, did not fail and have no new group."""
        groups = [group for group in self.groups.values() if group.reissued and group.prompt is not None]
        return {g.prompt for g in groups if g.prompt is not None and self.newest(g.prompt) == g.number} - self.failed

    @property
    def purgeable(self) -> set[int]:
        """Return the dead letters whose bytes no batch of a resume needs."""
        held = {number for batch in self.batches.values() for number in batch.numbers}
        return {group.number for group in self.at("dead_lettered") if not group.freed} - held

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
            later = group.evicted is not None and group.evicted[0] > step and not group.reissued
            if mode == "resample" and later:
                group.evicted = None
            lost = group.newest > version and group.number <= until
            if lost and (group.evicted is None or later) and not group.freed and not group.poison:
                group.evicted, group.evicted_s = (step, "lost_lineage"), self.now_s
        self.step, self.published = step, version
        self.next_step = max([step, *(s + 1 for s in self.batches)])
        self.checkpoints = [c for c in self.checkpoints if c <= step]
        if self.state == "finished" and self.reason != "operator":
            self.state, self.reason = "running", None

    def checkpoint(self, step: int, keep: int) -> set[int]:
        self.checkpoints = sorted({*self.checkpoints, step})[-keep:]
        for batch in self.made:
            batch.freed = batch.freed or batch.step < self.oldest
        freed = set()
        for group in self.groups.values():
            place = group.place(self.max_uses)[0]
            may_return = group.evicted is not None and group.evicted[0] > self.oldest and not group.reissued
            if group.freed or may_return or place not in ("in_batches", "evicted"):
                continue
            if place == "in_batches" and max(group.uses) >= self.oldest:
                continue
            group.freed, group.retired = True, place == "in_batches"
            freed.add(group.number)
        return freed

    def tallies(self) -> dict[str, Any]:
        """Recompute all counts from the groups and from every use ever made."""
        groups, used = list(self.groups.values()), [group for group, _, _ in self.all_uses]
        dropped = [group for group in groups if group.place(self.max_uses)[1]]
        ages: dict[str, tuple[list[int], list[int]]] = {}
        for group in dropped:
            evicted_at = group.evicted[0] if group.evicted else 0
            step, at_s = group.poisoned if group.poison else (evicted_at, group.evicted_s)
            versions, seconds = ages.setdefault(group.place(self.max_uses)[1] or "", ([], []))
            versions.append(max(0, self.version_of(step) - group.version))
            seconds.append(1000 * max(0, at_s - group.arrival_s))
        prompts = [group for group in groups if group.prompt is not None]
        return {
            "lengths": {
                kind: (
                    in_buckets(TOKENS, [group.tokens // group.rollouts for group in of_it]),
                    in_buckets(TOKENS, [group.longest for group in of_it]),
                )
                for kind, of_it in (("stored", groups), ("used", used), ("dropped", dropped))
            },
            "reuse": Counter(times for _, times, _ in self.all_uses),
            "age_at_use": in_buckets(AGE_MS, [1000 * max(0, at_s - g.arrival_s) for g, _, at_s in self.all_uses]),
            "drop_ages": {
                r: (in_buckets(VERSIONS, versions), in_buckets(AGE_MS, two)) for r, (versions, two) in ages.items()
            },
            "prompts": (
                len(prompts),
                sum(1 for group in prompts if group.uses),
                sum(1 for group in prompts if group in dropped and not group.uses),
            ),
        }

    def batch_of(self, step: int, generation: int) -> int | None:
        tallied = [
            b
            for b in self.made
            if b.step == step and b.born <= generation and (b.void_from is None or generation < b.void_from)
        ]
        kept = [b for b in tallied if b.void_from is None or not b.freed]
        return kept[0].entry if kept and generation <= self.generation else None


def in_buckets(edges: tuple[int, ...], values: list[int]) -> tuple[dict[int | None, int], int]:
    """Count values by the lowest edge at or above them (None = no such edge), and add them up."""
    return Counter(min((edge for edge in edges if edge >= value), default=None) for value in values), sum(values)


def counts_of(tallies: GroupHistograms) -> dict[str, Any]:
    """Return histograms in the form of the model."""

    def shown(histogram: Histogram) -> tuple[dict[int | None, int], int]:
        counts = zip((*histogram.edges, None), histogram.counts, strict=True)
        return {edge: count for edge, count in counts if count}, histogram.sum

    return {
        "lengths": {kind: (shown(lengths.mean), shown(lengths.longest)) for kind, lengths in tallies.lengths.items()},
        "reuse": tallies.reuse,
        "age_at_use": shown(tallies.age_at_use),
        "drop_ages": {r: (shown(a.versions), shown(a.ms)) for r, a in tallies.drop_ages.items() if a.versions.count},
        "prompts": dataclasses.astuple(sum(tallies.prompts.values(), Prompts())),
    }


def story_of(state: RunState) -> dict[str, Any]:
    """Return everything that must be equal after two rebuilds of the same history."""
    index = state.index
    numbers = range(1, state.stored + 1)
    kept = {int(n): row for n in numbers for row in index.rows_of([n]).tolist()}
    return {
        "steps": (state.step, state.next_step, state.generation, state.oldest_step, state.phase),
        "published": (state.published, state.weights_uri),
        "places": [find_group_state(state, n) for n in numbers],
        "uses": {n: (int(index["times_sampled"][row]), int(index["last_step"][row])) for n, row in kept.items()},
        "evicted_at": {n: int(index["evicted_at"][row]) for n, row in kept.items()},
        "live": state.pool.live.totals(),
        "figures": state.figures,
        "batches": {s: (b.entry, b.generation, b.numbers.tolist(), b.acked) for s, b in state.batches.items()},
        "records": (
            {s: (r.entry, r.generation) for s, r in state.records.items()},
            state.voided,
            state.checkpoints,
            state.rewinds,
        ),
        "counts": (
            state.stored,
            state.totals.retired,
            state.masked_tokens,
            +state.totals.evicted,
            +state.totals.dead_lettered,
            state.pool.stale_adapters,
        ),
        "used": (state.totals.groups_used, state.totals.tokens_used, state.totals.used_staleness),
        "tallies": counts_of(state.totals.histograms),
        "reissues": ([*map(set, state.reissues.rounds)], set(state.reissues.waiting)),
        "words": (state.epoch, state.failed.prompts, state.failed.newest, state.config, state.max_uses, state.entries),
    }


# ---------------------------------------------------------------------- the streams


class Streams:
    """Content of storage: encoded index entries, deduplicated, and encoded ledger records.

    `written` holds for each ledger entry the length of the index stream when it was written, and the freed groups.
    """

    def __init__(self) -> None:
        self.index: list[Any] = []
        self.ledger: list[bytes] = []
        self.numbers: dict[str, int] = {}
        self.written: list[tuple[int, set[int]]] = []

    def publish(self, group_id: str, group: ModelGroup, reissue: int = 0) -> bool:
        """Append a group unless its id or its prompt is already there."""
        names = [group_id] if group.prompt is None else [group_id, f"p{group.prompt}-{reissue}"]
        if any(name in self.numbers for name in names):
            return False
        self.numbers.update(dict.fromkeys(names, group.number))
        values = {"policy_version": group.version, "policy_version_max": group.newest, "tokens": group.tokens}
        values |= {"rollouts": group.rollouts, "longest_tokens": group.longest, "arrival_s": group.arrival_s}
        self.index.append(entries(values if group.prompt is None else values | {"prompt_index": group.prompt}))
        return True

    def ingest(self, state: RunState, through: int) -> None:
        """Fold the index stream up to number `through`."""
        fresh = self.index[state.stored : through]
        if fresh:
            state.store(np.arange(state.stored + 1, state.stored + 1 + len(fresh)), np.concatenate(fresh))

    def replay(self, state: RunState, through: int) -> None:
        """Fold the ledger up to entry `through`; it must free the same groups as when it was written."""
        for entry in range(state.entries + 1, through + 1):
            freed = state.apply(entry, decode_record(self.ledger[entry - 1])).tolist()
            assert set(freed) == self.written[entry - 1][1], f"ledger entry {entry} frees other groups than before"

    def index_first(self) -> RunState:
        """Rebuild like a starting server: the whole index stream, then the ledger."""
        state = RunState()
        self.ingest(state, len(self.index))
        self.replay(state, len(self.ledger))
        return state

    def by_chunks(self, data: st.DataObject) -> RunState:
        """Rebuild like a follower: read a chunk of the ledger, then the tail of the index, then fold both."""
        state = RunState()
        while state.entries < len(self.ledger):
            through = data.draw(st.integers(state.entries + 1, len(self.ledger)))
            least = max(state.stored, self.written[through - 1][0])
            self.ingest(state, data.draw(st.integers(least, len(self.index))))
            self.replay(state, through)
        self.ingest(state, len(self.index))
        return state


# ---------------------------------------------------------------------- the service


class RunStateMachine(RuleBasedStateMachine):
    """Everything that a service may write, in any order that it allows."""

    @initialize(data=st.data(), steps_per_publish=st.sampled_from([1, 2]), max_uses=USES)
    def start(self, data: st.DataObject, steps_per_publish: int, max_uses: int | None) -> None:
        self.state = RunState()
        self.model = Model(steps_per_publish)
        self.streams = Streams()
        self.freed: set[int] = set()
        self.most_uses: int | None = 1
        self.configure(max_uses)
        self.append(data, 5, ticketed=False)
        self.ingest()

    # -- writing

    def write(self, record: AnyRecord) -> set[int]:
        raw = encode_record(msgspec.structs.replace(record, at_s=self.model.now_s))
        self.model.entries += 1
        freed = self.state.apply(self.model.entries, decode_record(raw)).tolist()
        assert len(freed) == len(set(freed)) and not self.freed & set(freed), "a payload is let go once"
        self.streams.ledger.append(raw)
        self.streams.written.append((len(self.streams.index), set(freed)))
        self.freed |= set(freed)
        return set(freed)

    def configure(self, max_uses: int | None, **words: Any) -> None:
        assert not self.write(config_record(max_uses, steps_per_publish=self.model.steps_per_publish, **words))
        self.model.max_uses = max_uses
        self.model.state, self.model.reason = words.get("state", "running"), words.get("reason")
        self.most_uses = None if max_uses is None or self.most_uses is None else max(self.most_uses, max_uses)

    # -- producers

    @rule(data=st.data(), count=st.integers(1, 5), ticketed=st.booleans())
    def append(self, data: st.DataObject, count: int, ticketed: bool) -> None:
        """Groups enter the stream; the leader ingests them later."""
        for _ in range(count):
            newest = data.draw(st.integers(0, self.model.published))
            number = len(self.streams.index) + 1
            prompt = data.draw(st.integers(0, 9)) if ticketed else None
            group = ModelGroup(number, data.draw(st.integers(0, newest)), newest, data.draw(st.integers(2, 90)), prompt)
            group.rollouts, group.longest = 1 + number % 3, group.tokens * 2 // 3
            group.arrival_s = self.model.now_s + data.draw(st.integers(-40, 8))  # the clock of another machine
            reissue = 0 if prompt is None else self.model.reissues(prompt)
            if self.streams.publish(f"g{number}", group, reissue):
                self.model.coming.append(group)

    @precondition(lambda self: self.streams.numbers)
    @rule(data=st.data())
    def append_again(self, data: st.DataObject) -> None:
        """A repeated group, or a second group of a prompt, is a duplicate and changes nothing."""
        name = data.draw(st.sampled_from(sorted(self.streams.numbers)))
        assert not self.streams.publish(name, ModelGroup(len(self.streams.index) + 1, 0, 0, 2, None))

    @precondition(lambda self: self.model.coming)
    @rule()
    def ingest(self) -> None:
        self.streams.ingest(self.state, len(self.streams.index))
        self.model.groups |= {group.number: group for group in self.model.coming}
        self.model.coming = []

    @rule(prompt=st.integers(0, 9))
    def give_up(self, prompt: int) -> None:
        """Fail a prompt; its group may already be in the stream, unread, or come later."""
        lacks_group = not self.model.newest(prompt) or prompt in self.model.waiting
        if lacks_group and prompt not in self.model.gave_up:
            self.model.gave_up[prompt] = self.model.newest(prompt)
            self.write(
                FailedPromptRecord(adapter="", prompt_index=prompt, outcome="failed", attempts=3, reason="expired")
            )

    # -- trainer

    @rule()
    def attach(self) -> None:
        self.model.epoch += 1
        self.write(AttachRecord(epoch=self.model.epoch, step=0, dp_world_size=2, seq_len=64, pad_to_multiple_of=1))

    @precondition(lambda self: self.model.next_step <= self.model.step + 1 and self.model.at("live"))
    @rule(data=st.data())
    def assemble(self, data: st.DataObject) -> None:
        model, live = self.model, self.model.at("live")
        chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=4, unique_by=lambda g: g.number))
        step = model.next_step
        for group in chosen:
            group.uses.append(step)
            model.all_uses.append((group, len(group.uses), model.now_s))
        record = batch_record(
            step,
            [batch_entry(g.number, version=g.version, times_sampled=len(g.uses)) for g in chosen],
            generation=model.generation,
            version=model.version_of(step),
        )
        record = msgspec.structs.replace(
            record, stale_token_mask=1, masked_tokens=len(chosen), index_end=self.state.stored
        )
        assert not self.write(record)
        model.made.append(ModelBatch(step, model.entries, [g.number for g in chosen], model.generation))
        model.next_step += 1

    @precondition(lambda self: self.model.next_step == self.model.step and self.model.at("live"))
    @rule(data=st.data(), count=st.integers(1, 3))
    def train(self, data: st.DataObject, count: int) -> None:
        """Train a whole step, and store new groups of its version."""
        self.assemble(data)
        self.ack()
        if self.model.published < self.model.version_of(self.model.step):
            self.publish()
        self.append(data, count, ticketed=False)

    @precondition(lambda self: self.model.step in self.model.batches)
    @rule()
    def ack(self) -> None:
        feedback = {"loss": self.model.step} if self.model.step % 2 else None
        assert not self.write(AckRecord(step=self.model.step, epoch=1, feedback=feedback))
        self.model.batches[self.model.step].acked = True
        self.model.step += 1

    @precondition(lambda self: self.model.published < self.model.version_of(self.model.step))
    @rule()
    def publish(self) -> None:
        self.model.published = self.model.version_of(self.model.step)
        self.write(PolicyRecord(version=self.model.published, weights_uri="w", adapter="", epoch=1))

    @precondition(lambda self: self.model.step > self.model.oldest)
    @rule(data=st.data(), keep=st.integers(1, 3))
    def checkpoint(self, data: st.DataObject, keep: int) -> None:
        step = data.draw(st.sampled_from(range(self.model.step, self.model.oldest - 1, -1)))
        freed = self.write(CheckpointRecord(step=step, keep=keep))
        assert freed == self.model.checkpoint(step, keep), "a checkpoint frees exactly the groups that no resume needs"

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

    # -- service and operator

    @precondition(lambda self: any(not group.uses for group in self.model.at("live")))
    @rule(data=st.data(), names=st.sets(st.sampled_from(["ref_logprobs", "rewards.judge", "rewards"]), min_size=1))
    def add_columns(self, data: st.DataObject, names: set[str]) -> None:
        """A stage adds columns to a group that no batch has drawn; the column bits are those of all its records."""
        chosen = data.draw(st.sampled_from([group for group in self.model.at("live") if not group.uses]))
        scores = {"reward_mean": 2.0, "reward_std": 1.0, "advantage_abs_mean": 0.5}
        added = AddedColumns(number=chosen.number, crc32c=dict.fromkeys(sorted(names), 1), frame_bytes=8, **scores)
        self.write(ColumnsRecord(groups=[added]))
        held = self.state.pool.columns.late_of([chosen.number])[chosen.number]
        assert names <= {*held}

    @precondition(lambda self: self.model.at("live"))
    @rule(data=st.data(), reason=st.sampled_from(["too_stale", "overlong"]))
    def evict(self, data: st.DataObject, reason: str) -> None:
        """Evict groups; a too stale one may be issued again if it is the newest of its prompt and was never used."""
        chosen = data.draw(st.lists(st.sampled_from(self.model.at("live")), unique_by=lambda g: g.number, min_size=1))
        for group in chosen:
            group.evicted, group.evicted_s = (self.model.next_step, reason), self.model.now_s
        fit = [g for g in chosen if g.prompt is not None and self.model.newest(g.prompt) == g.number and not g.uses]
        reissued = [g for g in fit if reason == "too_stale" and data.draw(st.booleans())]
        for group in reissued:
            group.reissued = True
        numbers = {reason: [g.number for g in chosen]}
        record = EvictRecord(step=self.model.next_step, numbers=numbers, reissued=[g.number for g in reissued])
        self.write(record)

    @precondition(lambda self: self.model.at("live") or self.model.at("in_batches"))
    @rule(data=st.data())
    def dead_letter(self, data: st.DataObject) -> None:
        """Drop a group before its selection, or when its batch is served again."""
        group = data.draw(st.sampled_from(self.model.at("live") + self.model.at("in_batches")))
        group.poison, group.poisoned = "bad_checksum", (self.model.next_step, self.model.now_s)
        self.write(DeadLetterRecord(numbers={"bad_checksum": [group.number]}))

    @precondition(lambda self: self.model.purgeable)
    @rule()
    def purge(self) -> None:
        dead = self.model.purgeable
        assert list_purgeable(self.state) == sorted(dead)
        for number in dead:
            self.model.groups[number].freed = True
        assert self.write(PurgeRecord(numbers=sorted(dead))) == dead

    @precondition(lambda self: self.model.next_step > 1)
    @rule(max_uses=USES | st.just(2))
    def change_max_uses(self, max_uses: int | None) -> None:
        unacked = [g for b in self.model.batches.values() if not b.acked for g in b.numbers]
        if max_uses is None or all(len(self.model.groups[n].uses) <= max_uses for n in unacked):
            self.configure(max_uses)

    @rule(words=st.sampled_from([("running", None), ("paused", "operator"), ("finished", "prompts")]))
    def set_state(self, words: tuple[str, str | None]) -> None:
        self.configure(self.model.max_uses, state=words[0], reason=words[1])

    # -- restarts: continue with the rebuilt state

    def go_on_with(self, rebuilt: RunState) -> None:
        if self.model.coming:
            self.ingest()
        assert story_of(rebuilt) == story_of(self.state)
        self.state = rebuilt

    @rule()
    def restart(self) -> None:
        self.go_on_with(self.streams.index_first())

    @rule(data=st.data())
    def take_over(self, data: st.DataObject) -> None:
        self.go_on_with(self.streams.by_chunks(data))

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.restart()

    # -- invariants

    @invariant()
    def every_group_has_the_state_of_the_model(self) -> None:
        expected = [group.place(self.model.max_uses) for group in self.model.groups.values()]
        assert [find_group_state(self.state, number) for number in self.model.groups] == expected

    @invariant()
    def the_counts_add_up(self) -> None:
        state = self.state
        live, in_batches = state.count(LIVE), state.count(IN_BATCHES)
        evicted, dead = sum(state.totals.evicted.values()), sum(state.totals.dead_lettered.values())
        assert state.stored == len(self.model.groups)
        assert state.stored == live + in_batches + state.totals.retired + evicted + dead
        counts = {place: len(self.model.at(place)) for place in PLACES}
        assert counts == dict(zip(PLACES, (live, in_batches, state.totals.retired, evicted, dead), strict=True))
        reasons = Counter(g.place(self.model.max_uses)[1] for g in self.model.at("evicted"))
        assert +state.totals.evicted == reasons

    @invariant()
    def cached_sums_of_live_groups_are_right(self) -> None:
        groups = self.model.at("live")
        fresh, uses = sum(not g.uses for g in groups), sum(len(g.uses) for g in groups)
        assert self.state.pool.live.totals()[:4] == (len(groups), sum(g.tokens for g in groups), fresh, uses)

    @invariant()
    def the_histograms_equal_the_model_and_add_up(self) -> None:
        state, tallies = self.state, self.state.totals.histograms
        assert counts_of(tallies) == self.model.tallies()
        assert {kind: lengths.mean.count for kind, lengths in tallies.lengths.items()} == {
            "stored": state.stored,
            "used": state.totals.groups_used,
            "dropped": state.totals.evicted.total() + state.totals.dead_lettered.total(),
        }
        assert sum(tallies.reuse.values()) == state.totals.used_staleness.total() == state.totals.groups_used
        by_reason = {reason: ages.versions.count for reason, ages in tallies.drop_ages.items()}
        assert +Counter(by_reason) == state.totals.evicted + state.totals.dead_lettered
        tickets = sum(g.prompt is not None for g in self.model.groups.values()) + len(self.model.failed)
        coverage = tallies.coverage(tickets, len(state.failed.prompts))
        assert coverage.issued == tickets == coverage.stored + coverage.failed
        assert coverage.pending == sum(g.prompt is not None and not g.uses for g in self.model.at("live"))

    @invariant()
    def the_prompts_that_wait_for_a_reissue_are_those_of_the_model(self) -> None:
        reissues, model = self.state.reissues, self.model
        assert set(reissues.waiting) == {("", prompt) for prompt in model.waiting}
        assert [reissues.count(("", prompt)) for prompt in range(10)] == [model.reissues(p) for p in range(10)]

    @invariant()
    def uses_are_counted_and_bounded(self) -> None:
        index = self.state.index
        groups = self.model.groups.values()
        assert self.most_uses is None or all(len(group.uses) <= self.most_uses for group in groups)
        kept = [group for group in groups if not group.freed]
        rows = index.rows_of([group.number for group in groups])
        assert index["number"][rows].tolist() == [group.number for group in kept]
        assert index["times_sampled"][rows].tolist() == [len(group.uses) for group in kept]
        assert index["last_step"][rows].tolist() == [max(group.uses, default=-1) for group in kept]

    @invariant()
    def the_steps_of_every_group_are_found_even_when_it_is_retired(self) -> None:
        steps = steps_by_group(self.state, list(self.model.groups))
        kept = self.state.records
        assert steps == {n: [s for s in group.uses if s in kept] for n, group in self.model.groups.items()}
        assert self.state.trimmed_entries or len(kept) == self.model.next_step

    @invariant()
    def no_group_that_a_resume_may_need_is_freed(self) -> None:
        """Neither groups of batches that may be served again, nor groups that may be sampled now or after a rewind."""
        held = {number for batch in self.model.batches.values() for number in batch.numbers}
        assert all(step >= self.model.oldest for step in self.model.batches)
        assert not self.freed & held
        assert not self.freed & {group.number for group in self.model.at("live")}
        assert self.freed == {group.number for group in self.model.groups.values() if group.freed}

    @invariant()
    def the_history_equals_the_model(self) -> None:
        state, model = self.state, self.model
        assert (state.step, state.next_step, state.generation) == (model.step, model.next_step, model.generation)
        assert (state.epoch, state.config_phase, state.max_uses) == (model.epoch, model.state, model.max_uses)
        assert state.published == {"": model.published}
        assert (state.oldest_step, state.checkpoints) == (model.oldest, model.checkpoints)
        assert {index for _, index in state.failed.prompts} == model.failed
        batches = {s: (b.entry, b.numbers.tolist(), b.acked) for s, b in state.batches.items()}
        assert batches == {s: (b.entry, b.numbers, b.acked) for s, b in model.batches.items()}
        for step in range(model.next_step + 1):
            current = [b.entry for b in model.made if b.step == step and b.void_from is None]
            assert find_batch_entry(state, step) == (current[0] if current else None)
            for generation in range(model.generation + 2):
                assert find_batch_entry(state, step, generation) == model.batch_of(step, generation)

    @invariant()
    def a_page_lists_the_groups_in_a_state(self) -> None:
        numbers = [g.number for g in self.model.at(self.place)]
        assert list_numbers(self.state, self.place, 0, 1000) == numbers
        assert list_numbers(self.state, self.place, 2, 3) == [n for n in numbers if n > 2][:3]

    @property
    def place(self) -> str:
        """One place per step: all of them after every step take a tenth of the test's time."""
        return PLACES[self.state.entries % len(PLACES)]


TestRunStateAgainstAModel = RunStateMachine.TestCase
TestRunStateAgainstAModel.settings = settings(max_examples=50, stateful_step_count=40, derandomize=True, deadline=None)
