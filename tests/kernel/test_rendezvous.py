"""Which server should lead a run: only the runs of a server that joins or leaves move, and the shares are even."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from replaybuf.kernel.decide.rendezvous import Seniority, leading_release, wanted_leader

RUNS = [f"run-{number}" for number in range(400)]
servers = st.sets(st.text(min_size=1, max_size=40), min_size=1, max_size=9).map(frozenset)


def leaders_of(names: frozenset[str]) -> dict[str, str | None]:
    return {run: wanted_leader(run, names) for run in RUNS}


@given(servers, st.text(min_size=1, max_size=40))
def test_only_runs_of_a_server_that_joins_or_leaves_move(names: frozenset[str], other: str) -> None:
    """Read from left to right it joins, from right to left it leaves."""
    without, with_it = leaders_of(names - {other}), leaders_of(names | {other})
    moved = {run for run in RUNS if without[run] != with_it[run]}
    assert moved == {run for run in RUNS if with_it[run] == other}


@given(servers)
def test_every_run_has_a_leader_and_the_shares_are_even(names: frozenset[str]) -> None:
    """Within six standard deviations of a draw of each run by itself."""
    leaders = list(leaders_of(names).values())
    share = len(RUNS) / len(names)
    spread = math.sqrt(share * (1 - 1 / len(names)))
    assert all(abs(leaders.count(name) - share) <= 6 * spread + 1 for name in names)
    assert set(leaders) <= names


def test_without_servers_nobody_is_wanted() -> None:
    assert wanted_leader("run", frozenset()) is None


def test_the_release_of_the_server_that_has_lived_longest_leads() -> None:
    """A server of another release that joins follows; names decide between servers that started together."""
    old, new = Seniority(9.0, "a", "1.0"), Seniority(2.0, "b", "2.0")
    assert leading_release([new, old, Seniority(1.0, "c", "1.0")]) == "1.0"
    assert leading_release([new]) == "2.0"
    together = [Seniority(0.0, "a", "1.0"), Seniority(0.0, "b", "2.0")]
    assert leading_release(together) == leading_release(reversed(together)) == "2.0"
