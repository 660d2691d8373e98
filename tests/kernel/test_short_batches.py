"""Tails and time-outs of batches, on random schedules of a run without a store."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from replaybuf.kernel.state.tickets import Ticket
from replaybuf.lab.simulate.virtual import VirtualRun
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec, TicketSpec
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.ledger import BatchRecord
from tests.builders import entries

BATCHES = st.builds(
    BatchSpec,
    tokens_per_batch=st.sampled_from([None, 30, 47]),
    groups_per_batch=st.integers(1, 5),
    tail=st.sampled_from(["train", "drop"]),
)
STRATEGIES = st.sampled_from(
    [
        StrategySpec("on-policy"),
        StrategySpec("one-step-off-policy", {"max_staleness": 2}),
        StrategySpec("replay", {"max_uses": 2, "order": "fifo"}),
        StrategySpec("replay", {"max_uses": 3, "fresh_fraction": 0.5}),
        StrategySpec("replay", {"max_uses": 2, "samples_per_insert": 1.5}),
    ]
)


def finish(run: VirtualRun, outcomes: list[str]) -> list[BatchRecord]:
    """Train until the run is finished; each ticket ends with one of these outcomes, in turn."""
    batches: list[BatchRecord] = []
    out: list[Ticket] = []
    for turn in range(2000):
        out += run.take_tickets(3)
        if out:
            ticket = out.pop(0)
            if outcomes[turn % len(outcomes)] == "stored":
                version = run.published_version
                run.append(
                    entries(
                        {"prompt_index": ticket.prompt_index, "tokens": 10}
                        | dict.fromkeys(("policy_version", "policy_version_max"), version)
                    )
                )
            else:
                run.return_ticket(ticket, "engine_error")
        outcome = run.batch(run.state.step)
        if run.state.phase == "finished":
            return batches
        if isinstance(outcome, BatchRecord):
            batches.append(outcome)
            run.ack(0.0)
            run.publish()
    raise AssertionError(f"the run does not end: {outcome}")


@given(BATCHES, STRATEGIES, st.integers(1, 20), st.lists(st.sampled_from(["stored", "stored", "failed"]), min_size=1))
def test_a_finite_supply_ends_with_every_group_used_or_evicted(
    batch: BatchSpec, strategy: StrategySpec, prompts: int, outcomes: list[str]
) -> None:
    """Nothing stays live; a short batch comes last among the batches that hold a new group."""
    if "stored" not in outcomes:
        outcomes = [*outcomes, "stored"]
    run = VirtualRun(RunConfig(batch=batch, strategy=strategy, tickets=TicketSpec(prompts=prompts, max_attempts=2)), 1)
    batches = finish(run, outcomes)
    totals = run.state.totals
    assert run.state.pool.live.totals().groups == 0
    used = {group.number for record in batches for group in record.groups}
    assert totals.stored == len(used) + totals.evicted.total()
    assert all(bool(record.short) == (record.fill is not None) for record in batches)
    if batch.tail == "drop":
        assert not any(record.short for record in batches)
    elif strategy.name == "one-step-off-policy":
        assert not any(record.short for record in batches[:-1])
        assert not totals.evicted["tail"]


@given(st.integers(1, 6), st.integers(1, 6), st.floats(1, 100), st.lists(st.floats(0.1, 40), min_size=1, max_size=30))
def test_a_batch_is_short_only_after_the_time_out_and_with_enough_groups(
    groups: int, least: int, timeout_s: float, gaps_s: list[float]
) -> None:
    """One group arrives after each gap; the trainer asks after each arrival."""
    batch = BatchSpec(groups_per_batch=groups, timeout_s=timeout_s, min_groups=min(least, groups))
    strategy = StrategySpec("one-step-off-policy", {"max_staleness": 99})
    run = VirtualRun(RunConfig(batch=batch, strategy=strategy), 1)
    asked_s: float | None = None
    for number, gap_s in enumerate(gaps_s):
        run.now_s += gap_s
        run.append(entries({"prompt_index": number, "tokens": 10}))
        live = run.state.pool.live.totals().groups
        overdue = asked_s is not None and run.now_s >= asked_s + timeout_s
        outcome = run.batch(run.state.step)
        assert isinstance(outcome, BatchRecord) == (live == groups or (overdue and live >= batch.min_groups))
        if isinstance(outcome, WaitingAnswer):
            asked_s = run.now_s if asked_s is None else asked_s
            continue
        assert len(outcome.groups) == live
        assert (outcome.short == "timeout") == (live < groups)
        run.ack(0.0)
        run.publish()
        asked_s = None
