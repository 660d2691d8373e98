"""Model FLOPs utilisation (MFU): operations that a step needs, as a share of what its device can do.

MFU (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B) counts the operations of the model, not those that
activation checkpointing repeats.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from replaybuf.wire.batch import MicroBatch
from replaybuf.wire.config import Cost

PEAKS = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("MI300X", 1307e12),
    ("MI325X", 1307e12),
)
"""Dense bfloat16 and float16 operations per second, by a part of the device name; the first match counts.

Source: data sheets of NVIDIA and AMD, of one GPU, without sparsity.
"""
_HALF = (torch.bfloat16, torch.float16)
_PASSES = 3
"""Forward once; backward needs twice as many operations."""
_REPEATS = 5
_MATRIX = {"cpu": 512, "cuda": 8192}
"""Rows of the measured matrices: 5 ms on one CPU core, large enough to fill a GPU."""


class Peak(NamedTuple):
    """Operations per second of a device, and where the number is from."""

    flops_per_s: float
    source: Literal["datasheet", "measured"]


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak from the table, or that of the fastest of some matrix products of this type."""
    if device.type == "cuda" and dtype in _HALF:
        name = torch.cuda.get_device_name(device)
        for part, flops_per_s in PEAKS:
            if part in name:
                return Peak(flops_per_s, "datasheet")
    return Peak(measured_flops_per_s(device, dtype), "measured")


def measured_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of the fastest of some square matrix products."""
    size = _MATRIX.get(device.type, _MATRIX["cpu"])
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    best_s = float("inf")
    for _ in range(_REPEATS + 1):  # the first one loads kernels and starts threads
        started = time.perf_counter()
        product = matrix @ matrix
        float(product[0, 0])  # waits for the device
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * size**3 / best_s


def training_flops(rows: Sequence[MicroBatch], cost: Cost) -> float:
    """Return the operations of forward and backward passes over all rollouts of some packed rows."""
    lengths = [np.diff(row.cu_seqlens[: len(row.rewards) + 1]).astype(np.float64) for row in rows]
    return _PASSES * sum(float((cost.linear * each + cost.quadratic * each**2).sum()) for each in lengths)
