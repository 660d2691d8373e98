"""Exact slots: the groups of a batch follow from the tickets, in whatever order they are completed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf.errors import Invalid
from replaybuf.kernel.state.tickets import Ticket
from replaybuf.kernel.strategy.plugin_set import build_strategy, resolve_config
from replaybuf.lab.simulate.virtual import VirtualRun
from replaybuf.strategy import Budget, Flow, Groups, Selection, Strategy, Waiting
from replaybuf.wire.config import BatchSpec, Limits, RunConfig, StrategySpec, TicketSpec
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.ledger import BatchRecord
from tests.builders import buffer_view, entries, live_groups, run_config

EXACT = StrategySpec("one-step-off-policy", {"exact_slots": True})
THREE = Budget(None, 3, 64)


def slots() -> Strategy[Any]:
    return build_strategy(EXACT.name, EXACT.options)


def indexed(*indexes: int, tokens: int = 10) -> Groups:
    """Build live groups with these prompt indexes; rows 1, 2, ... in the order of storing."""
    plain = live_groups([tokens] * len(indexes))
    columns = {name: getattr(plain, name) for name in Groups.COLUMNS}
    return Groups(**columns | {"prompt_index": np.array(indexes, np.int64)})


def select(groups: Groups, budget: Budget = THREE, **view: Any) -> list[int] | Waiting:
    """Ask for a batch: the rows in order, or the answer to wait."""
    shown = buffer_view(budget=budget, **view)
    answer = slots().select(groups, shown, budget, np.random.default_rng(0))
    return answer.rows.tolist() if isinstance(answer, Selection) else answer


# ---------------------------------------------------------------------- one decision


def test_a_batch_takes_the_lowest_indexes_whatever_arrived_first() -> None:
    assert select(indexed(5, 2, 4, 0, 3), awaited=(6, 7)) == [4, 2, 5]


def test_a_batch_waits_for_an_awaited_slot_before_its_last_group() -> None:
    """Five groups are there, but prompt 2 is not: the answer counts the slots of this batch that are filled."""
    answer = select(indexed(0, 1, 3, 4, 5), awaited=(2, 6))
    assert answer == Waiting(
        "too_few_groups", 2, 20, "slots of this batch that wait for a ticket: 1; the first is prompt_index 2"
    )


def test_an_awaited_slot_of_a_later_batch_is_not_waited_for() -> None:
    assert select(indexed(0, 1, 2, 5), awaited=(3, 4)) == [1, 2, 3]


def test_groups_without_a_prompt_index_come_first() -> None:
    """They have no slot, and would become too stale behind an endless row of tickets."""
    assert select(indexed(0, -1, 1, -1), awaited=(2,)) == [2, 4, 1]


def test_an_overdue_batch_skips_the_slots_that_it_waits_for() -> None:
    groups = indexed(0, 1, 3, 4)
    assert select(groups, Budget(None, 2, 64), awaited=(2,), overdue=True) == [1, 2]
    assert select(indexed(1, 3), Budget(None, 2, 64), awaited=(0, 2), overdue=True) == [1, 2]


def test_a_token_budget_ends_a_batch_in_the_order_of_the_slots() -> None:
    """No later group takes the place of the one that does not fit: it is the first of the next batch."""
    assert select(indexed(2, 1, 0, 3), Budget(25, 4, 64), awaited=(4,)) == [3, 2]
    assert isinstance(select(indexed(0, 3), Budget(25, 4, 64), awaited=(1, 2)), Waiting)


def test_slots_need_a_number_of_groups_per_batch() -> None:
    with pytest.raises(Invalid, match=r"exact_slots is true, but batch\.groups_per_batch is null") as caught:
        resolve_config(run_config(batch=BatchSpec(tokens_per_batch=1000), strategy=EXACT))
    assert caught.value.name == "batch.groups_per_batch"


def test_a_retry_is_admitted_though_live_groups_fill_the_window() -> None:
    """A smaller `max_staleness` shrank the window: the batch would wait for ever. A closed window stays closed."""
    flow, full = Flow(0.0, 10.0), {"budget": THREE, "groups_live": 9, "tickets_due": 2}
    assert slots().admit(buffer_view(**full), flow) == 2
    assert slots().admit(buffer_view(**full, step=2, version=2), flow) == 0
    assert build_strategy(EXACT.name, {}).admit(buffer_view(**full), flow) == 0


# ---------------------------------------------------------------------- whole runs


class Schedule:
    """Producers and a trainer that act in random order; a prompt's fate follows from its index alone."""

    def __init__(self, config: RunConfig, seed: int, failing: set[int], flaky: set[int], dropped: set[int]) -> None:
        self.run = VirtualRun(config, 1)
        self.out: list[Ticket] = []
        self.batches: list[BatchRecord] = []
        self._rng = random.Random(seed)
        self._failing, self._flaky, self._dropped = failing, flaky, dropped

    def train(self, steps: int) -> None:
        for _ in range(10_000):
            if self.run.state.step == steps:
                return
            self.run.now_s += 1.0
            self._rng.choice([self.take, self.complete, self.complete, self.ask])()
        raise AssertionError(f"the run does not go on: {self.run.batch(self.run.state.step)}")

    def take(self) -> None:
        self.out += self.run.take_tickets(self._rng.randint(1, 4))

    def complete(self) -> None:
        """End one ticket, most often the newest: the oldest are slow."""
        if not self.out:
            return
        ticket = self.out.pop(-1 - int(self._rng.expovariate(1.0)) % len(self.out))
        index = ticket.prompt_index
        if index in self._failing or (index in self._flaky and ticket.attempt == 1):
            self.run.return_ticket(ticket, "engine_error")
            return
        values = {"prompt_index": index, "tokens": 10, "reward_std": float(index not in self._dropped)}
        version = self.run.published_version
        self.run.append(entries(values | dict.fromkeys(("policy_version", "policy_version_max"), version)))

    def ask(self) -> None:
        outcome = self.run.batch(self.run.state.step)
        if isinstance(outcome, BatchRecord):
            self.batches.append(outcome)
            self.run.ack(0.0)
            self.run.publish()

    def trained(self) -> list[list[int | None]]:
        return [[group.prompt_index for group in record.groups] for record in self.batches]


