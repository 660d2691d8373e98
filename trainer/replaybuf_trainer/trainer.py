"""The reference trainer: policy gradients from the batches of a replaybuf run.

    replaybuf train demo --url http://127.0.0.1:8900 --model DIR --engine http://127.0.0.1:8001
    replaybuf train --fake-data --model DIR --steps 5

Order of a step: get batch s -> train, once or for several epochs -> ack s -> write and load weights -> publish the
version -> get batch s+1. The reader requests the next batch while this one trains, if the strategy allows it. A
checkpoint is on disk before the service hears of it. The generator evaluates what the policy can do, by the version
that the engines report; this loop reports the loss of held-out groups.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from replaybuf.client.retries import Retries, Stopped
from replaybuf.errors import Invalid
from replaybuf.wire.answer.run_status import RunFacts
from replaybuf.wire.model.checkpoints import MODEL_FOLDER, TrainerState
from replaybuf.wire.model.shape import check_same_shape
from replaybuf_trainer.checkpoints.adapters import check_origin, origin_of
from replaybuf_trainer.checkpoints.checkpoints import Checkpoints
from replaybuf_trainer.faults import TrainingFault
from replaybuf_trainer.feeds.feed import Feed
from replaybuf_trainer.held_out import open_held_out
from replaybuf_trainer.losses import BatchTotals, load_objective
from replaybuf_trainer.models.fit import check_fit
from replaybuf_trainer.models.opening import open_policy
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.proximal import COLUMN, lacks_column, with_proximal_logprobs
from replaybuf_trainer.publications import Publications
from replaybuf_trainer.publishers.opening import open_publisher
from replaybuf_trainer.reading import TensorBatch
from replaybuf_trainer.report.figures import ack_metrics
from replaybuf_trainer.report.report import Report
from replaybuf_trainer.report.stopwatch import Stopwatch
from replaybuf_trainer.schedules import learning_rate_factor

logger = logging.getLogger(__name__)

MOST_SKIPPED = 8
"""Non-finite steps in a row that `--on-non-finite skip` allows; weights that are broken stay broken."""


class Trainer:
    """One trainer on one run. `train` runs once; `stop` ends it from any thread or signal handler.

    `_step`: steps done; `_skipped`: steps in a row without a change of the weights.
    """

    def __init__(self, options: TrainOptions, feed: Feed, ranks: Ranks | None = None) -> None:
        self._options = options
        self._feed = feed
        self._ranks = ranks or Ranks()
        self._retries = Retries(options.service_timeout_s)
        self._checkpoints = Checkpoints(
            options.checkpoint_dir, options.keep_checkpoints, self._ranks, self._saved, feed.confirm
        )
        publisher = open_publisher(options, self._checkpoints.needed_versions)
        self._publications = Publications(publisher, feed, self._ranks, self._retries)
        self._objective = load_objective(options.loss, options.loss_options, options.normalise)
        self._held_out = open_held_out(options, self._objective, self._ranks)
        self._report = Report(options, self._ranks, feed.confirm)
        self._watch = Stopwatch()
        self._skipped = 0

    def train(self) -> int:
        """Train until the run is finished, `--steps` are done or `stop` is called; return the number of steps done.

        Raises `Fenced` if another trainer took the run, `ServiceUnavailable` if service or engines stay unreachable,
        `Invalid` if options, run, model, checkpoint and batches do not fit together, and `TrainingFault`.
        """
        try:
            self._report.open()
            self._load_newest_checkpoint()
            if self._done():
                self._feed.settle(self._step)
                return self._step
            facts = self._attach()
            self._publications.start(self._policy, facts, self._step, self._watch.enter)
            self._watch = Stopwatch()
            with self._feed.batches() as batches:
                return self._train(batches)
        except Stopped:  # before the first batch
            return 0
        finally:
            self._publications.close()
            self._report.close()

    def stop(self) -> None:
        """End the training after the current step."""
        self._retries.stop()
        self._feed.stop()

    def _train(self, batches: Iterator[TensorBatch]) -> int:
        for batch in batches:  # the stopwatch is in "wait"
            figures = self._train_step(batch)
            self._watch.enter("ack")
            try:
                self._feed.ack(ack_metrics(figures))
            except Stopped:  # the service may not count this step: the last checkpoint stays the newest
                logger.warning("stopped before the ack of step %d was answered", self._step)
                return self._step
            self._step += 1
            stopped = not self._publications.publish_due(self._step, self._watch.enter)
            figures |= self._evaluate_if_due()
            # A crash after the checkpoint would not repeat this step, so its line comes first.
            self._record(batch, figures)
            if stopped or self._done():
                break
            if self._step % self._options.checkpoint_every_steps == 0:
                self._checkpoint()
            self._checkpoints.poll()
            self._watch.enter("wait")
        self._checkpoint()
        self._checkpoints.wait()
        return self._step

    def _done(self) -> bool:
        return self._options.steps is not None and self._step >= self._options.steps

    # ------------------------------------------------------------------ start

    def _load_newest_checkpoint(self) -> None:
        options = self._options
        checkpoint = self._checkpoints.newest() if options.keeps_checkpoints else None
        state = self._state_of(checkpoint) if checkpoint else TrainerState(run=options.source, step=0, version=0)
        self._step = state.step
        torch.manual_seed(options.seed + self._ranks.rank)
        folder = checkpoint / MODEL_FOLDER if checkpoint and options.lora_rank is None else options.model
        self._policy = open_policy(folder, options, self._objective.normalise, self._ranks)
        if checkpoint:
            self._checkpoints.load(checkpoint, state, self._policy)
        logger.info("loaded step=%d from=%s", self._step, checkpoint or options.model)

    def _state_of(self, checkpoint: Path) -> TrainerState:
        """Return the state of a checkpoint. Raises `Invalid` if it is broken, or of another run or model."""
        options, state = self._options, self._checkpoints.read_state(checkpoint)
        if state.run != options.source:
            raise Invalid(
                f"checkpoint {checkpoint} is of run {state.run}, not {options.source}; use another --checkpoint-dir",
                name="checkpoint_dir",
                value=state.run,
                bound=options.source,
            )
        check_origin(checkpoint, state.lora, options)
        if (checkpoint / MODEL_FOLDER).is_dir():  # runs with adapters have none
            way_out = "use another --checkpoint-dir, or the model of the checkpoint"
            check_same_shape(checkpoint / MODEL_FOLDER, options.model, way_out)
        return state

    def _attach(self) -> RunFacts:
        """Take the run over at the step of the checkpoint. Raises `Invalid` for a run that does not fit."""
        options, facts = self._options, self._feed.facts()
        if facts.adapters and options.lora_rank is None:
            adapters = sorted(facts.adapters)
            raise Invalid(
                f"run {options.source} has adapters {adapters}; give --lora-rank to train one LoRA adapter for each",
                name="adapters",
                value=adapters,
                bound=[],
            )
        if facts.adapters and options.epochs_per_batch > 1:
            raise Invalid(
                f"--epochs-per-batch is {options.epochs_per_batch}; run {options.source} has adapters, whose own steps "
                "may span several batches: use 1",
                name="epochs_per_batch",
                value=options.epochs_per_batch,
                bound=1,
            )
        check_fit(self._policy.model, options, facts)
        self._steps = options.steps or facts.max_steps
        if options.schedule != "constant" and self._steps is None:
            raise Invalid(
                f"schedule {options.schedule} needs the number of steps, and run {options.source} has no max_steps; "
                "give --steps",
                name="steps",
            )
        if (held_out := self._held_out) is not None:
            self._ranks.together(lambda: self._check_batch(held_out.batch))
        self._feed.attach(self._step, self._policy.cost)
        self._report.begin(self._step, self._steps, self._policy, self._feed.waiting, lambda: self._watch.phase)
        return facts

    # ------------------------------------------------------------------ one step

    def _train_step(self, batch: TensorBatch) -> dict[str, Any]:
        """Take the optimizer steps of a batch, one per epoch; return the figures of the last, and of all `by_epoch`.

        An epoch that changes no weight is the last one: the next would be the same.
        """
        batch = self._with_proximal_logprobs(batch)
        self._ranks.together(lambda: self._check_batch(batch))
        epochs = [self._train_epoch(batch)]
        while len(epochs) < self._options.epochs_per_batch and not epochs[-1]["skipped"]:
            epochs.append(self._train_epoch(batch))
        figures = epochs[-1] | {"epochs": len(epochs)}
        if self._options.epochs_per_batch == 1:
            return figures
        for epoch in epochs:
            del epoch["by_staleness"]
        return figures | {"by_epoch": {str(number): epoch for number, epoch in enumerate(epochs)}}

    def _with_proximal_logprobs(self, batch: TensorBatch) -> TensorBatch:
        """Add the proximal logprobs that a loss of several epochs needs and that no generator sent."""
        needed = self._options.epochs_per_batch > 1 and COLUMN in self._objective.columns
        if not needed or not any(self._ranks.exchange(lacks_column(batch))):
            return batch
        self._watch.enter("forward")
        return with_proximal_logprobs(batch, self._policy, self._options.rows_per_forward)

    def _train_epoch(self, batch: TensorBatch) -> dict[str, Any]:
        """Take one optimizer step over all rows of the batch; return its figures."""
        options, objective, tally = self._options, self._objective, self._report.tally()
        completed = batch.adapters_completed
        totals = BatchTotals(batch.meta.batch_loss_tokens, batch.meta.batch_rollouts)
        if completed is not None:  # gradients of several batches are divided when the adapter takes its own step
            totals = BatchTotals(1, 1)
        for adapter, rows in batch.parts(options.rows_per_forward):  # gradients add up; all ranks have as many parts
            self._watch.enter("forward")
            loss = objective.value(self._policy.forward(rows, adapter), totals, tally)
            self._watch.enter("backward")
            torch.autograd.backward(loss)
        self._watch.enter("optimizer")
        tally.add_ranks(self._ranks.sum)
        factor = learning_rate_factor(options.schedule, self._step, options.warm_up_steps, self._steps)
        learning_rate = options.learning_rate * factor
        trained = batch.meta.batch_loss_tokens > 0
        has_loss = trained and math.isfinite(tally.loss)
        norm = self._policy.step(learning_rate, options.clip_norm, has_loss=has_loss, completed=completed)
        finite = math.isfinite(norm) and math.isfinite(tally.loss)
        self._count_skipped(batch, finite, tally.loss, norm)
        if not trained:
            logger.warning("step %d: batch %s has no loss tokens; the weights stay", self._step, batch.meta.batch_id)
        return {
            "grad_norm": norm if finite else 0.0,
            "learning_rate": learning_rate,
            "skipped": not (finite and trained),
            **tally.figures(),
            "by_staleness": tally.staleness_figures(),
        }

    def _check_batch(self, batch: TensorBatch) -> None:
        """Raise `Invalid` if the batch does not fit the loss or the model."""
        vocabulary = self._policy.vocab_size
        self._objective.check_columns([row for row in batch.micro_batches if len(row["rewards"])])
        highest = max(int(row["input_ids"].max()) for row in batch.micro_batches)
        if highest >= vocabulary:
            raise Invalid(
                f"batch {batch.meta.batch_id} has the token id {highest}; the vocabulary of the model has {vocabulary}",
                name="input_ids",
                value=highest,
                bound=vocabulary - 1,
            )

    def _count_skipped(self, batch: TensorBatch, finite: bool, loss: float, norm: float) -> None:
        """Count steps whose loss or gradient is not finite. Raises `TrainingFault` by the rule `on_non_finite`."""
        if finite:
            self._skipped = 0
            return
        self._skipped += 1
        what = f"step {self._step}: batch {batch.meta.batch_id} has loss {loss} and gradient norm {norm}"
        if self._options.on_non_finite == "stop":
            raise TrainingFault(f"{what}; --on-non-finite skip leaves such batches out", name="loss", value=loss)
        if self._skipped > MOST_SKIPPED:
            detail = f"{what}; {self._skipped} steps in a row are not finite, the maximum is {MOST_SKIPPED}"
            raise TrainingFault(detail, name="loss", value=loss, bound=MOST_SKIPPED)
        logger.warning("%s; the weights stay as they are", what)

    def _evaluate_if_due(self) -> dict[str, float]:
        """Return figures of the held-out groups, every `every_steps` of `--eval-options`."""
        if self._held_out is None or self._step % self._options.eval_options.every_steps:
            return {}
        self._watch.enter("evaluate")
        return self._held_out.figures(self._policy)

    def _record(self, batch: TensorBatch, figures: dict[str, Any]) -> None:
        beside = {"wait_reasons": self._feed.take_waits()} | self._publications.figures()
        self._report.step(batch, self._watch.take(), beside | figures)

    # ------------------------------------------------------------------ checkpoints

    def _checkpoint(self) -> None:
        """Start to write a checkpoint of this step, unless there is one; the service hears of it once it is on disk."""
        options = self._options
        if not options.keeps_checkpoints:
            return
        self._watch.enter("checkpoint")
        state = TrainerState(
            run=options.source,
            step=self._step,
            version=self._publications.version,
            needed_versions=self._publications.needed_versions(self._step),
            lora=origin_of(options),
        )
        self._checkpoints.save(self._policy, state)

    def _saved(self, step: int) -> None:
        try:
            self._feed.save(step)
        except Stopped:
            logger.warning("the checkpoint of step %d is on disk, but the service does not know it", step)
