"""Groups that chance makes, the same ones for everybody who asks."""

from __future__ import annotations

import numpy as np
import pytest

from replaybuf.errors import Invalid
from replaybuf.lab.simulate.workload import BLOCK, Supply, check_prompts, check_workload
from replaybuf.wire.config import BatchSpec
from tests.lab.simulate.workloads import config, workload


def test_an_attempt_does_not_depend_on_earlier_ones() -> None:
    """So strategies that are compared meet the same groups, in whatever order they generate them."""
    forward, backward = (Supply(workload(failure_rate=0.2), config(), seed=3) for _ in range(2))
    asked = [(index, number) for index in (0, 5, BLOCK, 3 * BLOCK + 1) for number in (1, 2)]
    seen = [forward.attempt(*key) for key in asked]
    assert seen == [backward.attempt(*key) for key in reversed(asked)][::-1]
    assert len({attempt.tokens for attempt in seen}) > 4


def test_lengths_follow_the_distribution_and_its_cap() -> None:
    """Mean within four standard errors; none above the cap, where rollouts count as truncated."""
    w = workload(length_sigma=0.5, length_shared=0.0, length_max=200)
    supply = Supply(w, config(), seed=0)
    lengths = np.array([supply.lengths(index, 1) for index in range(BLOCK)]) - w.prompt_tokens
    assert lengths.max() == w.length_max
    uncapped = Supply(workload(length_sigma=0.5, length_shared=0.0, length_max=100_000), config(), seed=0)
    drawn = np.array([uncapped.lengths(index, 1) for index in range(BLOCK)]) - w.prompt_tokens
    assert abs(drawn.mean() - w.length_mean) < 4 * drawn.std() / np.sqrt(drawn.size)
    entries = supply.entries([supply.attempt(index, 1) for index in range(BLOCK)])
    assert entries["truncated"].sum() == (drawn > w.length_max).sum()
    assert (entries["tokens"] == (lengths + w.prompt_tokens).sum(axis=1)).all()


def test_a_larger_shared_part_makes_the_rollouts_of_a_prompt_alike() -> None:
    """All in common: equal lengths within a group."""
    supply = Supply(workload(length_shared=1.0), config(), seed=0)
    assert len(set(supply.lengths(7, 1).tolist())) == 1
    assert supply.lengths(7, 1).tolist() == supply.lengths(7, 2).tolist()


def test_failures_come_at_their_rates() -> None:
    """Lost, failed and timed out, as shares of the attempts; four standard errors of room."""
    supply = Supply(workload(failure_rate=0.2, lost_rate=0.1, timeout_s=3.0), config(), seed=1)
    attempts = [supply.attempt(index, 1) for index in range(4 * BLOCK)]
    share = {fate: sum(a.fate == fate for a in attempts) / len(attempts) for fate in ("lost", "failed", "timeout")}
    assert share["lost"] == pytest.approx(0.1, abs=4 * np.sqrt(0.1 * 0.9 / len(attempts)))
    assert share["timeout"] > 0 and 0 < share["failed"] <= 0.2 + 4 * np.sqrt(0.2 * 0.8 / len(attempts))
    assert max(attempt.duration_s for attempt in attempts) == 3.0


def test_truncation_by_rule_cuts_rollouts_to_a_row() -> None:
    """As the door does."""
    cut = config(batch=BatchSpec(tokens_per_batch=None, groups_per_batch=4, seq_len=64, overlong="truncate"))
    supply = Supply(workload(), cut, seed=0)
    assert max(supply.attempt(index, 1).longest_tokens for index in range(BLOCK)) == 64


@pytest.mark.parametrize(
    ("field", "value", "reported"),
    [
        ("slots", 0, r"slots is 0; needed: int >= 1"),
        ("token_s", -0.5, r"token_s is -0.5; needed: float >= 0"),
        ("train_s", -1.0, r"train_s is -1.0; needed: float >= 0"),
        ("failure_rate", 1.5, r"failure_rate is 1.5; needed: float <= 1"),
        ("timeout_s", 0.0, r"timeout_s is 0.0; needed: float > 0"),
        ("length_sigma", float("nan"), r"length_sigma is nan; it must be finite"),
        ("ranks", 5000, r"ranks is 5000; needed: int <= 4096"),
    ],
)
def test_impossible_values_are_rejected_with_name_value_and_bound(field: str, value: float, reported: str) -> None:
    """Before anything is simulated."""
    with pytest.raises(Invalid, match=reported) as caught:
        check_workload(workload(**{field: value}))
    assert caught.value.name == field and caught.value.bound is not None


def test_rates_that_leave_no_success_and_speeds_that_take_no_time_are_refused() -> None:
    """Either would go on for ever."""
    with pytest.raises(Invalid, match=r"failure_rate 0.7 and lost_rate 0.3 leave no attempt that succeeds"):
        check_workload(workload(failure_rate=0.7, lost_rate=0.3))
    with pytest.raises(Invalid, match="group_s and token_s are both 0"):
        check_workload(workload(group_s=0.0, token_s=0.0))


def test_prompts_that_fill_a_row_are_rejected() -> None:
    """No rollout would fit behind them."""
    with pytest.raises(Invalid, match=r"prompt_tokens is 4096; batch.seq_len is 4096"):
        check_prompts(workload(prompt_tokens=4096), config())
