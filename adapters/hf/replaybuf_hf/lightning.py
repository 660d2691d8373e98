"""A data module and a callback for Lightning: one batch of the data module is one optimizer step of a run.

    class Policy(LightningModule):
        automatic_optimization = False  # a step has several micro-batches

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.log("loss", backward(self, batch, self.row_loss))
            optimizer.step()

    trainer = Trainer(max_steps=100, callbacks=[ReplaybufCallback(publish)])
    trainer.fit(policy, datamodule=ReplaybufDataModule(RunOptions(url=URL, run="main")))

Lightning fetches one batch ahead of a loader without a length. This loader has one, so a step waits for its own batch
alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy

from replaybuf.client.peers import warn_if_untested
from replaybuf.errors import Invalid
from replaybuf_hf.feed import Feed, RunOptions, check_origin, check_settings, loss_scale
from replaybuf_hf.losses import Row
from replaybuf_trainer.reading import TensorBatch

TESTED = ("2.6", "2.7")
STATE = "replaybuf"
"""Key of a checkpoint: run, number of ranks, and the state of torch's generator on each rank."""

PublishFrom = Callable[[Trainer, LightningModule, int], str | None]
"""Writes the weights of a version and loads them into the engines; returns their URI. Called on every rank."""


def backward(module: LightningModule, batch: TensorBatch, row_loss: Callable[[Row], torch.Tensor]) -> torch.Tensor:
    """Add up the gradients of all micro-batches, synchronised once; return the loss of this rank.

    `row_loss` returns the sum over the loss tokens of one packed row.
    """
    scale, total = loss_scale(batch), torch.zeros((), device=module.device)
    for number, row in enumerate(batch.micro_batches, 1):
        last = number == len(batch.micro_batches)
        with contextlib.nullcontext() if last else _unsynchronised(module.trainer):
            loss = row_loss(row) * scale
            module.manual_backward(loss)
        total = total + loss.detach()
    return total


def _unsynchronised(trainer: Trainer) -> contextlib.AbstractContextManager[Any]:
    block = getattr(trainer.strategy, "block_backward_sync", contextlib.nullcontext)
    unsynchronised: contextlib.AbstractContextManager[Any] = block()
    return unsynchronised


class ReplaybufDataModule(LightningDataModule):  # type: ignore[misc]
    """The batches of a run, from the step of the loaded checkpoint on. Needs a `ReplaybufCallback`."""

    def __init__(self, options: RunOptions) -> None:
        super().__init__()
        warn_if_untested("replaybuf-hf", "lightning", *TESTED)
        self.options = options
        self.feed: Feed | None = None

    def setup(self, stage: str) -> None:
        """Open the run when all ranks are connected."""
        if stage == "fit" and self.feed is None:
            self.feed = Feed(self.options, self.trainer.strategy.root_device)

    def train_dataloader(self) -> _Steps:
        """Attach at the trainer's step; return the loader of the steps from there on."""
        trainer, feed = self.trainer, _feed_of(self.trainer)
        steps = [most for most in (trainer.max_steps, feed.facts.max_steps) if most not in (None, -1)]
        self._check(trainer, feed)
        look_ahead = feed.attach(trainer.global_step)
        check_settings(
            {
                "look_ahead": (
                    not steps and look_ahead == 0,
                    0,
                    "the strategy serves one step at a time, and Lightning fetches one ahead of a loader without a "
                    "length: set Trainer(max_steps=) or max_steps of the run",
                )
            }
        )
        return _Steps(trainer, feed, min(steps, default=None))

    def teardown(self, stage: str) -> None:
        """Stop fetching."""
        if self.feed is not None:
            self.feed.close()

    def _check(self, trainer: Trainer, feed: Feed) -> None:
        """Raise `Invalid` for settings with which a step would not be a batch, or a resume not exact."""
        callbacks = [each for each in trainer.callbacks if isinstance(each, ReplaybufCallback)]
        strategy = trainer.strategy
        check_settings(
            {
                "callbacks": (
                    len(callbacks) != 1,
                    f"{len(callbacks)} of type ReplaybufCallback",
                    "one acks the steps: Trainer(callbacks=[ReplaybufCallback(publish)])",
                ),
                "automatic_optimization": (
                    trainer.lightning_module.automatic_optimization,
                    True,
                    "a step has several micro-batches: set it False and call replaybuf_hf.lightning.backward",
                ),
                "limit_train_batches": (
                    trainer.limit_train_batches != 1.0 or trainer.overfit_batches != 0,
                    trainer.limit_train_batches,
                    "a run is trained in order: set Trainer(max_steps=) instead, and no overfit_batches",
                ),
                "strategy": (
                    not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, FSDPStrategy)),
                    type(strategy).__name__,
                    "use DDP or FSDP, where each rank trains its own part of a batch",
                ),
                "world_size": (
                    trainer.world_size != feed.ranks.size,
                    trainer.world_size,
                    f"torch.distributed has {feed.ranks.size} ranks: use the ddp strategy",
                ),
                "checkpoint_io": (
                    isinstance(strategy.checkpoint_io, AsyncCheckpointIO),
                    "AsyncCheckpointIO",
                    "nobody reports when a checkpoint is on disk: leave it out",
                ),
            }
        )
        if callbacks:
            feed.check_publishes(callbacks[0].publish is not None, "Give ReplaybufCallback(publish) a function")


