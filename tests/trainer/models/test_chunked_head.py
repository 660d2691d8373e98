"""Logprobs and entropies by chunks equal those of all logits at once, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replaybuf_trainer.models.chunked_head import target_logprobs
from replaybuf_trainer.models.output_head import OutputHead

K, HIDDEN, VOCABULARY = 13, 6, 17


def inputs(kind: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(K, HIDDEN, generator=generator, dtype=torch.float64).to(kind).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(kind).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (K,), generator=generator)


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    every = torch.log_softmax((hidden @ weight.T).float() if hidden.dtype != torch.float64 else hidden @ weight.T, -1)
    return every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("at_once", [1, 4, K, 100])
@pytest.mark.parametrize("used", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)], ids=["logprobs", "entropies", "both"])
def test_values_and_gradients_equal_those_of_all_logits(at_once: int, used: tuple[float, float]) -> None:
    """For chunks of one token to more than all, with either result used and with both."""
    hidden, weight, targets = inputs()
    scale = torch.linspace(-1, 1, K, dtype=torch.float64)
    results = []
    for compute in (plain, lambda h, w, t: target_logprobs(h, OutputHead(w), t, at_once * VOCABULARY * 8)):
        logprobs, entropies = compute(hidden, weight, targets)
        parts = [
            factor * (scale * column).sum()
            for factor, column in zip(used, (logprobs, entropies), strict=True)
            if factor
        ]
        results.append((logprobs, entropies, *torch.autograd.grad(torch.stack(parts).sum(), [hidden, weight])))
    for expected, computed in zip(*results, strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-14)


def test_the_gradient_equals_finite_differences() -> None:
    hidden, weight, targets = inputs()
    assert torch.autograd.gradcheck(
        lambda h, w: target_logprobs(h, OutputHead(w), targets, 3 * VOCABULARY * 8), (hidden, weight)
    )


def test_bfloat16_gives_float32_results_and_sums_gradients_in_float32() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    logprobs, entropies = target_logprobs(hidden, OutputHead(weight), targets, 1)
    assert logprobs.dtype == entropies.dtype == torch.float32
    expected = plain(hidden, weight, targets)[0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)
    gradients = torch.autograd.grad(logprobs.sum(), [hidden, weight])
    for gradient, other in zip(gradients, torch.autograd.grad(expected.sum(), [hidden, weight]), strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient, other, rtol=0.05, atol=0.05)


def test_frozen_weights_get_no_gradient() -> None:
    """As with LoRA on the layers before the head."""
    hidden, weight, targets = inputs()
    logprobs, _ = target_logprobs(hidden, OutputHead(weight.detach()), targets)
    torch.autograd.backward(logprobs.sum())
    assert hidden.grad is not None and weight.grad is None


def test_no_tokens_are_accepted() -> None:
    hidden, weight, targets = inputs()
    logprobs, entropies = target_logprobs(hidden[:0], OutputHead(weight), targets[:0])
    assert logprobs.shape == entropies.shape == (0,)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the most bytes of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.nbytes)
        return made


def test_no_tensor_is_as_large_as_all_logits() -> None:
    """Every operation, forward and backward, returns at most one chunk or one gradient of the inputs."""
    tokens, vocabulary = 512, 256
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocabulary, HIDDEN, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    chunk_bytes = 32 * vocabulary * 4
    sizes = []
    for compute in (plain, lambda h, w, t: target_logprobs(h, OutputHead(w), t, chunk_bytes)):
        with LargestTensor() as largest:
            logprobs, entropies = compute(hidden, weight, targets)
            torch.autograd.backward((logprobs + entropies).sum())
        sizes.append(largest.bytes)
    assert sizes == [tokens * vocabulary * 4, chunk_bytes]
