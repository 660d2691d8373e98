"""The virtual clock: nothing is lost or counted twice, bounds hold, time adds up, the seed decides all."""

from __future__ import annotations

import re
import time
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import StrategyFault
from replaybuf.kernel.rows.index import LIVE
from replaybuf.kernel.strategy.contract import (
    Budget,
    BufferView,
    Feedback,
    Flow,
    Groups,
    Selection,
    Strategy,
    Waiting,
    fill,
)
from replaybuf.lab.simulate.figures import Figures
from replaybuf.lab.simulate.loop import _ENDED, Simulation, simulate
from replaybuf.lab.simulate.workload import Supply
from replaybuf.service.report.status import group_counts
from replaybuf.wire.config import BatchSpec, Limits, TicketSpec
from tests.lab.simulate.workloads import config, workload

STEPS = 30


def study(
    strategy: str, options: dict[str, Any] | None = None, *, steps: int = STEPS, seed: int = 0, **w: Any
) -> Figures:
    """Simulate a small workload."""
    run = config(strategy, options)
    return simulate(run, Supply(workload(**w), run, seed), steps)


@given(
    st.sampled_from([("on-policy", {}), *(("one-step-off-policy", {"max_staleness": k}) for k in (0, 1, 4))]),
    st.integers(0, 2**32),
    st.integers(1, 24),
    st.sampled_from([0.0, 0.2, 0.5]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([None, 3.0]),
    st.sampled_from([1, 3]),
    st.sampled_from([0.0, 0.7]),
)
def test_no_prompt_is_lost_and_no_group_is_counted_twice(
    strategy: tuple[str, dict[str, Any]],
    seed: int,
    slots: int,
    failure_rate: float,
    lost_rate: float,
    timeout_s: float | None,
    steps_per_publish: int,
    load_share: float,
) -> None:
    """Every prompt issued is used, dropped, failed, live, out or due again; stored is the sum of where groups stand."""
    run = config(*strategy, steps_per_publish=steps_per_publish)
    rates = {"failure_rate": failure_rate, "lost_rate": lost_rate, "load_share": load_share}
    w = workload(slots=slots, timeout_s=timeout_s, checkpoint_steps=4, **rates)
    simulation = Simulation(run, Supply(w, run, seed), 12)
    figures = simulation.simulate()
    state, book = simulation.run.state, simulation.run.book

    index = state.index
    unused = int(((index["state"] == LIVE) & (index["times_sampled"] == 0)).sum())
    coverage = figures.coverage
    assert coverage.issued == coverage.trained + coverage.dropped + coverage.failed + coverage.pending
    assert coverage.pending == unused + len(book.pending_prompts())
    counts = group_counts(state)
    placed = counts["live"] + counts["in_batches"] + counts["retired"] + sum(counts["evicted"].values())
    assert figures.stored_groups == counts["stored"] == placed
    wasted = sum(waste.groups for waste in figures.waste.values())
    assert figures.generated_groups == coverage.trained + unused + wasted
    assert figures.generated_groups == book.counts["issued"] - _generating(simulation)

    assert figures.ended == "steps" and figures.steps == 12
    assert sum(figures.staleness.values()) == 12 * 4
    assert max(figures.staleness, default=0) <= strategy[1].get("max_staleness", 0)
    assert figures.train_share + figures.publish_share + figures.wait_share == pytest.approx(1.0)
    assert 0 <= figures.idle_share <= 1


def _generating(simulation: Simulation) -> int:
    """Count the groups that are still to come in."""
    return sum(kind == _ENDED for _, kind, _, _ in simulation._events) + len(simulation._engines)


@pytest.mark.parametrize("load_share", [0.0, 0.7])
def test_the_slots_never_hold_more_than_there_are(load_share: float) -> None:
    """Free slots and groups being generated make up all, at every moment."""
    run = config(options={"max_staleness": 4})
    w = workload(failure_rate=0.2, lost_rate=0.1, load_share=load_share)
    simulation = Simulation(run, Supply(w, run, 0), STEPS)
    simulation._act()
    for _ in range(500):
        if simulation.ended or not simulation._events:
            break
        simulation._advance()
        assert 0 <= simulation._free <= 8
        assert simulation._free + _generating(simulation) == 8


def test_the_seed_decides_everything() -> None:
    """The same seed gives the same figures, byte for byte; another one gives others."""
    first, again, other = (study("one-step-off-policy", seed=seed, lost_rate=0.1) for seed in (5, 5, 6))
    assert msgspec.json.encode(first) == msgspec.json.encode(again) != msgspec.json.encode(other)


def test_on_policy_waits_longer_and_is_never_stale() -> None:
    """What the strategies are known for."""
    on_policy, one_step, four_steps = (
        study("on-policy"),
        study("one-step-off-policy"),
        study("one-step-off-policy", {"max_staleness": 4}),
    )
    assert set(on_policy.staleness) == {0}
    assert on_policy.wait_share > one_step.wait_share > four_steps.wait_share
    assert on_policy.staleness_mean < one_step.staleness_mean < four_steps.staleness_mean


def test_an_idle_machine_is_predicted_to_the_second() -> None:
    """Equal lengths, one slot per group, on-policy: a step is generation, then training, then publishing."""
    run = config("on-policy")
    w = workload(slots=4, length_sigma=0.0, token_s=0.01, group_s=1.0, train_s=2.0, publish_s=0.5, round_s=0.25)
    figures = simulate(run, Supply(w, run, 0), 10)
    assert figures.seconds == pytest.approx(10 * (2.0 + 2.0 + 0.5))
    assert figures.wait_share == pytest.approx(2.0 / 4.5)
    assert figures.idle_share == pytest.approx(2.5 / 4.5)


def test_engines_that_slow_down_under_load_are_as_fast_as_their_slots_are_empty() -> None:
    """On-policy with four of eight slots busy, of 4 s at full load half due to it: 1 - 0.5 * 4/8 of them."""
    run = config("on-policy")
    times = {"token_s": 0.04, "group_s": 0.0, "train_s": 2.0, "publish_s": 0.5, "round_s": 0.25}
    w = workload(slots=8, length_sigma=0.0, load_share=0.5, **times)
    assert simulate(run, Supply(w, run, 0), 10).seconds == pytest.approx(10 * (3.0 + 2.0 + 0.5))


def test_slow_producers_are_as_stale_as_with_short_rounds() -> None:
    """Their step takes nine times that of the trainer, so a round of a tenth of it would blur the publications."""
    run, slow = config("one-step-off-policy"), {"slots": 3, "train_s": 0.3, "publish_s": 0.1}
    usual, exact = (
        simulate(run, Supply(workload(**slow, **own), run, 0), 400).staleness_mean for own in ({}, {"round_s": 0.002})
    )
    assert usual == pytest.approx(exact, abs=0.015)


def test_short_windows_drop_the_long_groups_and_it_shows_as_length_bias() -> None:
    """A group that takes longer than its window is too stale when it comes: the long ones go."""
    figures = study("one-step-off-policy", slots=16, length_sigma=1.2, length_shared=1.0, token_s=0.05)
    assert figures.waste["too_stale"].groups > 0
    assert figures.dropped_lengths.mean > figures.generated_lengths.mean > figures.used_lengths.mean
    assert figures.length_bias < 0.95 and figures.coverage.share < 1


def test_lost_tickets_come_back_after_their_time_and_failed_prompts_are_recorded() -> None:
    """The prompts of lost attempts are issued again; after the last attempt a prompt has failed."""
    figures = study("one-step-off-policy", lost_rate=0.4, failure_rate=0.3)
    assert figures.waste["lost"].groups > 0 and figures.waste["failed"].groups > 0
    assert figures.coverage.failed > 0


def test_a_group_that_comes_after_its_ticket_expired_is_stored_once() -> None:
    """Its prompt was issued again meanwhile: who is first is stored, the other one is a duplicate."""
    run = config(options={"max_staleness": 8}, tickets=TicketSpec(ttl_s=2.0))
    simulation = Simulation(run, Supply(workload(slots=6, token_s=0.02), run, 0), STEPS)
    figures = simulation.simulate()
    assert figures.waste["duplicate"].groups > 0
    stored = simulation.run.state.index["prompt_index"]
    assert len(set(stored.tolist())) == len(stored)
    assert figures.coverage.trained + figures.coverage.dropped <= figures.coverage.issued


def test_the_run_ends_with_its_prompts() -> None:
    """As the service ends it: what does not fill a batch stays."""
    run = config(tickets=TicketSpec(ttl_s=30.0, prompts=21))
    figures = simulate(run, Supply(workload(), run, 0), STEPS)
    assert (figures.ended, figures.steps, figures.coverage.issued, figures.coverage.trained) == ("finished", 5, 21, 20)


def test_groups_that_never_fit_end_the_simulation_with_the_reason() -> None:
    """Rows too short for any rollout: refused at the door, prompts fail, no batch ever comes."""
    run = config(batch=BatchSpec(tokens_per_batch=None, groups_per_batch=4, seq_len=12))
    figures = simulate(run, Supply(workload(), run, 0), STEPS)
    assert figures.steps == 0 and "nothing usable" in figures.ended
    assert set(figures.waste) == {"overlong"} and figures.coverage.failed > 0


def test_a_bound_on_live_tokens_holds_producers_back() -> None:
    """The same admission as the service's."""
    batch = BatchSpec(tokens_per_batch=None, groups_per_batch=4, seq_len=1024)
    bounded = config(options={"max_staleness": 4}, batch=batch, limits=Limits(max_tokens_live=3000))
    free = config(options={"max_staleness": 4}, batch=batch)
    held, unbound = (simulate(run, Supply(workload(slots=32), run, 0), STEPS) for run in (bounded, free))
    assert sum(held.buffer.tokens) / len(held.buffer.tokens) < 3000 < max(unbound.buffer.tokens)
    assert held.live_max < unbound.live_max
    assert held.idle_share > unbound.idle_share


def test_a_token_budget_is_kept_and_packed() -> None:
    """No batch above its tokens; rows are filled as the service fills them."""
    run = config(batch=BatchSpec(tokens_per_batch=4000, groups_per_batch=None, seq_len=1024))
    figures = simulate(run, Supply(workload(), run, 0), STEPS)
    assert figures.ended == "steps" and figures.used_tokens <= STEPS * 4000
    assert figures.packing.batches > 0 and 0 < figures.packing.unused_share < 1 and figures.packing.imbalance >= 1


def install(monkeypatch: pytest.MonkeyPatch, strategy: type[Strategy[Any]]) -> None:
    """Let every name stand for this strategy."""

    def load(group: str, name: str) -> type[Strategy[Any]]:
        return strategy

    monkeypatch.setattr("replaybuf.kernel.strategy.plugin_set.load", load)


class Greedy(Strategy[Any]):
    """Breaks the rule: takes every group there is."""

    @property
    def max_staleness(self) -> int:
        return 3

    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        return Selection(groups.row) if len(groups) > 4 else Waiting("too_few_groups")


def test_a_strategy_that_breaks_its_contract_is_named_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would pause a served run ends the study."""
    install(monkeypatch, Greedy)
    with pytest.raises(StrategyFault, match=r"keeps the group budget.*the run would be paused at step 0"):
        study("greedy", slots=16)


class Sleepy(Strategy[Any]):
    """Answers once after the time that a service would wait for it."""

    asked = 0

    def admit(self, buffer: BufferView, flow: Flow) -> int:
        Sleepy.asked += 1
        if Sleepy.asked == 5:
            time.sleep(0.03)
        return super().admit(buffer, flow)

    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        return fill(groups, np.arange(len(groups)), budget)


def test_a_slow_plug_in_is_logged_and_does_not_end_the_study(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock is virtual; the host's says nothing about the run."""
    install(monkeypatch, Sleepy)
    monkeypatch.setattr("replaybuf.lab.simulate.loop.CALL_LIMIT_S", 0.02)
    assert study("sleepy").ended == "steps"
    assert Sleepy.asked > 5
    assert re.search(r"plug-in slow strategy=sleepy took_s=\d+\.\d+ bound_s=0.02", caplog.text)


class Attentive(Sleepy):
    """Keeps the feedback it observes."""

    heard: ClassVar[list[Feedback]] = []

    def observe(self, feedback: Feedback) -> None:
        self.heard.append(feedback)


def test_an_observing_strategy_gets_feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean |advantage| of each group of the batch, by its id."""
    install(monkeypatch, Attentive)
    study("attentive", steps=3)
    assert {feedback.step for feedback in Attentive.heard} == {0, 1, 2}
    (priorities,) = Attentive.heard[0].values.values()
    assert all(re.fullmatch(r"p\d+", name) and value >= 0 for name, value in priorities.items())
