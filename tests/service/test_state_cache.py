"""The state cache is valid while no stream grows, no ticket goes out and no time passes."""

from __future__ import annotations

import numpy as np
import pytest

from replaybuf.kernel.rows.index import ENTRY
from replaybuf.kernel.strategy.selection import PRODUCER_SILENCE_S
from replaybuf.lab.simulate.virtual import VirtualRun
from replaybuf.service.clock import Clock
from replaybuf.service.presence import Presence
from replaybuf.service.report.state_cache import WAITS_KEPT_S, StateCache
from replaybuf.wire.answer.run_status import RunStatus
from replaybuf.wire.config import BatchSpec
from replaybuf.wire.contract import WaitingAnswer
from tests.builders import run_config


class Looked:
    """A run of two groups per batch on a clock of its own, and how often its strategy was asked."""

    def __init__(self) -> None:
        self.run = VirtualRun(run_config(batch=BatchSpec(tokens_per_batch=None, groups_per_batch=2)), ranks=1)
        self.asked = 0
        self.why_takes_s = 0.0
        self.cache = self.cache_of(self.run)

    def cache_of(self, run: VirtualRun) -> StateCache:
        """Return the cache of a run, whose strategy is counted."""
        why_waiting = run.selector.why_waiting

        def count() -> WaitingAnswer | None:
            self.asked += 1
            run.now_s += self.why_takes_s
            return why_waiting()

        run.selector.why_waiting = count  # type: ignore[method-assign]
        return StateCache("r", run.state, run.book, run.selector, Clock(*2 * (lambda: run.now_s,)))

    def state(self) -> RunStatus:
        """Look at the state."""
        return self.cache.state(durability="strict", rejected={}, presence=Presence(lambda: self.run.now_s))

    def reason(self) -> str | None:
        """Look at the state; return why the run waits."""
        waiting = self.state().waiting
        return waiting.reason if waiting else None

    def store(self) -> None:
        """Store a group without a ticket."""
        entry = np.zeros(1, ENTRY)
        entry["prompt_index"], entry["arrival_s"] = -1, self.run.now_s
        entry["tokens"], entry["rollouts"], entry["longest_tokens"], entry["frame_bytes"] = 8, 2, 4, 100
        self.run.append(entry)


@pytest.fixture
def looked() -> Looked:
    """A run that nobody has looked at."""
    return Looked()


def test_the_strategy_is_asked_once_while_nothing_changes(looked: Looked) -> None:
    assert [looked.reason() for _ in range(5)] == ["no_producers"] * 5
    assert looked.asked == 1


def test_a_new_group_changes_the_state_at_once(looked: Looked) -> None:
    """With its count, bytes and histograms."""
    looked.reason()
    looked.store()
    assert looked.reason() == "too_few_groups"
    looked.store()
    assert looked.reason() is None
    state = looked.state()
    assert (state.groups.live, state.bytes.live) == (2, 200)
    assert state.histograms.rollout_tokens["stored"].count == 2


def test_a_producer_that_asks_or_falls_silent_changes_the_state_at_once(looked: Looked) -> None:
    """`no_producers` holds until one has asked, and again a minute after the last one, once no ticket is out."""
    assert looked.reason() == "no_producers"
    (ticket,) = looked.run.take_tickets(1)
    assert looked.reason() == "no_groups"
    looked.run.now_s += PRODUCER_SILENCE_S + 1
    assert looked.reason() == "no_groups"
    looked.run.return_ticket(ticket, "shutdown")
    assert looked.reason() == "no_producers"


def test_the_strategy_is_asked_again_after_a_short_time(looked: Looked) -> None:
    """It may go by the number of tickets that are out, which is in no stream; a clock set back asks it, too."""
    looked.run.now_s = 100.0
    looked.reason()
    looked.run.now_s += WAITS_KEPT_S
    looked.reason()
    assert looked.asked == 2
    looked.run.now_s = 50.0
    looked.reason()
    assert looked.asked == 3


def test_a_look_after_each_change_finds_when_the_reason_began(looked: Looked) -> None:
    """Nobody asks while groups trickle in; a look without a change asks nobody either."""
    looked.run = VirtualRun(run_config(batch=BatchSpec(tokens_per_batch=None, groups_per_batch=9)), ranks=1)
    looked.cache = looked.cache_of(looked.run)
    for _ in range(4):
        looked.store()
        for _ in range(5):
            looked.cache.look()
        looked.run.now_s += 60.0
    assert looked.asked == 4
    assert (looked.reason(), looked.state().waiting_s) == ("too_few_groups", 240.0)


def test_a_batch_that_is_ready_waits_for_nothing(looked: Looked) -> None:
    looked.store()
    assert looked.state().waiting_s == 0.0
    looked.store()
    assert (looked.reason(), looked.state().waiting_s) == (None, None)


def test_looks_rest_after_an_expensive_one(looked: Looked) -> None:
    """A strategy that takes 0.1 s is not asked again for 4.9 s, although groups arrive."""
    looked.why_takes_s = 0.1
    looked.store()
    looked.cache.look()
    asked_s = looked.run.now_s
    while looked.asked == 1:
        looked.store()
        looked.run.now_s += 0.5
        looked.cache.look()
    assert asked_s + 4.9 <= looked.run.now_s <= asked_s + 5.5
