"""Correction, penalties, weights and mean of the objective, and the errors for wrong options."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
import torch

from replaybuf.errors import Invalid
from replaybuf.plugins import entry_points as plugins
from replaybuf_trainer.losses import (
    BatchTotals,
    LossTokens,
    Objective,
    PolicyLoss,
    PolicyTerm,
    Tally,
    load_objective,
    weighted_score,
)
from tests.trainer.losses.slow import SLOW, as_columns, correction_weights, drawn, factor, reference


class Reinforce(PolicyLoss, frozen=True, kw_only=True):
    """A plug-in: -scale A log pi."""

    scale: float = 1.0

    def term(self, tokens: LossTokens) -> PolicyTerm:
        ones = torch.ones_like(tokens.logprobs)
        return weighted_score(tokens.logprobs, self.scale * ones, tokens.advantages, 0.0, 10.0)


def made(name: str, **options: Any) -> Objective:
    return load_objective(name, options | {"normalise_constant": 12})


def value_and_gradient(objective: Objective, tokens: LossTokens, totals: BatchTotals) -> tuple[float, list[float]]:
    value = objective.value(tokens, totals, Tally())
    torch.autograd.backward(value)
    assert tokens.logprobs.grad is not None
    return value.item(), tokens.logprobs.grad.tolist()


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
@pytest.mark.parametrize("estimate", ["k1", "k2", "k3"])
@pytest.mark.parametrize("mode", ["truncate", "mask", "reject"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_all_parts_together_equal_a_formula_written_apart(level: str, mode: str, estimate: str, normalise: Any) -> None:
    """Correction with both bounds and veto, penalty to the reference, sampling weights and each mean."""
    rollouts = drawn(5)
    bounds = {"lower": 0.7, "upper": 1.3, "veto": 0.55}
    options = {
        "ratio_to": "old",
        "correction": {"level": level, "mode": mode, **bounds},
        "reference": {"weight": 0.3, "estimate": estimate},
        "normalise_constant": 12,
    }
    objective = load_objective("grpo", options, normalise)
    tokens = as_columns(rollouts)
    totals = BatchTotals(len(tokens.rollout), len(rollouts))
    value, gradient = value_and_gradient(objective, tokens, totals)
    weights = correction_weights(rollouts, level, mode, **bounds)
    assert 0.0 in [weight for row in weights for weight in row]
    expected, slopes = 0.0, []
    for rollout, terms, row in zip(rollouts, SLOW["grpo"](rollouts, ratio_to="old"), weights, strict=True):
        for token, (term, derivative), weight in zip(rollout.tokens, terms, row, strict=True):
            scale = rollout.weight * factor(rollouts, rollout, normalise, 12, 0)
            penalty, slope = reference(token, estimate, 0.3) if weight else (0.0, 0.0)
            expected += scale * (weight * term + penalty)
            slopes.append(scale * (weight * derivative + slope))
    assert value == pytest.approx(expected, rel=1e-12)
    assert gradient == pytest.approx(slopes, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_an_entropy_bonus_pulls_only_the_tokens_with_the_highest_entropy(share: float) -> None:
    rollouts = drawn(6)
    tokens = as_columns(rollouts)
    totals = BatchTotals(len(tokens.rollout), len(rollouts))
    value, _ = value_and_gradient(made("grpo", entropy={"weight": 0.5, "share": share}), tokens, totals)
    plain, _ = value_and_gradient(made("grpo"), as_columns(rollouts), totals)
    every = [(token.entropy, rollout.weight) for rollout in rollouts for token in rollout.tokens]
    count = -(-share * len(every) // 1)
    chosen = sorted(every, reverse=True)[: int(count)]
    bonus = sum(0.5 * entropy * weight / len(every) for entropy, weight in chosen)
    assert value == pytest.approx(plain - bonus, rel=1e-12)
    gradient = tokens.entropies.grad
    assert gradient is not None and int((gradient != 0).sum()) == len(chosen)


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    """So the number of rollouts of one forward pass changes nothing, for losses that select no tokens."""
    rollouts = drawn(8)
    for name in ("cispo", "decoupled-ppo", "dr-grpo", "grpo", "gspo", "truncated-ratio"):
        objective = made(name, correction={"level": "sequence", "mode": "reject"}, reference={"weight": 0.1})
        totals = BatchTotals(sum(len(rollout.tokens) for rollout in rollouts), len(rollouts))
        whole = objective.value(as_columns(rollouts), totals, Tally())
        parts = [objective.value(as_columns([rollout]), totals, Tally()) for rollout in rollouts]
        assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-12), name


def test_without_old_logprobs_the_policy_takes_their_place_in_the_mismatch() -> None:
    rollouts = drawn(2)
    objective = made("grpo", correction={"mode": "reject", "lower": 0.8, "upper": 1.2})
    tally = Tally()
    tokens = as_columns(rollouts, old_logprobs=None)
    objective.value(tokens, BatchTotals(len(tokens.rollout), len(rollouts)), tally)
    ratio = (tokens.logprobs.detach() - tokens.inference_logprobs).exp()
    kept = ((ratio >= 0.8) & (ratio <= 1.2)).double() * tokens.sampling_weights[tokens.rollout]
    assert tally.figures()["weight_mean"] == pytest.approx(float(kept.mean()))


# ---------------------------------------------------------------------- statistics


def test_statistics_are_means_over_tokens_by_staleness() -> None:
    """Rollouts of staleness 8 and more share a line; lines without tokens are absent."""
    rollouts = drawn(4, lengths=(5, 2, 9, 0, 3))
    staleness = torch.tensor([0, 8, 0, 3, 40], dtype=torch.int32)
    tally = Tally()
    tokens = as_columns(rollouts, staleness=staleness)
    objective = made("grpo")
    for _ in range(2):
        objective.value(tokens, BatchTotals(19, 5), tally)
    figures = tally.staleness_figures()
    assert {name: figure["loss_tokens"] for name, figure in figures.items()} == {"0": 28, "8+": 10}
    fresh = [token for number in (0, 2) for token in rollouts[number].tokens]
    drift = torch.tensor([token.logprob - token.inference for token in fresh], dtype=torch.float64)
    mismatch = torch.tensor([abs(token.old - token.inference) for token in fresh], dtype=torch.float64)
    weights = torch.tensor([rollouts[number].weight for number in (0, 2) for _ in rollouts[number].tokens])
    assert figures["0"] == pytest.approx(
        {
            "loss_tokens": 28,
            "ratio_mean": float(drift.exp().mean()),
            "clip_fraction": figures["0"]["clip_fraction"],
            "kl": float((drift.exp() - 1 - drift).mean()),
            "ref_kl": figures["0"]["ref_kl"],
            "entropy": sum(token.entropy for token in fresh) / len(fresh),
            "mismatch": float(mismatch.mean()),
            "weight_mean": float(weights.mean()),
            "effective_share": float(weights.sum() ** 2 / weights.square().sum() / len(fresh)),
        },
        rel=1e-6,
    )
    assert 0 < figures["0"]["clip_fraction"] < 1 and figures["0"]["ref_kl"] > 0
    assert tally.figures()["loss_tokens"] == tally.tokens == 38


# ---------------------------------------------------------------------- wrong options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {}, r"loss is 'ppo'; installed: .*cispo, clip-cov, .*truncated-ratio"),
        ("grpo", {"clip": 0.2}, r"unknown field `clip`; .*the keys ratio_to, clip_low, clip_high, .*correction"),
        ("grpo", {"clip_low": 1.5}, r"<= 1.*\$\.clip_low"),
        ("gspo", {"correction": {"level": "row"}}, r"Invalid enum value 'row'.*\$\.correction\.level"),
        ("grpo", {"reference": {"estimate": "k1"}}, "missing required field `weight`"),
        ("grpo", {"correction": {"mode": "truncate"}}, "already weights tokens by the mismatch"),
        ("decoupled-ppo", {"correction": {"mode": "mask"}}, "already weights tokens by the mismatch"),
        ("dr-grpo", {}, "normalise_constant in --loss-options"),
        ("dr-grpo", {"normalise_constant": 0}, r">= 1.*\$\.normalise_constant"),
    ],
)
def test_wrong_options_are_rejected_with_a_clear_error(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        load_objective(name, options)


@pytest.mark.parametrize(
    ("name", "options", "column"),
    [
        ("grpo", {"reference": {"weight": 0.1}}, "ref_logprobs"),
        ("gspo", {"ratio_to": "old"}, "old_logprobs"),
        ("decoupled-ppo", {}, "old_logprobs"),
    ],
)
def test_a_missing_column_is_named(name: str, options: dict[str, Any], column: str) -> None:
    objective = made(name, **options)
    assert objective.columns == {column}
    objective.check_columns([{column: torch.zeros(1)}])
    with pytest.raises(Invalid, match=f"the batch has no {column}, which the loss needs"):
        objective.check_columns([{column: torch.zeros(1)}, {}])
    with pytest.raises(Invalid, match=f"the batch has no {column}"):
        objective.value(as_columns(drawn(0), **{column: None}), BatchTotals(1, 1), Tally())


# ---------------------------------------------------------------------- plug-ins


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plug-ins, one of which is not a loss."""
    plug_ins = EntryPoints(
        [
            EntryPoint("reinforce", f"{__name__}:Reinforce", plugins.LOSSES),
            EntryPoint("broken", f"{__name__}:made", plugins.LOSSES),
        ]
    )
    cached = plugins.installed

    def entry_points(group: str) -> EntryPoints:
        return plug_ins if group == plugins.LOSSES else cached(group)

    entry_points.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(plugins, "installed", entry_points)


@pytest.mark.usefixtures("installed")
def test_a_plug_in_is_a_loss_with_its_own_options_and_all_shared_parts() -> None:
    objective = made("reinforce", scale=3.0, correction={"mode": "reject"}, reference={"weight": 0.0})
    rollouts = drawn(1)
    tokens = as_columns(rollouts)
    _, gradient = value_and_gradient(objective, tokens, BatchTotals(len(tokens.rollout), len(rollouts)))
    assert isinstance(objective.loss, Reinforce) and any(gradient)


@pytest.mark.usefixtures("installed")
def test_a_plug_in_of_another_kind_is_rejected() -> None:
    with pytest.raises(Invalid, match=r"loss plug-in 'broken' is .*must be a class that inherits"):
        made("broken")
    with pytest.raises(Invalid, match=r"broken, .*reinforce"):
        made("unknown")
