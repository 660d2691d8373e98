"""Tensors in chunks of bytes, as vLLM packs them for a weight transfer: sender and receiver compute the same chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def chunk_ends(sizes: Sequence[int], buffer_bytes: int) -> Iterator[slice]:
    """Yield the tensors of each chunk, by their sizes in bytes.

    As in vLLM, a chunk ends with the tensor that makes it larger than `buffer_bytes`.
    """
    start, total = 0, 0
    for end, size in enumerate(sizes, 1):
        total += size
        if total > buffer_bytes or end == len(sizes):
            yield slice(start, end)
            start, total = end, 0


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8 [bytes]; a view where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def from_bytes(values: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of some bytes, uint8 [bytes]."""
    # A chunk gives tensors at any offset, and torch wants each aligned to its type.
    return values.clone().view(dtype).view(tuple(shape))
