"""The figures of each step: one line for the log, one JSON line for the metrics file."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from replaybuf_trainer.losses import Row
from replaybuf_trainer.reading import TensorBatch
from replaybuf_trainer.report.stopwatch import Phase, shares

logger = logging.getLogger(__name__)


def step_figures(batch: TensorBatch, rows: Sequence[Row], seconds: dict[Phase, float]) -> dict[str, Any]:
    """Return the figures of a step that batch and stopwatch give; `seconds` by phase."""
    rewards = torch.cat([row["rewards"] for row in rows]).double()
    staleness = torch.cat([row["staleness"] for row in rows]).double()
    step_s = sum(seconds.values())
    return {
        "time": time.time(),
        "step": batch.meta.step,
        "version": batch.meta.version,
        "reward_mean": float(rewards.mean()),
        "tokens": batch.meta.tokens,
        "staleness_mean": float(staleness.mean()),
        "staleness_max": int(staleness.max()),
        "tokens_per_s": batch.meta.tokens / step_s,
        "step_s": step_s,
        "wait_s": seconds.get("wait", 0.0),
        "train_s": sum(seconds.get(phase, 0.0) for phase in ("forward", "backward", "optimizer")),
        "publish_s": seconds.get("weights", 0.0) + seconds.get("publish", 0.0),
        "phase_s": seconds,
    }


class StepLog:
    """Log and metrics file of a training."""

    def __init__(self, metrics_file: Path | None) -> None:
        self._metrics_file = metrics_file

    def write(self, figures: dict[str, Any]) -> None:
        """Log a step and append its figures to the metrics file."""
        shown = "step=%(step)d reward=%(reward_mean).3f loss=%(loss).4f staleness=%(staleness_max)d took=%(step_s).2fs"
        logger.info(shown % figures + " (%s)", shares(figures["phase_s"]))
        if self._metrics_file:
            with self._metrics_file.open("ab") as file:
                file.write(msgspec.json.encode(figures) + b"\n")
