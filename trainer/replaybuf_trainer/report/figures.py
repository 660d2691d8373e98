"""The figures of a step that batch and stopwatch give; the loss adds its own."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from replaybuf.wire.config import Cost
from replaybuf.wire.contract import MOST_METRICS
from replaybuf.wire.names import LONGEST_METRIC_BYTES
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.reading import TensorBatch
from replaybuf_trainer.report.flops import training_flops
from replaybuf_trainer.report.stopwatch import Phase

TRAIN_PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
_STATUS = Path("/proc/self/status")


def ack_metrics(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the figures of a step that an ack may bring: as many and as long as the service takes.

    A loss of other people may have more of them, or longer names.
    """
    numbers = (
        (name, float(value))
        for name, value in figures.items()
        if isinstance(value, int | float) and len(name.encode()) <= LONGEST_METRIC_BYTES
    )
    return dict(islice(numbers, MOST_METRICS))


def step_figures(
    batch: TensorBatch,
    seconds: dict[Phase, float],
    ranks: Ranks,
    cost: Cost,
    peak_flops_per_s: float,
    device: torch.device,
    epochs: int = 1,
) -> dict[str, Any]:
    """Return the figures of a step over all ranks; `seconds` by phase, `cost` of a forward pass over a rollout.

    `samples_per_s`: rollouts. Rates and `mfu` are over the whole step, with waits; `train_mfu` is over `train_s`. With
    several `epochs` over the batch, tokens and rollouts count once. `padding_share`: padding / (tokens + padding).
    `peak_memory_bytes`: of the rank with the most, see `peak_memory_bytes`.
    """
    rows = batch.micro_batches
    rewards, staleness = (
        ranks.gather(torch.cat([row[name] for row in rows])).double() for name in ("rewards", "staleness")
    )
    own = [training_flops(batch.host.micro_batches, cost), batch.meta.padding, peak_memory_bytes(device)]
    flops, padding, peaks = ranks.gather(torch.tensor(own, dtype=torch.float64)).view(-1, len(own)).T
    step_s = sum(seconds.values())
    train_s = sum(seconds.get(phase, 0.0) for phase in TRAIN_PHASES)
    peak_s = epochs * float(flops.sum()) / (peak_flops_per_s * ranks.size)
    return {
        "time": time.time(),
        "step": batch.meta.step,
        "version": batch.meta.version,
        "reward_mean": float(rewards.mean()),
        "tokens": batch.meta.batch_tokens,
        "padding_share": float(padding.sum()) / (batch.meta.batch_tokens + float(padding.sum())),
        "rollouts": len(rewards),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": int(staleness.max()),
        "tokens_per_s": batch.meta.batch_tokens / step_s,
        "samples_per_s": len(rewards) / step_s,
        "mfu": peak_s / step_s,
        "train_mfu": peak_s / train_s if train_s else 0.0,
        "peak_memory_bytes": int(peaks.max()),
        "step_s": step_s,
        "wait_s": seconds.get("wait", 0.0),
        "train_s": train_s,
        "publish_s": seconds.get("weights", 0.0) + seconds.get("publish", 0.0),
        "phase_s": seconds,
    }


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
