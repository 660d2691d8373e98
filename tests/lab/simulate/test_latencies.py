"""Latencies of recorded groups: what is due to the load of the engines, to rewards, and to the groups themselves."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from replaybuf.lab.simulate.engines import Engines
from replaybuf.lab.simulate.latencies import Latencies, Seconds, measure_latencies

SLOTS, GROUPS = 8, 300
TOKEN_S = 0.03


def generate(load_share: float, *, reward_s: float = 0.0, every: int = 9) -> tuple[Seconds, Seconds, Seconds]:
    """Let bursts of 1 to 8 groups generate; return tickets, arrivals and longest rollouts.

    Each `every`-th group waits for its reward.
    """
    rng = np.random.default_rng(3)
    longest = rng.lognormal(3.5, 0.4, GROUPS)
    engines, tickets_s, arrivals_s = Engines[int](SLOTS, load_share), np.zeros(GROUPS), np.zeros(GROUPS)
    now_s, started, waiting = 0.0, 0, list[tuple[float, int]]()
    while started < GROUPS:
        for _ in range(min(int(rng.integers(1, SLOTS + 1)), GROUPS - started)):
            tickets_s[started] = now_s
            engines.start(now_s, TOKEN_S * longest[started], started)
            started += 1
        while (next_s := engines.next_end_s()) is not None:
            now_s = next_s
            for end_s, group in engines.finish(next_s, next_s):
                heapq.heappush(waiting, (end_s + (reward_s if group % every == 0 else 0.0), group))
    for end_s, group in waiting:
        arrivals_s[group] = end_s
    return tickets_s, arrivals_s, longest


def measure(runs: tuple[Seconds, Seconds, Seconds]) -> Latencies:
    """Measure with reported slots."""
    return measure_latencies(*runs, SLOTS)


@pytest.mark.parametrize("load_share", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("reward_s", [0.0, 4.0])
def test_the_share_of_the_load_is_found_whatever_the_rewards(load_share: float, reward_s: float) -> None:
    """And with it the latencies that the groups would have with all slots busy."""
    runs = generate(load_share, reward_s=reward_s)
    latencies = measure(runs)
    assert latencies.load_share == pytest.approx(load_share, abs=0.06)
    expected = TOKEN_S * runs[2] + np.where(np.arange(GROUPS) % 9 == 0, reward_s, 0.0)
    assert latencies.total_s.mean() == pytest.approx(expected.mean(), rel=0.05)


def test_rewards_that_take_long_are_no_load_of_the_engines() -> None:
    latencies = measure(generate(0.8, reward_s=4.0))
    assert np.flatnonzero(latencies.reward_s > 2).tolist() == list(range(0, GROUPS, 9))
    assert latencies.reward_s[0] == pytest.approx(4.0, abs=0.5)


def test_groups_without_a_ticket_have_the_median() -> None:
    """Their tickets were issued before a takeover, or they had none."""
    tickets_s, arrivals_s, longest = generate(0.0)
    tickets_s[:10] = np.nan
    latencies = measure((tickets_s, arrivals_s, longest))
    assert latencies.total_s[:10] == pytest.approx(np.median(latencies.total_s[10:]))


def test_without_reported_slots_the_most_groups_at_a_time_count() -> None:
    """A ticket that is issued as a group arrives takes the slot of that group."""
    tickets_s = np.array([0.0, 0.0, 1.0, 2.0])
    assert measure_latencies(tickets_s, tickets_s + 1, np.ones(4), 0).slots == 2
