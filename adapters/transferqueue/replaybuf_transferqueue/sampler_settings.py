"""Settings of the sampler, from verl's configuration and the environment, and their check against the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from omegaconf import DictConfig
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from replaybuf.client.peers import check_run_settings, misfit, warn_if_untested
from replaybuf.errors import Invalid
from replaybuf.wire.answer.run_status import RunStatus
from replaybuf_transferqueue.settings import convert

TESTED = ("0.9.1", "0.9.2")
KWARGS = "trainer.v1.sampler.sampler_kwargs"
_MODES = ("colocate_async", "separate_async")


class SamplerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings in `trainer.v1.sampler.sampler_kwargs`.

    - `run`, `url`: the run and its service; None = `$REPLAYBUF_RUN`, `$REPLAYBUF_URL`
    - `keep_checkpoints`: how many of verl's newest checkpoints stay resumable
    - `poll_s`: seconds between two looks at the queue while a step waits
    """

    run: str | None = None
    url: str | None = None
    keep_checkpoints: Annotated[int, Meta(ge=1)] = 1
    poll_s: Annotated[float, Meta(gt=0, le=60)] = 2.0

    @property
    def run_name(self) -> str:
        """The run. Raises `Invalid` if there is none."""
        name = self.run or os.environ.get("REPLAYBUF_RUN")
        if not name:
            raise Invalid(f"no run: set +{KWARGS}.run or $REPLAYBUF_RUN", name="run")
        return name

    @property
    def address(self) -> str:
        """The address of the service."""
        return self.url or os.environ.get("REPLAYBUF_URL", "http://127.0.0.1:8900")


class Pace(msgspec.Struct, frozen=True):
    """How verl's loop asks: batches per global step, and batches of prompts that it generates ahead."""

    batches: int
    warmup: float

    @classmethod
    def of(cls, trainer_mode: str, config: Mapping[str, Any]) -> Pace:
        """Read the configuration of a trainer's mode. Raises `Invalid` for one that this sampler does not fit."""
        if trainer_mode not in _MODES:
            why = "a synchronous trainer stops its engines while prompts are in flight"
            raise misfit("trainer.v1.trainer_mode", trainer_mode, f"{' or '.join(_MODES)} ({why})")
        name = f"trainer.v1.{trainer_mode}.hybrid_rollout.enable_switch"
        if (config.get("hybrid_rollout") or {}).get("enable_switch", False):
            raise misfit(name, True, "False (it counts groups in the queue; this sampler moves them to the run)")
        return cls(int(config.get("parameter_sync_step", 1)), float(config.get("num_warmup_batches", 1)))

    def prompts_ahead(self, batch_size: int, step: int) -> int:
        """Return how many prompts verl has submitted and not trained when it asks for `step`."""
        per_global_step = self.batches * batch_size
        return int(self.warmup * per_global_step) + per_global_step - step % self.batches * batch_size


def read_settings(options: Mapping[str, Any] | DictConfig | None) -> SamplerSettings:
    """Check the settings, and warn if verl is of another release than the tested ones. Raises `Invalid`."""
    warn_if_untested("the sampler", "verl", *TESTED)
    return convert(options or {}, SamplerSettings, KWARGS)


def finished_steps(config: DictConfig) -> int | None:
    """Return the steps of the run at verl's newest checkpoint if nothing is left to train; None otherwise.

    None too where verl takes its number of steps from the data, or only validates: a live trainer may have the run.
    """
    trainer, folder = config.trainer, None
    if trainer.get("val_only", False) or trainer.total_training_steps is None:
        return None
    if trainer.resume_mode == "auto":
        folder = find_latest_ckpt_path(str(Path(trainer.default_local_dir).absolute()))
    elif trainer.resume_mode == "resume_path":
        folder = trainer.resume_from_path
    if folder is None:
        return None
    steps = int(str(folder).rpartition("global_step_")[2])
    mode = trainer.v1.trainer_mode
    return steps * Pace.of(mode, trainer.v1[mode]).batches if steps >= trainer.total_training_steps else None


def check_run(status: RunStatus, pace: Pace, batch_size: int) -> None:
    """Raise `Invalid` where batches of the run would not fit the batches that verl asks for."""
    facts, batch = status.facts(), status.config["batch"]
    groups = batch["groups_per_batch"]
    if not groups or groups % batch_size:
        why = "data.train_batch_size / parameter_sync_step, or a multiple where groups are used several times"
        raise misfit(f"run {status.run}: batch.groups_per_batch", groups, f"{batch_size} ({why})")
    needed: dict[str, tuple[object, object, str]] = {
        "adapters": (sorted(facts.adapters), [], "verl trains one policy"),
        "batch.tokens_per_batch": (batch["tokens_per_batch"], None, "a budget would make batches of fewer groups"),
        "batch.timeout_s": (batch["timeout_s"], None, "a time limit would make batches of fewer groups"),
        "batch.overlong": (batch["overlong"], "reject", "verl needs whole trajectories"),
        "steps_per_publish": (facts.steps_per_publish, pace.batches, "parameter_sync_step"),
    }
    check_run_settings(status.run, needed)
