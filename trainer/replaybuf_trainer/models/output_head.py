"""The output layer of a causal language model: last hidden states to logits.

Some architectures change the logits behind the output layer. Those changes are read from the model's configuration.
`isolation` compares the result with the model's own logits, so an unknown change is an error.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from replaybuf.errors import Invalid


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """Logits = cap(scale · (weight · hidden + bias)), with cap(z) = softcap · tanh(z / softcap).

    `weight` [V, H]; `bias` [V] or None; `softcap` None: no cap (Gemma 2, arXiv:2408.00118, section 2).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [c, V] of hidden states [c, H]."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def layer_grad(self, grad: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the gradient of weight · hidden + bias, [c, V], from that of the logits and the logits."""
        if self.softcap is not None:
            grad = grad * (1 - (logits / self.softcap).square())
        return grad * self.scale if self.scale != 1.0 else grad


def output_head(model: Any) -> OutputHead:
    """Return the output layer of a model. Raises `Invalid` for a model without one."""
    layer = model.get_output_embeddings()
    if layer is None:
        raise Invalid(f"{type(model).__name__} has no output layer that predicts tokens", name="model")
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return OutputHead(layer.weight, getattr(layer, "bias", None), scale, None if softcap is None else float(softcap))
