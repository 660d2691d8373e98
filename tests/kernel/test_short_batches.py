"""Tails and time-outs of batches, on random schedules of a run without a store."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import example, given

from replaybuf.kernel.state.tickets import Ticket
from replaybuf.lab.simulate.virtual import VirtualRun
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec, TicketSpec
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.ledger import AttachRecord, BatchRecord
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


@example(BatchSpec(groups_per_batch=2), StrategySpec("replay", {"max_uses": 2, "order": "fifo"}), 1, ["stored"])
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
    for record in batches:
        assert bool(record.short) == (record.fill is not None)
        assert not record.short or any(group.times_sampled == 1 for group in record.groups), "only used groups"
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


def waiting_run(groups: int, strategy: StrategySpec | None = None) -> VirtualRun:
    """Build a run of two groups per batch and a time-out of 30 s, with so many groups."""
    batch = BatchSpec(groups_per_batch=2, timeout_s=30.0)
    run = VirtualRun(RunConfig(batch=batch, strategy=strategy or StrategySpec("one-step-off-policy")), 1)
    run.append(entries(*({"prompt_index": number, "tokens": 10} for number in range(groups))))
    return run


def ask(run: VirtualRun, step: int) -> float | None:
    """Ask for a batch that is not there; return the time until it may be short."""
    assert isinstance(run.batch(step), WaitingAnswer)
    return run.left_s(step)


def test_a_prefetch_does_not_count_as_waiting() -> None:
    run = waiting_run(3)
    assert isinstance(run.batch(0), BatchRecord)
    assert ask(run, 1) is None
    run.now_s += 60.0
    assert ask(run, 1) is None
    run.ack(0.0)
    assert ask(run, 1) == 30.0
    run.now_s += 30.0
    assert isinstance(run.batch(1), BatchRecord)


def test_a_wait_for_the_trainer_itself_does_not_count() -> None:
    """On-policy: step 1 needs version 1, which the trainer publishes late."""
    run = waiting_run(2, StrategySpec("on-policy"))
    assert isinstance(run.batch(0), BatchRecord)
    run.ack(0.0)
    assert ask(run, 1) is None
    run.now_s += 60.0
    run.publish()
    run.append(entries({"prompt_index": 2, "tokens": 10, "policy_version": 1, "policy_version_max": 1}))
    assert ask(run, 1) == 30.0


def test_a_new_trainer_starts_a_new_wait() -> None:
    run = waiting_run(1)
    assert ask(run, 0) == 30.0
    run.now_s += 29.0
    assert ask(run, 0) == 1.0
    run.state.apply(
        run.state.entries + 1, AttachRecord(epoch=2, step=0, dp_world_size=1, seq_len=64, pad_to_multiple_of=1)
    )
    assert ask(run, 0) == 30.0
