"""A mixin for the `Trainer` of transformers: one optimizer step trains one batch of a run.

    class PolicyTrainer(ReplaybufTrainerMixin, Trainer):
        def publish_weights(self, version): ...

    trainer = PolicyTrainer(model=model, args=args, replaybuf=RunOptions(url=URL, run="main"))
    trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))

The Trainer gets one item per optimizer step. It does not prepare, shard or prefetch the loader. An item has as many
micro-batches on every rank; `training_step` loops over them and synchronises gradients once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback

from replaybuf.client.peers import warn_if_untested
from replaybuf.errors import Invalid
from replaybuf_hf.checkpoints import Mark, is_marked, mark_complete, newest_checkpoint, read_mark, unmark
from replaybuf_hf.feed import Feed, RunOptions, check_origin, check_settings, loss_scale
from replaybuf_hf.losses import Row, clipped_policy_loss, token_logprobs
from replaybuf_trainer.reading import TensorBatch

TESTED = {"transformers": ("5.23", "5.24"), "accelerate": ("1.15", "1.16")}


class ReplaybufTrainerMixin(Trainer):  # type: ignore[misc]
    """A `Trainer` whose steps are the batches of a run. Goes before your own Trainer in the list of base classes.

    Define `publish_weights`, and `compute_loss` for a loss of your own.
    """

    def __init__(self, *args: Any, replaybuf: RunOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for package, tested in TESTED.items():
            warn_if_untested("replaybuf-hf", package, *tested)
        self.feed = Feed(replaybuf, self.args.device)
        self._batch: TensorBatch | None = None
        self.step_loss = torch.zeros(())
        self.add_callback(ReplaybufCallback(self))

    def publish_weights(self, version: int) -> str | None:
        """Write the weights of `version` and load them into the engines; return their URI. Called on every rank.

        For example `self.save_model(folder)`. It is also called once before the first step.
        """
        raise NotImplementedError

    def compute_loss(
        self, model: Any, inputs: Row, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return the loss of one micro-batch: its sum over loss tokens divided by `num_items_in_batch`.

        `inputs`: one packed row. The Trainer adds up the rows and averages over ranks, so `num_items_in_batch` is the
        number of loss tokens of the batch divided by the ranks. The outputs are its `logprobs`, as of `token_logprobs`.
        Inputs of an `eval_dataset` are not rows of a run: they get the loss of the Trainer.
        """
        if "inference_logprobs" not in inputs:
            evaluated: torch.Tensor | tuple[torch.Tensor, Any] = super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch
            )
            return evaluated
        logprobs = token_logprobs(model, inputs)
        loss = clipped_policy_loss(logprobs, inputs) / float(num_items_in_batch)
        return (loss, {"logprobs": logprobs}) if return_outputs else loss

    # ------------------------------------------------------------------ what the Trainer calls

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train until `max_steps` or the end of the run. `True` resumes from the newest complete checkpoint."""
        self._check_arguments()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise Invalid(f"no complete checkpoint in {self.args.output_dir}", name="resume_from_checkpoint")
        if resume_from_checkpoint:
            mark = read_mark(Path(resume_from_checkpoint))
            what = f"checkpoint {resume_from_checkpoint}"
            check_origin(self.feed.options, self.feed.ranks, what, mark.run, mark.ranks)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.feed.close()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader with one item per step of the run. Do not give it to `accelerator.prepare`."""
        # A generator of its own: an iterator draws a seed, which would change what the model draws after a resume.
        return DataLoader(_Steps(self), batch_size=None, collate_fn=_as_it_is, generator=torch.Generator())

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Add up the gradients of all micro-batches of a step; return the loss of this rank."""
        self._batch = batch = inputs["batch"]
        items, total = 1 / loss_scale(batch), torch.zeros((), device=self.args.device)
        for number, row in enumerate(batch.micro_batches, 1):
            last = number == len(batch.micro_batches)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                total = total + super().training_step(model, row, items)
        self.step_loss = total
        return total

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model. A checkpoint that is written again is incomplete until all is written. Raises `Fenced`."""
        if _internal_call:
            self.feed.confirm()
        if output_dir is not None and self.args.should_save:
            unmark(Path(output_dir))
        super().save_model(output_dir, _internal_call)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the last files of a checkpoint. The Trainer deletes old checkpoints after this."""
        super()._save_rng_state(output_dir)
        self.feed.confirm()

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the operations of all micro-batches."""
        return sum(super(ReplaybufTrainerMixin, self).floating_point_ops(row) for row in inputs["batch"].micro_batches)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the mean reward of the newest batch and the seconds of waiting beside the loss."""
        if "loss" in logs and self._batch is not None:
            logs |= {"reward": self._batch.meta.batch_reward_mean or 0.0, "wait_s": self.feed.take_wait_s()}
        super().log(logs, *args, **kwargs)

    def end_with_run(self) -> None:
        """End the training after the last step of the run, which the Trainer saves only after `max_steps`."""
        self.control.should_training_stop = True
        self.control.should_save = self.args.save_strategy == "steps" and not is_marked(self.checkpoint_folder)

    @property
    def checkpoint_folder(self) -> Path:
        """Folder of a checkpoint of the present step."""
        return Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"

    # ------------------------------------------------------------------ checks

    @property
    def publishes(self) -> bool:
        """Whether `publish_weights` is defined."""
        return type(self).publish_weights is not ReplaybufTrainerMixin.publish_weights

    def _check_arguments(self) -> None:
        """Raise `Invalid` for settings with which a step would not be a batch, or a resume not exact."""
        args, saves = self.args, self.args.save_strategy != "no"
        parallel = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()
        check_settings(
            {
                "gradient_accumulation_steps": (
                    args.gradient_accumulation_steps != 1,
                    args.gradient_accumulation_steps,
                    "one step trains one batch, whose micro-batches the trainer loops over: set 1, and the size of a "
                    "batch in the configuration of the run",
                ),
                "max_steps": (args.max_steps <= 0, args.max_steps, "a run has no length: set the number of steps"),
                "auto_find_batch_size": (args.auto_find_batch_size, True, "set batch.seq_len of the run instead"),
                "train_dataset": (self.train_dataset is not None, "given", "the run has the data: leave it out"),
                "n_gpu": (
                    args.n_gpu > 1,
                    args.n_gpu,
                    "DataParallel splits a batch: start a process per GPU by torchrun",
                ),
                "deepspeed": (self.is_deepspeed_enabled, "on", "it steps after each micro-batch: use DDP or FSDP"),
                "parallelism_config": (
                    parallel > 1,
                    f"{parallel} ranks per batch",
                    f"each of {args.world_size} ranks trains its own part of a batch: use data parallelism only",
                ),
                "world_size": (
                    args.world_size != self.feed.ranks.size,
                    args.world_size,
                    f"torch.distributed has {self.feed.ranks.size} ranks: start the training with torchrun",
                ),
                "save_only_model": (
                    saves and args.save_only_model,
                    True,
                    "a resume needs the optimizer: unset it, or set save_strategy='no'",
                ),
                "save_total_limit": (
                    saves and args.save_total_limit is not None and args.save_total_limit < 2,
                    args.save_total_limit,
                    "the Trainer deletes old checkpoints before all ranks have written the new one: the minimum is 2",
                ),
            }
        )
        self.feed.check_publishes(self.publishes, "Define publish_weights in your Trainer")


class ReplaybufCallback(TrainerCallback):  # type: ignore[misc]
    """Attach at train begin, ack and publish at step end, report checkpoints after the save. The mixin adds it."""

    def __init__(self, trainer: ReplaybufTrainerMixin) -> None:
        self._trainer = trainer
        self._feed = trainer.feed

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the run over at the step of the loaded checkpoint."""
        loader = kwargs.get("train_dataloader")
        check_settings(
            {
                "train_dataloader": (
                    isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)) or not _reads_steps(loader),
                    type(loader).__name__,
                    "accelerate would shard the batches and fetch one ahead: return the loader of the mixin as it is",
                )
            }
        )
        self._feed.attach(state.global_step)
        self._publish()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ack the step with its loss, the mean over the ranks, and publish."""
        losses = self._feed.ranks.gather(self._trainer.step_loss.detach().reshape(1))
        self._feed.ack({"loss": losses.mean()})
        self._publish()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark and report the checkpoint once it is on disk."""
        folder, ranks = self._trainer.checkpoint_folder, self._feed.ranks
        self._feed.sync(folder)
        self._feed.confirm()  # else the mark would complete what a successor writes here now
        mark = Mark(self._feed.options.run, state.global_step, ranks.size)
        ranks.first(lambda: mark_complete(folder, mark))
        self._feed.save(state.global_step)

    def _publish(self) -> None:
        trainer = self._trainer
        self._feed.publish_due(trainer.publish_weights if trainer.publishes else None)


class _Steps(IterableDataset[Any]):
    """The steps of a training from its first one on: those done are None, which the Trainer skips after a resume."""

    def __init__(self, trainer: ReplaybufTrainerMixin) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[Any]:
        trainer, done = self._trainer, self._trainer.state.global_step
        if done >= trainer.args.max_steps:
            return
        if not trainer.args.ignore_data_skip:
            yield from itertools.repeat(None, done)
        for batch in trainer.feed.batches():
            yield {"batch": batch.to(trainer.args.device)}
        trainer.end_with_run()


def _reads_steps(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), _Steps)


def _as_it_is(item: Any) -> Any:
    return item
