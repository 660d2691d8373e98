"""LoRA adapters in training: gradients, own steps, merged weights and PEFT folders."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from replaybuf.errors import Invalid
from replaybuf_trainer.engine.lora import adapted, read_lora
from replaybuf_trainer.losses import BatchTotals, Tally, load_objective
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.models.lora import AdapterWeights, LoraOptions, LoraPolicy
from tests.trainer.adapter_folders import merged
from tests.trainer.batches import logprobs_alone, packed, rollouts, trained_rows

RATE, CLIP = 1e-2, 1.0
NAMES = ("code", "type.v1")
"""The second one is a method of a module, and no module may have its name, with a dot."""


def policy(models: Path, *, targets: tuple[str, ...] = (), rank: int = 4, seed: int = 0) -> LoraPolicy:
    options = LoraOptions(rank=rank, alpha=8.0, targets=targets, learning_rate=RATE, seed=seed)
    return LoraPolicy(load_model(models / "a"), options, models / "a")


def loss(made: LoraPolicy, rows: Any, adapter: str, totals: BatchTotals) -> torch.Tensor:
    return load_objective("grpo").value(made.forward(rows, adapter), totals, Tally())


def strengthen(made: LoraPolicy, name: str) -> None:
    """Draw B at random: with zeros, A has no gradient and no adapter changes a logprob."""
    random = torch.Generator().manual_seed(len(name))
    weights = made.add(name).tensors()
    made.load(name, {key: torch.randn(tensor.shape, generator=random) * 0.2 for key, tensor in weights.items()})


def gradients(made: LoraPolicy, name: str) -> dict[str, torch.Tensor]:
    gradients_by_key = {}
    for key, parameter in made.adapters[name].parameters.items():
        assert parameter.grad is not None, key
        gradients_by_key[key] = parameter.grad.clone()
    return gradients_by_key


def test_gradients_on_packed_rows_equal_those_of_single_rollouts(models: Path) -> None:
    """And only the adapter of the rows gets any."""
    members = rollouts(5, seed=3)
    totals = BatchTotals(sum(sum(member.completion_mask) for member in members), len(members))
    grads = []
    for rows in ([[0, 3], [1, 2, 4]], [[number] for number in range(5)]):
        made = policy(models)
        for name in NAMES:
            strengthen(made, name)
        for row in trained_rows(packed(members, rows)):
            torch.autograd.backward(loss(made, [row], NAMES[1], totals))
        grads.append(gradients(made, NAMES[1]))
        frozen = [made.adapters[NAMES[0]].parameters.values(), load_model(models / "a").parameters()]
        assert all(parameter.grad is None for parameter in itertools.chain(*frozen))
        assert all(parameter.grad is None for name, parameter in made.model.named_parameters() if ".lora_" not in name)
    packed_grads, single_grads = grads
    for key, expected in single_grads.items():
        assert torch.allclose(packed_grads[key], expected, atol=1e-5, rtol=1e-4), key


def test_adapters_start_as_the_base_model_and_their_start_depends_on_seed_and_name_alone(models: Path) -> None:
    first, second = policy(models), policy(models)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for name in NAMES:
        first.add(name)
    for name in reversed(NAMES):
        second.add(name)
    assert torch.equal(before, torch.get_rng_state())
    for name in NAMES:
        weights = first.adapters[name].tensors()
        assert all(torch.equal(tensor, second.adapters[name].tensors()[key]) for key, tensor in weights.items())
        assert all(torch.equal(tensor, first.initial_weights(name)[key]) for key, tensor in weights.items())
        assert all(bool(tensor.any()) == ("lora_A" in key) for key, tensor in weights.items())
    drawn = [policy(models, seed=1).initial_weights("code"), *(first.initial_weights(name) for name in NAMES)]
    key = next(iter(drawn[0]))
    assert len({float(weights[key][0, 0]) for weights in drawn}) == 3


def test_an_own_step_divides_the_gradients_of_several_batches_by_their_tokens(models: Path) -> None:
    """As one batch with all of their rows would; the adapter that completes no step keeps its gradients."""
    members = rollouts(4, seed=1)
    tokens = sum(sum(member.completion_mask) for member in members)
    rows = trained_rows(packed(members, [[0, 1], [2, 3]]))
    split, whole = policy(models), policy(models)
    for row in rows:
        torch.autograd.backward(loss(split, [row], "code", BatchTotals(1, 1)))
    torch.autograd.backward(loss(split, rows[:1], "math", BatchTotals(1, 1)))
    torch.autograd.backward(loss(whole, rows, "code", BatchTotals(tokens, 4)))
    kept = gradients(split, "math")
    code = split.adapters["code"]
    assert (code.loss_tokens, code.rollouts) == (tokens, 4)
    expected = gradients(whole, "code")
    for key, summed in gradients(split, "code").items():
        # Gradients, not weights after the step: Adam's first step is the sign of a gradient, also of a rounding error.
        torch.testing.assert_close(summed / tokens, expected[key], rtol=0, atol=1e-5 * float(expected[key].norm()))
    norms = [model.adapters["code"].step(RATE, CLIP, div) for model, div in ((split, tokens), (whole, 1))]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert (code.steps, code.loss_tokens, code.rollouts) == (1, 0, 0)
    assert any(not torch.equal(tensor, split.initial_weights("code")[key]) for key, tensor in code.tensors().items())
    assert all(torch.equal(gradient, kept[key]) for key, gradient in gradients(split, "math").items())
    assert split.adapters["math"].steps == 0


def test_a_gradient_that_is_not_finite_changes_no_weight(models: Path) -> None:
    made = policy(models)
    strengthen(made, "code")
    before = {key: tensor.clone() for key, tensor in made.adapters["code"].tensors().items()}
    for parameter in made.adapters["code"].parameters.values():
        parameter.grad = torch.full_like(parameter, math.nan)
    assert math.isnan(made.adapters["code"].step(RATE, CLIP, 1))
    assert all(torch.equal(tensor, before[key]) for key, tensor in made.adapters["code"].tensors().items())
    assert all(parameter.grad is None for parameter in made.adapters["code"].parameters.values())


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_merged_weights_the_engine_and_peft_give_the_same_logits(
    models: Path, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    """The engine reads the PEFT folder; the slow reference merges it into the model folder."""
    made, rollout = policy(models, targets=targets), rollouts(1, seed=5, longest=20)[0]
    strengthen(made, "")
    with torch.inference_mode():
        expected = logprobs_alone(made.model, rollout)
        AdapterWeights("", made.adapters[""].tensors(), made._config()).save_weights(tmp_path / "adapter")
        made.weights().save_weights(tmp_path / "merged")
        base = load_model(models / "a")
        plain = logprobs_alone(base, rollout)
        with adapted(base, [read_lora(base, tmp_path / "adapter")]):
            in_engine = logprobs_alone(base, rollout)
        computed = [
            in_engine,
            *(
                logprobs_alone(model, rollout)
                for model in (load_model(tmp_path / "merged"), merged(models / "a", tmp_path / "adapter"))
            ),
        ]
    assert all(torch.allclose(logprobs, expected, atol=1e-4) for logprobs in computed)
    assert not torch.allclose(plain, expected, atol=0.1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rank": 65},
            r"--lora-rank is 65; layer model.layers.0.self_attn.k_proj is \(64, 128\), so the maximum is 64",
        ),
        ({"targets": ("q_proj", "nope")}, r"targets of --lora-options has 'nope'; the linear layers .* are down_proj"),
        ({"targets": ("lm_head",)}, "targets of --lora-options has 'lm_head'"),
    ],
)
def test_a_rank_above_a_layer_and_unknown_targets_are_rejected(
    models: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        policy(models, **fields)


def test_weights_of_another_rank_are_rejected(models: Path) -> None:
    made = policy(models)
    made.add("code")
    with pytest.raises(Invalid, match=r"adapter 'code': .* has shape \(2, 384\); the trainer has \(4, 384\)"):
        made.load("code", policy(models, rank=2).initial_weights("code"))
