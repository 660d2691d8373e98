"""Strict shares of sources in `replay`: a batch waits for a short source, and tickets go on for it."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from replaybuf.errors import Invalid
from replaybuf.kernel.strategy.plugin_set import build_strategy
from replaybuf.lab.simulate.virtual import VirtualRun
from replaybuf.strategy import Budget, Selection, Waiting, source_hash
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.ledger import BatchRecord
from tests.builders import entries
from tests.strategies.test_replay import BATCH_OF_4, A, B, C, shown, view_of

HALVES = {"a": 0.5, "b": 0.5}
RULES: list[dict[str, Any]] = [{}, {"fresh_fraction": 1.0}, {"groups_per_prompt": 1}]


def choose(sources: list[int], budget: Budget = BATCH_OF_4, **options: Any) -> Selection | Waiting:
    """Ask for a batch of groups of these sources; `overdue`: the trainer has waited too long."""
    overdue = options.pop("overdue", False)
    groups = shown(len(sources), source=sources, prompt_index=range(len(sources)))
    view = dataclasses.replace(view_of(groups), overdue=overdue)
    strategy = build_strategy("replay", {"mix": HALVES, "mix_strict": True} | options)
    return strategy.select(groups, view, budget, np.random.default_rng(0))


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_waits_for_a_short_source_and_names_it(rule: dict[str, Any]) -> None:
    """Enough groups are live, and without strict shares they would make a batch."""
    waits = choose([A] * 9 + [B], **rule)
    assert isinstance(waits, Waiting)
    assert (waits.reason, waits.groups) == ("too_few_groups", 3)
    assert waits.detail == "source b has 1 of its 2 groups in the batch"
    assert isinstance(choose([A] * 9 + [B], mix_strict=False, **rule), Selection)


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_with_all_sources_has_exact_shares(rule: dict[str, Any]) -> None:
    """Whatever the buffer holds of each."""
    sources = [A] * 9 + [B] * 2
    chosen = choose(sources, **rule)
    assert isinstance(chosen, Selection)
    positions = chosen.rows - shown(1).row[0]
    assert Counter(sources[position] for position in positions) == {A: 2, B: 2}


@pytest.mark.parametrize("rule", RULES)
def test_an_overdue_batch_leaves_the_places_of_the_short_source_empty(rule: dict[str, Any]) -> None:
    """The core asks for as many groups as the batch had when it waited."""
    sources = [A] * 9 + [B]
    chosen = choose(sources, Budget(None, 3, 64), overdue=True, **rule)
    assert isinstance(chosen, Selection)
    positions = chosen.rows - shown(1).row[0]
    assert Counter(sources[position] for position in positions) == {A: 2, B: 1}


def test_other_sources_have_the_rest_of_the_shares() -> None:
    """They are named together."""
    waits = choose([A] * 9, mix={"a": 0.5})
    assert isinstance(waits, Waiting) and waits.detail == "every other source has 0 of its 2 groups in the batch"
    assert isinstance(choose([A] * 9 + [B, C], mix={"a": 0.5}), Selection)


def test_a_batch_of_tokens_ends_its_wait_when_the_mix_fills_it() -> None:
    """Groups have 10 tokens: the fifth place of the mix does not fit."""
    tokens = Budget(45, None, 64)
    assert isinstance(choose([A] * 9 + [B], tokens), Waiting)
    chosen = choose([A] * 9 + [B] * 9, tokens)
    assert isinstance(chosen, Selection) and len(chosen.rows) == 4


def test_strict_shares_need_a_mix() -> None:
    with pytest.raises(Invalid) as fault:
        build_strategy("replay", {"mix_strict": True})
    assert fault.value.name == "strategy.options.mix_strict"


# ---------------------------------------------------------------------- tickets


def produce(run: VirtualRun, sources: itertools.cycle[str], count: int) -> int:
    """Take tickets and store their groups with these sources; return how many tickets there were."""
    tickets = run.take_tickets(count)
    version = run.published_version
    run.append(
        entries(
            *(
                {
                    "prompt_index": ticket.prompt_index,
                    "policy_version": version,
                    "policy_version_max": version,
                    "source": source_hash(next(sources)),
                }
                for ticket in tickets
            )
        )
    ) if tickets else None
    return len(tickets)


def test_tickets_go_on_while_the_buffer_is_full_of_the_other_source() -> None:
    """One group in ten is of source b. The buffer stays bounded, and every batch has exact shares."""
    options = {"mix": HALVES, "mix_strict": True, "max_staleness": 1, "max_uses": 1}
    batch = BatchSpec(groups_per_batch=4, tokens_per_batch=None)
    run = VirtualRun(RunConfig(batch=batch, strategy=StrategySpec("replay", options)), 1)
    sources, most_live = itertools.cycle("aaaaaaaaab"), 0
    for step in range(6):
        for _ in range(100):
            outcome = run.batch(step)
            if isinstance(outcome, BatchRecord):
                break
            assert isinstance(outcome, WaitingAnswer)
            assert not run.state.stored or "source" in (outcome.detail or ""), outcome
            assert produce(run, sources, 2), "a ticket for the short source"
            most_live = max(most_live, run.state.pool.live.totals().groups)
        assert isinstance(outcome, BatchRecord), outcome
        index = run.state.index
        rows = index.rows_of(outcome.numbers)
        assert Counter(index["source"][rows].tolist()) == {A: 2, B: 2}
        run.ack(0.0)
        run.publish()
    # The largest window has two batches of 4, and each source half of it.
    assert most_live <= 4 + 4
    assert run.state.totals.evicted["beyond_share"] > 0
