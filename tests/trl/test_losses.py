"""Each loss against that of TRL's `GRPOTrainer._compute_loss` on the same tensors: value, and gradient by logprob.

TRL has no kl-cov and clip-cov, and no loss with a truncated ratio to the engine. It computes the ratios of a mismatch
correction outside of `_compute_loss`; `RATIOS` repeats those lines.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from replaybuf_trainer.losses import BatchTotals, LossTokens, Tally, load_objective
from tests.trainer.losses.slow import SlowRollout, as_columns, drawn

CONSTANT = 12
OLD = {"ratio_to": "old"}
HALF_OPEN = {"clip_low": 0.1, "clip_high": 0.5}

RATIOS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "token_truncate": lambda drift, cap: drift.exp().clamp(max=cap),
    "sequence_truncate": lambda drift, cap: drift.sum(-1, keepdim=True).exp().clamp(max=cap),
    "token_mask": lambda drift, cap: _masked(drift.exp(), cap),
    "sequence_mask": lambda drift, cap: _masked(drift.sum(-1, keepdim=True).exp(), cap),
}
"""`vllm_importance_sampling_ratio` by `vllm_importance_sampling_mode`, from log old - log inference [B, T]."""


def _masked(ratio: torch.Tensor, cap: float) -> torch.Tensor:
    return ratio.masked_fill(ratio > cap, 0.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss of ours with its options, and the same in TRL; `ratio`: mode and cap of TRL's correction."""

    loss: str
    options: dict[str, Any]
    theirs: dict[str, Any]
    normalise: Any = None
    ratio: tuple[str, float] | None = None

    def __str__(self) -> str:
        return f"{self.loss}-{self.normalise}-{self.theirs['loss_type']}-{self.ratio and self.ratio[0]}"


def corrected(level: str, mode: str, trl: str) -> Case:
    correction = {"level": level, "mode": mode, "upper": 1.1}
    return Case("grpo", OLD | {"correction": correction}, {"loss_type": "dapo"}, ratio=(trl, 1.1))


CASES = [
    Case("grpo", OLD, {"loss_type": "dapo"}),
    Case("grpo", OLD, {"loss_type": "bnpo"}),
    Case("grpo", OLD, {"loss_type": "grpo"}, "sequence"),
    Case("grpo", OLD, {"loss_type": "dr_grpo"}, "constant"),
    Case("dr-grpo", OLD, {"loss_type": "dr_grpo"}),
    Case("grpo", OLD | HALF_OPEN, {"loss_type": "dapo", "epsilon_low": 0.1, "epsilon_high": 0.5}),
    Case("grpo", OLD | {"dual_clip": 1.5}, {"loss_type": "dapo", "delta": 1.5}),
    Case("cispo", OLD | {"clip_high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    Case("gspo", OLD | HALF_OPEN, {"loss_type": "grpo", "level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.5}),
    Case("gspo", OLD, {"loss_type": "grpo", "level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    Case("grpo", OLD | {"reference": {"weight": 0.04}}, {"loss_type": "dapo", "beta": 0.04}),
    Case("grpo", OLD | {"entropy": {"weight": 0.01, "share": 1.0}}, {"loss_type": "dapo", "entropy_coef": 0.01}),
    Case("decoupled-ppo", {"bound": 1.2}, {"loss_type": "dapo"}, ratio=("token_truncate", 1.2)),
    corrected("token", "truncate", "token_truncate"),
    corrected("sequence", "truncate", "sequence_truncate"),
    corrected("token", "mask", "token_mask"),
    corrected("sequence", "mask", "sequence_mask"),
]


def padded(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Arrange [k] as [B, T] with zeros behind each rollout, keeping the gradient."""
    parts = torch.split(values, list(lengths))
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def trl_loss(case: Case, tokens: LossTokens, rollouts: Sequence[SlowRollout]) -> torch.Tensor:
    """Return the loss of `GRPOTrainer._compute_loss`; its model returns our logprobs and entropies."""
    lengths, settings = [len(rollout.tokens) for rollout in rollouts], case.theirs
    columns = {
        name: padded(tokens.column(name), lengths)
        for name in ("logprobs", "entropies", "inference_logprobs", "old_logprobs", "ref_logprobs")
    }
    mask = padded(torch.ones_like(tokens.advantages), lengths)
    blank = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": blank,
        "prompt_mask": mask,
        "completion_ids": blank,
        "completion_mask": mask,
        "advantages": torch.stack([part[0] for part in torch.split(tokens.advantages, lengths)]),
        "old_per_token_logps": columns["old_logprobs"],
        "ref_per_token_logps": columns["ref_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    if case.ratio is not None:
        mode, cap = case.ratio
        drift = (columns["old_logprobs"] - columns["inference_logprobs"]) * mask
        inputs["importance_sampling_ratio"] = RATIOS[mode](drift, cap)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (columns["logprobs"], columns["entropies"], None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled="entropy_coef" in settings,
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=False, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=settings.get("delta"), steps_per_generation=1),
        aux_loss_enabled=False,
        beta=settings.get("beta", 0.0),
        current_gradient_accumulation_steps=1,
        entropy_coef=settings.get("entropy_coef", 0.0),
        epsilon_high=settings.get("epsilon_high", 0.2),
        epsilon_low=settings.get("epsilon_low", 0.2),
        importance_sampling_level=settings.get("level", "token"),
        loss_type=settings["loss_type"],
        max_completion_length=CONSTANT,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=case.ratio is not None,
        vllm_importance_sampling_correction=case.ratio is not None,
    )
    loss: torch.Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def leaf(seed: int, dtype: torch.dtype) -> tuple[LossTokens, list[SlowRollout]]:
    """Draw rollouts whose sampling weights are 1; TRL has none."""
    rollouts = [dataclasses.replace(rollout, weight=1.0) for rollout in drawn(seed, lengths=(5, 1, 9, 3))]
    made = as_columns(rollouts)
    columns = {
        field.name: getattr(made, field.name).detach().to(dtype)
        for field in dataclasses.fields(made)
        if field.name not in ("rollout", "staleness")
    }
    for name in ("logprobs", "entropies"):
        columns[name].requires_grad_()
    return dataclasses.replace(made, **columns), rollouts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_and_gradient_equal_those_of_trl(case: Case, dtype: torch.dtype, tolerance: float, seed: int) -> None:
    (mine, rollouts), (theirs, _) = leaf(seed, dtype), leaf(seed, dtype)
    objective = load_objective(case.loss, case.options | {"normalise_constant": CONSTANT}, case.normalise)
    value = objective.value(mine, BatchTotals(len(mine.rollout), len(rollouts)), Tally())
    expected = trl_loss(case, theirs, rollouts)
    torch.autograd.backward(value)
    torch.autograd.backward(expected)
    torch.testing.assert_close(value, expected, rtol=10 * tolerance, atol=tolerance)
    torch.testing.assert_close(mine.logprobs.grad, theirs.logprobs.grad, rtol=10 * tolerance, atol=tolerance)
    assert mine.logprobs.grad is not None and bool(mine.logprobs.grad.any())
