"""Peak memory of a training process: of its GPU, or resident on the CPU."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak since the last call of what torch allocated on a GPU.

    On a CPU: the peak resident memory of this process since its start.
    """
    if device.type == "cuda":
        peak = int(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    if _STATUS.is_file():  # getrusage of Linux also counts the program that started this one
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
