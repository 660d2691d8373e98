"""The proof of one rollout: toploc's proofs of its completion, one after another.

toploc (Ong et al. 2025, https://arxiv.org/abs/2501.16007) encodes the largest `topk` values of the last hidden states
of `chunk_tokens` tokens as a polynomial, 2 * (topk + 1) bytes. Another model, other tokens or another precision gives
other values; another GPU or batch size gives nearly the same.

A proof covers the hidden states [C, H] that predict the C tokens of the completion, so it depends on the prompt and on
all tokens of the completion but the last. One changed token moves few values of a long chunk, and may pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LARGEST_EXPONENT_MISMATCHES = 0.7
LARGEST_MEAN_ERROR = 10.0
LARGEST_MEDIAN_ERROR = 8.0
"""Bounds of the paper for topk = 128: 38 equal exponents, and the errors of the mantissas where exponents are equal."""


def build_proof(hidden: torch.Tensor, chunk_tokens: int = 32, topk: int = 128) -> bytes:
    """Return the proof of a rollout from its last hidden states [C, H]; `topk` is at most H.

    Row k is that with which the engine chose token k of the completion: position P - 1 + k of prompt and completion.
    Raises `ValueError` for hidden states that toploc cannot prove.
    """
    from toploc import build_proofs_bytes

    if hidden.ndim != 2 or not len(hidden) or hidden.shape[1] < topk or not hidden.isfinite().all():
        raise ValueError(f"hidden states are {list(hidden.shape)}; needed: finite, [C, H] with H >= topk, {topk}")
    return b"".join(build_proofs_bytes(_rows(hidden), chunk_tokens, topk, skip_prefill=True))


def explain_mismatch(proof: bytes, hidden: torch.Tensor, chunk_tokens: int, topk: int) -> str | None:
    """Return where a proof does not fit hidden states [C, H], None if it fits."""
    from toploc import verify_proofs_bytes

    size = proof_bytes(topk)
    chunks = [proof[start : start + size] for start in range(0, len(proof), size)]
    results = verify_proofs_bytes(_rows(hidden), chunks, chunk_tokens, topk, skip_prefill=True)
    for number, result in enumerate(results):
        share = result.exp_mismatches / topk
        if (
            share > LARGEST_EXPONENT_MISMATCHES
            or result.mant_err_mean > LARGEST_MEAN_ERROR
            or result.mant_err_median > LARGEST_MEDIAN_ERROR
        ):
            return (
                f"from token {number * chunk_tokens} on: {share:.0%} of the exponents differ, mantissas by "
                f"{result.mant_err_mean:.4g} on average; at most {LARGEST_EXPONENT_MISMATCHES:.0%} and "
                f"{LARGEST_MEAN_ERROR:g} are normal"
            )
    return None


def explain_malformed(proof: bytes, tokens: int, chunk_tokens: int, topk: int) -> str | None:
    """Return why bytes are no proof of a completion of so many tokens, None if they may be one.

    toploc 0.1.6 ends its process on most of these, and accepts a proof with too few chunks.
    """
    size, chunks = proof_bytes(topk), -(-tokens // chunk_tokens)
    if len(proof) != chunks * size:
        return f"it has {len(proof)} bytes; {tokens} tokens need {chunks} times {size}"
    if any(proof[start : start + 2] == b"\0\0" for start in range(0, len(proof), size)):
        return "a chunk has the modulus 0"
    return None


def proof_bytes(topk: int) -> int:
    """Return the bytes of one chunk: a modulus and `topk` coefficients."""
    return 2 * (topk + 1)


def _rows(hidden: torch.Tensor) -> torch.Tensor:
    """Return hidden states as toploc takes them: bfloat16 on the CPU."""
    import torch

    return hidden.detach().to("cpu", torch.bfloat16).contiguous()
