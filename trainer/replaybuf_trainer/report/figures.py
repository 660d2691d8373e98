"""The figures of a step that batch and stopwatch give; the loss adds its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from replaybuf_trainer.losses import Row
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.reading import TensorBatch
from replaybuf_trainer.report.stopwatch import Phase

TRAIN_PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")


def step_figures(batch: TensorBatch, rows: Sequence[Row], seconds: dict[Phase, float], ranks: Ranks) -> dict[str, Any]:
    """Return the figures of a step over all ranks; `rows` of this rank, `seconds` by phase.

    `samples_per_s`: rollouts; `version` and `staleness` in policy versions. Rates are over the whole step, with waits.
    """
    rewards, staleness = (
        ranks.gather(torch.cat([row[name] for row in rows])).double() for name in ("rewards", "staleness")
    )
    step_s = sum(seconds.values())
    return {
        "time": time.time(),
        "step": batch.meta.step,
        "version": batch.meta.version,
        "reward_mean": float(rewards.mean()),
        "tokens": batch.meta.batch_tokens,
        "rollouts": len(rewards),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": int(staleness.max()),
        "tokens_per_s": batch.meta.batch_tokens / step_s,
        "samples_per_s": len(rewards) / step_s,
        "step_s": step_s,
        "wait_s": seconds.get("wait", 0.0),
        "train_s": sum(seconds.get(phase, 0.0) for phase in TRAIN_PHASES),
        "publish_s": seconds.get("weights", 0.0) + seconds.get("publish", 0.0),
        "phase_s": seconds,
    }
