"""Logprobs and entropies of target tokens without the logits [k, V] of all tokens at once.

The logits of k tokens over a vocabulary V are the largest tensor of a step: 8,192 x 150,000 float32 are 4.9 GB, and
log-softmax and its gradient need several copies. Here forward and backward compute the logits of one chunk of tokens at
a time, and backward computes them again. Peak memory beside inputs and their gradients is about four chunks and one
more [V, H], for any k; the price is one more matrix product. Measured for k = 4,096, V = 32,768, H = 256 in float32,
with chunks of 32 MiB: 179 MiB, where all logits at once took 1,548 MiB. The idea is that of Liger Kernel (Hsu et al.
2024, arXiv:2410.10989), which computes the gradient in the forward pass; that needs the gradient of the loss there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from replaybuf_trainer.models.output_head import OutputHead

CHUNK_BYTES = 256 * 2**20
"""Bytes of the logits of one chunk, in the type in which they are computed."""


def target_logprobs(
    hidden: torch.Tensor, head: OutputHead, targets: torch.Tensor, chunk_bytes: int = CHUNK_BYTES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs of the targets and the entropies of their distributions, both [k], in nats.

    `hidden` [k, H], `targets` int64 [k]. Results are float32, or float64 for float64 inputs. Both have gradients.
    Under autocast the logits are computed in the type of the head's weight all the same: logits rounded to bfloat16
    change logprobs by up to 0.1, and ratios with them (MiniMax-M1, arXiv:2506.13585, section 3.2).
    """
    kind = torch.promote_types(head.weight.dtype, torch.float32)
    at_once = max(1, chunk_bytes // (head.weight.shape[0] * kind.itemsize))
    with torch.autocast(hidden.device.type, enabled=False):
        outputs: tuple[torch.Tensor, torch.Tensor] = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden.to(head.weight.dtype), head.weight, head.bias, targets, head.scale, head.softcap, at_once
        )
    return outputs


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: float,
        softcap: float | None,
        at_once: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = OutputHead(weight, bias, scale, softcap)
        kind = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropies = (torch.empty(len(targets), dtype=kind, device=hidden.device) for _ in range(2))
        for part in _chunks(len(targets), at_once):
            every = _log_softmax(head.logits(hidden[part]))  # [c, V]
            logprobs[part] = every.gather(1, targets[part, None]).squeeze(1)
            entropies[part] = _entropies(every)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies)
        ctx.scale, ctx.softcap, ctx.at_once = scale, softcap, at_once
        ctx.set_materialize_grads(False)  # without an entropy term, its gradient costs nothing
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: torch.Tensor | None, of_entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, entropies = ctx.saved_tensors
        head = OutputHead(weight, bias, ctx.scale, ctx.softcap)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.zeros_like(hidden) if needs_hidden else None
        # float32 sums of bfloat16 weights: thousands of chunks may add up
        kind = torch.promote_types(weight.dtype, torch.float32)
        weight_grad = torch.zeros_like(weight, dtype=kind) if needs_weight else None
        bias_grad = torch.zeros_like(bias, dtype=kind) if needs_bias else None
        for part in _chunks(len(targets), ctx.at_once):
            logits = head.logits(hidden[part])  # [c, V]
            grad = _logit_grad(
                _log_softmax(logits),
                targets[part],
                None if of_logprobs is None else of_logprobs[part],
                None if of_entropies is None else of_entropies[part],
                entropies[part],
            )
            grad = head.layer_grad(grad, logits).to(weight.dtype)
            if hidden_grad is not None:
                hidden_grad[part] = (grad @ weight).to(hidden.dtype)
            if weight_grad is not None:
                weight_grad += grad.T @ hidden[part]
            if bias_grad is not None:
                bias_grad += grad.sum(0)
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            *(None,) * 4,
        )


def _chunks(tokens: int, at_once: int) -> Iterator[slice]:
    return (slice(start, start + at_once) for start in range(0, tokens, at_once))


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _entropies(logprobs: torch.Tensor) -> torch.Tensor:
    return -(logprobs.exp().mul_(logprobs)).sum(-1)


def _logit_grad(
    logprobs: torch.Tensor,
    targets: torch.Tensor,
    of_logprobs: torch.Tensor | None,
    of_entropies: torch.Tensor | None,
    entropies: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of the logits, [c, V], from those of logprob and entropy, [c].

    d log p_y / d z_v = [v = y] - p_v;  d H / d z_v = -p_v (log p_v + H).
    """
    factor = torch.zeros_like(logprobs)
    if of_entropies is not None:
        factor = (logprobs + entropies[:, None]).mul_(-of_entropies[:, None])
    if of_logprobs is not None:
        factor -= of_logprobs[:, None]
    grad = factor.mul_(logprobs.exp_())
    if of_logprobs is not None:
        grad.scatter_add_(1, targets[:, None], of_logprobs[:, None].to(grad.dtype))
    return grad