class ReplaybufCallback(Callback):  # type: ignore[misc]
    """Ack and publish after each step, report checkpoints after the save, restore what the model draws at random."""

    def __init__(self, publish: PublishFrom | None = None) -> None:
        self.publish = publish
        self._saved: int | None = None
        self._generator: torch.Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publish the weights that the training starts from."""
        if not isinstance(trainer.strategy.checkpoint_io, _OwnedCheckpoints):
            trainer.strategy.checkpoint_io = _OwnedCheckpoints(trainer)
            _sync_saves(trainer)
        self._publish(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Report a checkpoint that is on disk by now; after a resume restore the generator."""
        self._report_saved(trainer)
        if self._generator is not None:
            torch.set_rng_state(self._generator)
            self._generator = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ack the step with what the module has logged, and publish."""
        feed = _feed_of(trainer)
        if trainer.global_step != feed.step + 1:
            raise Invalid(
                f"one batch took {trainer.global_step - feed.step} optimizer steps; training_step must take one",
                name="global_step",
                value=trainer.global_step,
                bound=feed.step + 1,
            )
        feed.ack(trainer.callback_metrics)
        self._publish(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the last checkpoint."""
        self._report_saved(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what an exact resume needs. The file is written after this, before the next batch. Raises `Fenced`."""
        feed = _feed_of(trainer)
        feed.confirm()
        states = feed.ranks.gather(torch.get_rng_state()).chunk(feed.ranks.size)
        checkpoint[STATE] = {"run": feed.options.run, "ranks": feed.ranks.size, "generators": list(states)}
        self._saved = trainer.global_step

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Raise `Invalid` for a checkpoint of another run or number of ranks."""
        feed, state = _feed_of(trainer), checkpoint.get(STATE)
        if not isinstance(state, Mapping):
            raise Invalid(
                f"the checkpoint has no {STATE}: it was written without ReplaybufCallback. Load its weights into the "
                "module, and start without ckpt_path",
                name="ckpt_path",
            )
        check_origin(feed.options, feed.ranks, "the checkpoint", state["run"], state["ranks"])
        if state["ranks"] == feed.ranks.size:
            # A copy: torch 2.13 crashes on a state that is part of a larger tensor.
            self._generator = state["generators"][feed.ranks.rank].cpu().clone()

    def _publish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        publish = self.publish
        bound = None if publish is None else lambda version: publish(trainer, pl_module, version)
        _feed_of(trainer).publish_due(bound)

    def _report_saved(self, trainer: Trainer) -> None:
        if self._saved is not None:
            _feed_of(trainer).save(self._saved)
            self._saved = None


def _sync_saves(trainer: Trainer) -> None:
    """Have the strategy write checkpoints through to the disk; FSDP writes shards without its `checkpoint_io`."""
    save = trainer.strategy.save_checkpoint

    def save_to_disk(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        save(checkpoint, filepath, storage_options)
        _feed_of(trainer).sync(Path(trainer.strategy.broadcast(filepath)))  # nothing is at that path in a bucket

    trainer.strategy.save_checkpoint = save_to_disk


class _OwnedCheckpoints(CheckpointIO):  # type: ignore[misc]
    """The files of checkpoints, of which only the trainer that has the run deletes any. The first rank calls it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._files: CheckpointIO = trainer.strategy.checkpoint_io

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file."""
        self._files.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what a file holds."""
        return self._files.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a file. Raises `Fenced`."""
        _feed_of(self._trainer).confirm_alone()
        self._files.remove_checkpoint(path)

    def teardown(self) -> None:
        """End the work in the background."""
        self._files.teardown()


class _Steps:
    """The batches of this rank. Not a torch `DataLoader`, so Lightning neither wraps nor shards it."""

    def __init__(self, trainer: Trainer, feed: Feed, steps: int | None) -> None:
        self._trainer = trainer
        self._feed = feed
        self._steps = steps

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError("neither the trainer nor the run has max_steps")
        return self._steps

    def __iter__(self) -> Iterator[TensorBatch]:
        yield from self._feed.batches()
        self._trainer.should_stop = True  # the run is finished

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the ledger of the run has the position, and the trainer its step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the run is attached at the trainer's step."""


def _feed_of(trainer: Trainer) -> Feed:
    module = getattr(trainer, "datamodule", None)
    if not isinstance(module, ReplaybufDataModule) or module.feed is None:
        raise Invalid(
            "ReplaybufCallback needs the data module of the run: trainer.fit(module, datamodule=ReplaybufDataModule())",
            name="datamodule",
            value=type(module).__name__,
        )
    return module.feed
