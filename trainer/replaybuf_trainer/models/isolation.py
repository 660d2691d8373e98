"""Start-up test of a model: packed rows must compute what single rollouts compute.

Some architectures of transformers ignore restarting positions (OPT, Bloom), carry a state over them (Mamba, Falcon-H1),
attend to later tokens (BERT), or change their logits behind the last layer in a way that `output_head` does not know.
Trained on packed rows, each of them would learn something else without any warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from replaybuf.errors import Invalid
from replaybuf_trainer.models.output_head import OutputHead, output_head
from replaybuf_trainer.models.packed_forward import predicting_states

_LENGTHS = (11, 7, 5)
"""Tokens of the test's rollouts: the first two are in one row, the third has a shorter row of its own."""
_KEPT = 6
"""Tokens at the start of the first rollout that stay the same."""
_LARGEST_LOGIT = 50.0
"""Logits are scaled up to this size for the comparison: random weights have small ones, which a cap hardly changes."""
_BOUNDS = (1e-5, 1e-3)
_COARSE_BOUNDS = (1e-2, 0.1)
"""Maximum differences of states and of logits, relative to the largest value, in float32 and in smaller types.

The states that are compared come from equal shapes and kernels: a model that isolates rollouts has a difference of 0.
"""


def check_isolation(model: Any, what: str, way_out: str, name: str = "model") -> None:
    """Raise `Invalid` if rollouts of a packed row influence each other, or if `output_head` computes other logits.

    `what` and `way_out` start and end the message. Call it under autocast if the model is used under autocast.
    """
    head = output_head(model)
    device = head.weight.device
    half = torch.is_autocast_enabled(device.type) or head.weight.dtype not in (torch.float32, torch.float64)
    state_bound, logit_bound = _COARSE_BOUNDS if half else _BOUNDS
    rollouts = [(torch.arange(n, device=device) * 7919 + n) % len(head.weight) for n in _LENGTHS]
    states = _packed_states(model, rollouts)
    mixing = _mixing(model, len(head.weight), rollouts, states)
    _check(mixing, state_bound, f"{what} mixes the rollouts of packed rows", way_out, name)
    difference = _logit_difference(model, head, rollouts, states)
    detail = f"{what} computes other logits for single rollouts than its output layer for packed rows"
    _check(difference, logit_bound, detail, way_out, name)


def _mixing(model: Any, vocabulary: int, rollouts: Sequence[torch.Tensor], states: torch.Tensor) -> float:
    """Change the end of the first rollout and all of the third; return how much the states of other tokens change."""
    changed = [(ids + 1) % vocabulary for ids in rollouts]
    changed[0] = torch.cat([rollouts[0][:_KEPT], changed[0][_KEPT:]])
    changed[1] = rollouts[1]
    later = _packed_states(model, changed)
    second = slice(_LENGTHS[0] - 1, _LENGTHS[0] + _LENGTHS[1] - 2)
    kept = [torch.cat([each[: _KEPT - 1], each[second]]) for each in (states, later)]
    return _relative_difference(*kept)


def _logit_difference(model: Any, head: OutputHead, rollouts: Sequence[torch.Tensor], states: torch.Tensor) -> float:
    """Compare the logits of packed states with the model's own logits of each rollout."""
    plain = torch.nn.functional.linear(states.to(head.weight.dtype), head.weight, head.bias).detach()
    factor = _LARGEST_LOGIT / max(float(plain.abs().max()), 1e-6)
    layer = model.get_output_embeddings()
    hook = layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factor, *inputs[1:]))
    try:
        alone = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0, :-1].detach() for ids in rollouts])
    finally:
        hook.remove()
    return _relative_difference(alone, head.logits((states * factor).to(head.weight.dtype)).detach())


def _packed_states(model: Any, rollouts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the states [sum of L-1, H] of all tokens but the last of each rollout."""
    positions = [torch.arange(len(ids), device=ids.device) for ids in rollouts]
    rows = [
        ([torch.cat(list(each[:2])), each[2]]) for each in (rollouts, positions, [places > 0 for places in positions])
    ]
    return predicting_states(model, *rows).detach()


def _relative_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first.float() - second.float()).abs().max() / first.float().abs().max().clamp(min=1e-12))


def _check(difference: float, bound: float, detail: str, way_out: str, name: str) -> None:
    if not difference <= bound:  # NaN too
        detail = f"{detail}: they differ by {difference:.3g} of the largest value; the maximum is {bound}. {way_out}"
        raise Invalid(detail, name=name, value=difference, bound=bound)
