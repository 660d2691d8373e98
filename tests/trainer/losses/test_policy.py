"""Each named loss equals a slow formula written apart, in value and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from replaybuf_trainer.losses import BatchTotals, Tally, load_objective
from replaybuf_trainer.losses.policy import BUILT_IN
from tests.trainer.losses.slow import SLOW, as_columns, drawn, factor

CASES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.5}),
    ("grpo", {"dual_clip": 1.5, "ratio_to": "old"}),
    ("dr-grpo", {"clip_high": 0.3}),
    ("cispo", {}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.1, "ratio_to": "old"}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.3, "clip_high": 0.3, "ratio_to": "old"}),
    ("truncated-ratio", {}),
    ("truncated-ratio", {"bound": 1.1}),
    ("decoupled-ppo", {}),
    ("decoupled-ppo", {"bound": 1.05, "clip_low": 0.1}),
    ("kl-cov", {}),
    ("kl-cov", {"share": 0.4, "weight": 0.7}),
    ("clip-cov", {}),
    ("clip-cov", {"share": 0.3, "cov_low": 0.0, "cov_high": 2.0}),
]
CONSTANT, ELSEWHERE = 12, 2


def names(case: Any) -> str:
    return str(case)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "options"), CASES, ids=names)
def test_value_and_gradient_equal_a_formula_written_apart(name: str, options: dict[str, Any], seed: int) -> None:
    """In float64, with sampling weights, an empty rollout, and rollouts of other ranks in the mean."""
    rollouts = drawn(seed)
    objective = load_objective(name, options | {"normalise_constant": CONSTANT})
    tokens = as_columns(rollouts)
    totals = BatchTotals(len(tokens.rollout) + 10 * ELSEWHERE, len(rollouts) + ELSEWHERE)
    value = objective.value(tokens, totals, Tally())
    torch.autograd.backward(value)
    expected, gradient = 0.0, []
    for rollout, terms in zip(rollouts, SLOW[name](rollouts, **options), strict=True):
        for term, derivative in terms:
            scale = rollout.weight * factor(rollouts, rollout, objective.normalise, CONSTANT, ELSEWHERE)
            expected += scale * term
            gradient.append(scale * derivative)
    assert value.item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert tokens.logprobs.grad is not None
    torch.testing.assert_close(
        tokens.logprobs.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=1e-14
    )


def test_every_built_in_loss_has_a_slow_formula() -> None:
    assert BUILT_IN.keys() == SLOW.keys() == {name for name, _ in CASES}


@pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - {"cispo", "clip-cov", "gspo", "truncated-ratio"}))
def test_the_gradient_equals_finite_differences(name: str) -> None:
    """For losses without a stop-gradient. The ratio of GSPO has one; its slow formula has the exact derivative."""
    rollouts = drawn(7)
    objective = load_objective(name, {"normalise_constant": CONSTANT})

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        tokens = as_columns(rollouts, logprobs=logprobs)
        return objective.value(tokens, BatchTotals(len(logprobs), len(rollouts)), Tally())

    assert torch.autograd.gradcheck(value, as_columns(rollouts).logprobs, eps=1e-7)


def test_gspo_has_the_derivative_of_the_sequence_ratio() -> None:
    """The token form of the paper's section 4.3 equals the plain form, in which every token moves the whole ratio."""
    rollouts = drawn(3, lengths=(4, 7))
    clips = {"clip_low": 0.9, "clip_high": 9.0}
    objective = load_objective("gspo", clips)
    tokens = as_columns(rollouts)
    torch.autograd.backward(objective.value(tokens, BatchTotals(11, 2), Tally()))
    assert tokens.logprobs.grad is not None

    def plain(shift: float, changed: int) -> float:
        total, number = 0.0, 0
        for rollout in rollouts:
            drift = 0.0
            for token in rollout.tokens:
                drift += token.logprob - token.inference + (shift if number == changed else 0.0)
                number += 1
            ratio = math.exp(drift / len(rollout.tokens))
            total -= rollout.weight * ratio * rollout.tokens[0].advantage
        return total / 2

    for changed in range(11):
        slope = (plain(1e-6, changed) - plain(-1e-6, changed)) / 2e-6
        assert tokens.logprobs.grad[changed].item() == pytest.approx(slope, rel=1e-6, abs=1e-9)


def test_a_loss_of_no_tokens_is_zero() -> None:
    """A forward pass whose rollouts have all tokens masked changes nothing."""
    for name in BUILT_IN:
        tokens = as_columns(drawn(0, lengths=(0, 0)))
        value = load_objective(name, {"normalise_constant": 1}).value(tokens, BatchTotals(10, 4), Tally())
        assert value.item() == 0.0, name