INDEXES = st.sets(st.integers(0, 30), max_size=6)


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    adaptive=st.booleans(),
    tokens_live=st.sampled_from([None, 40, 90]),
    failing=INDEXES,
    flaky=INDEXES,
    dropped=INDEXES,
)
@settings(max_examples=60)
def test_batches_follow_from_the_tickets_in_any_order_of_completion(
    seed: int,
    size: int,
    max_staleness: int,
    adaptive: bool,
    tokens_live: int | None,
    failing: set[int],
    flaky: set[int],
    dropped: set[int],
) -> None:
    """Batch k has the next prompts that neither fail for good nor are dropped; none is lost, none becomes too stale."""
    options = EXACT.options | {"max_staleness": max_staleness, "adaptive": adaptive}
    config = RunConfig(
        batch=BatchSpec(tokens_per_batch=None, groups_per_batch=size, seq_len=10),
        strategy=StrategySpec(EXACT.name, options),
        filters=[StrategySpec("zero-variance")],
        tickets=TicketSpec(max_attempts=2),
        limits=Limits(max_tokens_live=tokens_live),
    )
    schedule = Schedule(config, seed, failing, flaky, dropped)
    schedule.train(8)
    survivors = [index for index in range(100) if index not in failing | dropped]
    assert schedule.trained() == [survivors[k * size : (k + 1) * size] for k in range(8)]
    totals = schedule.run.state.totals
    assert totals.evicted["too_stale"] == 0
    assert set(schedule.run.state.failed.prompts) <= {("", index) for index in failing}


@given(st.integers(0, 2**32))
@settings(max_examples=10)
def test_without_slots_the_order_of_completion_decides(seed: int) -> None:
    """The same schedule of the default strategy passes over slow prompts."""
    config = RunConfig(
        batch=BatchSpec(tokens_per_batch=None, groups_per_batch=3),
        strategy=StrategySpec(EXACT.name, {"max_staleness": 3}),
    )
    schedule = Schedule(config, seed, set(), set(), set())
    schedule.train(8)
    assert schedule.trained() != [list(range(3 * k, 3 * k + 3)) for k in range(8)]


def test_a_finite_supply_ends_with_the_last_slots() -> None:
    """The tail waits for its slots too."""
    config = RunConfig(
        batch=BatchSpec(tokens_per_batch=None, groups_per_batch=2), strategy=EXACT, tickets=TicketSpec(prompts=3)
    )
    run = VirtualRun(config, 1)
    first, second, third = run.take_tickets(3)
    for ticket in (third, second):
        run.append(entries({"prompt_index": ticket.prompt_index, "tokens": 10}))
    waits = run.batch(0)
    assert isinstance(waits, WaitingAnswer) and waits.have.groups == 1
    assert waits.detail and "prompt_index 0" in waits.detail
    run.append(entries({"prompt_index": first.prompt_index, "tokens": 10}))
    made = []
    for step in range(2):
        record = run.batch(step)
        assert isinstance(record, BatchRecord)
        made.append([group.prompt_index for group in record.groups])
        run.ack(0.0)
        run.publish()
    assert made == [[0, 1], [2]]


def test_a_time_out_trains_the_slots_that_are_filled_and_the_late_group_next() -> None:
    """Slot 1 is skipped; its group is the first of the next batch. Later groups wait for their own batch."""
    batch = BatchSpec(tokens_per_batch=None, groups_per_batch=3, timeout_s=30.0)
    strategy = StrategySpec(EXACT.name, EXACT.options | {"max_staleness": 2})
    run = VirtualRun(RunConfig(batch=batch, strategy=strategy), 1)
    tickets = run.take_tickets(6)
    run.append(entries(*({"prompt_index": t.prompt_index, "tokens": 10} for t in tickets if t.prompt_index != 1)))
    assert isinstance(run.batch(0), WaitingAnswer)
    run.now_s += 30.0
    short = run.batch(0)
    assert isinstance(short, BatchRecord)
    assert ([group.prompt_index for group in short.groups], short.short) == ([0, 2], "timeout")
    run.ack(0.0)
    run.publish()
    assert isinstance(run.batch(1), WaitingAnswer)
    run.append(entries({"prompt_index": 1, "tokens": 10}))
    record = run.batch(1)
    assert isinstance(record, BatchRecord)
    assert [group.prompt_index for group in record.groups] == [1, 3, 4]
