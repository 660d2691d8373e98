"""Saving and loading of checkpoints. A thread writes while the training goes on, one checkpoint at a time.

::

    save ──► copied to CPU memory ──► written by every rank ──► complete ──► reported by `poll`, `wait` or next `save`
                                            │                                     │
                                            └── a fault, such as a full disk ─────┘ raised there; older ones stay
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError

from replaybuf.errors import Fenced
from replaybuf.wire.model.checkpoints import (
    STATE_FOLDER,
    TrainerState,
    broken,
    check_digests,
    latest_checkpoint,
    read_state,
)
from replaybuf_trainer.checkpoints.folders import complete, needed_versions, new_scratch
from replaybuf_trainer.checkpoints.shards import Failed, Tensors, causes, load_into, names_in, save_in_background
from replaybuf_trainer.faults import TrainingFault
from replaybuf_trainer.models.policy import Policy
from replaybuf_trainer.ownership import Confirm
from replaybuf_trainer.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Save:
    """A checkpoint on its way to disk."""

    state: TrainerState
    scratch: Path
    done: Future[object]


class Checkpoints:
    """The checkpoints of a training; all ranks make the same calls.

    `saved` is called with the step of each checkpoint that is whole on disk, in the thread of the training. `confirm`
    is called right before anything is deleted, in any thread.
    """

    def __init__(self, folder: Path, keep: int, ranks: Ranks, saved: Callable[[int], object], confirm: Confirm) -> None:
        self._folder = folder
        self._keep = keep
        self._ranks = ranks
        self._saved = saved
        self._confirm = confirm
        self._writing: _Save | None = None
        self._newest_step: int | None = None

    def newest(self) -> Path | None:
        """Return the newest checkpoint, the same on every rank."""
        path = self._ranks.first(lambda: str(latest_checkpoint(self._folder) or ""))
        return Path(path) if path else None

    def read_state(self, checkpoint: Path) -> TrainerState:
        """Read the state of a checkpoint and check its files; the first rank reads them. Raises `Invalid`."""
        state = self._ranks.together(lambda: read_state(checkpoint))
        self._ranks.first(lambda: check_digests(checkpoint, state))
        return state

    def load(self, checkpoint: Path, state: TrainerState, policy: Policy) -> None:
        """Load parameters, moments and random state. Raises `Invalid` for a broken checkpoint."""
        self._newest_step = state.step
        folder = checkpoint / STATE_FOLDER
        try:
            names = names_in(folder)
            random = {name: value for name, value in _random_states(self._ranks).items() if name in names}
            policy.load_state(names, lambda tensors: load_into(tensors | random, folder, self._ranks))
        except (Failed, SafetensorError, OSError) as error:
            raise broken(checkpoint, causes(error)) from error
        _set_random_states(random)

    def save(self, policy: Policy, state: TrainerState) -> None:
        """Start to write a checkpoint, after the one before is on disk. Raises what `poll` raises."""
        self.wait()
        if self._newest_step == state.step:
            return
        state = msgspec.structs.replace(state, ranks=self._ranks.size)
        try:
            scratch = Path(self._ranks.first(lambda: str(new_scratch(self._folder, state.step, self._confirm))))
        except OSError as error:
            raise self._fault(state.step, error) from error
        folders = policy.checkpoint_folders()

        def finish() -> None:
            for name, weights in folders.items():
                weights.save_weights(scratch / name)
            complete(scratch, state, self._keep, self._confirm)

        tensors = policy.state() | _random_states(self._ranks)
        done = save_in_background(scratch / STATE_FOLDER, tensors, self._ranks, finish)
        self._writing = _Save(state, scratch, done)

    def needed_versions(self, adapter: str) -> set[int]:
        """Return the published versions that a resume at a checkpoint needs, also at the one that is being written."""
        writing = self._writing  # asked first: what is complete a moment later is on the disk
        versions = needed_versions(self._folder, adapter)
        if writing is not None and adapter in writing.state.needed_versions:
            versions.add(writing.state.needed_versions[adapter])
        return versions

    def poll(self) -> None:
        """Report a checkpoint that has come to an end.

        Raises `TrainingFault` if it could not be written, and `Fenced` if another trainer has the run.
        """
        if self._writing and all(self._ranks.exchange(self._writing.done.done())):
            self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is being written, and report as `poll` does."""
        if self._writing is None:
            return
        save, self._writing = self._writing, None
        self._ranks.together(lambda: self._end(save))
        step = self._newest_step = save.state.step
        logger.info("checkpoint step=%d folder=%s", step, self._folder)
        self._saved(step)

    def _end(self, save: _Save) -> None:
        error = save.done.exception()
        if error is None:
            return
        if self._ranks.is_first:
            shutil.rmtree(save.scratch, ignore_errors=True)
        faults = [cause for cause, _ in error.failures.values()] if isinstance(error, Failed) else [error]
        if fenced := next((cause for cause in faults if isinstance(cause, Fenced)), None):
            raise fenced
        raise self._fault(save.state.step, error) from error

    def _fault(self, step: int, error: BaseException) -> TrainingFault:
        return TrainingFault(
            f"the checkpoint of step {step} cannot be written to {self._folder}: {causes(error)}; "
            f"the newest is {latest_checkpoint(self._folder) or 'none'}",
            name="checkpoint_dir",
            value=str(self._folder),
        )


def _random_states(ranks: Ranks) -> Tensors:
    states = {f"random.cpu.{ranks.rank}": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states[f"random.cuda.{ranks.rank}"] = torch.cuda.get_rng_state(ranks.device)
    return states


def _set_random_states(states: Tensors) -> None:
    for name, value in states.items():
        if name.startswith("random.cpu."):
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value)
