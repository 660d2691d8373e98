"""The reference trainer: GRPO from the batches of a replaybuf run, one process, one policy.

    replaybuf train --url http://127.0.0.1:8900 --run demo --model DIR --engine http://127.0.0.1:8001

Order of a step: get batch s -> train -> ack s -> write and load weights -> publish the version -> get batch s+1. The
next batch is asked for while this one trains, where the strategy allows it. A checkpoint is on disk before the service
hears of it. Everything it needs from the service is in `replaybuf.client`; any other trainer can
do the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import torch

from replaybuf.client.client import Client
from replaybuf.client.reader import BatchReader, ReaderOptions
from replaybuf.errors import Invalid, ServiceUnavailable
from replaybuf.generator.fleet.publication import OnPublish
from replaybuf.kernel.options import repr_without
from replaybuf.packing.cost import cost_of
from replaybuf.wire.batch import Batch
from replaybuf_trainer.checkpoint import (
    TrainerState,
    latest_checkpoint,
    load_optimizer,
    read_state,
    save_checkpoint,
)
from replaybuf_trainer.loss import Objective, Tally, rows_loss
from replaybuf_trainer.model import load_model, shape_of
from replaybuf_trainer.publisher import EnginePublisher
from replaybuf_trainer.weights import keep_newest, save_model

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEPT_WEIGHTS = 3


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to train: where from, with what, how often to poll (s), publish and checkpoint (steps)."""

    url: str
    run: str
    model: Path
    engines: tuple[str, ...]
    checkpoint_dir: Path
    weights_dir: Path
    checkpoint_every_steps: int = 20
    keep_checkpoints: int = 2
    on_resume: Literal["redeliver", "resample"] = "redeliver"
    poll_s: float = 0.5
    wait_ms: int = 0
    prefetch: bool = True
    rows_per_forward: int = 8
    learning_rate: float = 1e-4
    warm_up_steps: int = 10
    clip_norm: float = 1.0
    objective: Objective = Objective()
    metrics_file: Path | None = None
    token: str | None = None
    service_timeout_s: float = 60.0
    engine_timeout_s: float = 60.0
    on_publish: OnPublish = "in-flight"
    seed: int = 0

    def __repr__(self) -> str:
        return repr_without(self, "token")


class Stopped(Exception):
    """The trainer was asked to stop while the service was away."""


class Trainer:
    """One trainer on one run."""

    def __init__(self, options: TrainOptions, client: Client) -> None:
        self._stopping = threading.Event()
        self._options = options
        self._client = client
        self._engines = EnginePublisher(options.engines, options.engine_timeout_s, options.on_publish)
        self._reader: BatchReader | None = None

    # ------------------------------------------------------------------ the loop

    def train(self) -> int:
        """Train until the run is finished or `stop` is called; return the number of steps done.

        Raises `Fenced` where another trainer took the run, `ServiceUnavailable` where service or engines stay away.
        """
        try:
            reader = self._start()
            with reader:
                return self._train(reader)
        except Stopped:  # before there was a step to take
            return 0
        finally:
            self._engines.close()

    def stop(self) -> None:
        """End the training after the step in work; from any thread, or a signal handler."""
        self._stopping.set()
        if self._reader:
            self._reader.stop()

    def _train(self, reader: BatchReader) -> int:
        began = time.perf_counter()
        for batch in reader:
            waited = time.perf_counter() - began
            figures = self._train_step(batch)
            try:
                self._retried(reader.ack)
            except Stopped:  # the weights hold a step that does not count yet: the checkpoint before it stands
                logger.warning("stopped before the ack of step %d was answered", self._step)
                return self._step
            self._step += 1
            acked = time.perf_counter()
            stopped = not self._publish_if_due()
            ended = time.perf_counter()
            self._record(reader, batch, figures, waited, ended - acked, ended - began)
            if stopped:
                break
            if self._step % self._options.checkpoint_every_steps == 0:
                self._checkpoint()
            began = time.perf_counter()
        self._checkpoint()
        return self._step

    def _start(self) -> BatchReader:
        """Load the newest checkpoint, attach at its step, bring the engines to its weights; return the reader."""
        options = self._options
        checkpoint = latest_checkpoint(options.checkpoint_dir)
        source = checkpoint / "model" if checkpoint else options.model
        self._step = read_state(checkpoint).step if checkpoint else 0
        torch.manual_seed(options.seed)
        self._model = load_model(source)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        if checkpoint:
            load_optimizer(checkpoint, self._model, self._optimizer)
        facts = self._retried(self._client.get_run).facts()
        adapters = sorted(facts.adapters)
        if adapters:
            raise Invalid(
                f"run {options.run} has adapters {adapters}; this trainer trains whole models, without LoRA",
                name="adapters",
                value=adapters,
                bound=[],
            )
        self._steps_per_publish = facts.steps_per_publish
        self._version = self._step // self._steps_per_publish
        attached = self._retried(
            lambda: self._client.attach(
                resume_step=self._step, on_resume=options.on_resume, cost=cost_of(shape_of(self._model))
            )
        )
        self._epoch = attached.epoch
        logger.info("attached run=%s epoch=%d step=%d from=%s", options.run, self._epoch, self._step, source)
        if not options.engines:
            logger.warning(
                "no engine is given: weights are written to %s and announced before anybody has loaded them; "
                "whoever samples has to load them, from the announced weights_uri",
                options.weights_dir,
            )
        self._load_engines()
        self._engines.watch(self._confirm)
        how = ReaderOptions(
            poll_s=options.poll_s,
            wait_ms=options.wait_ms,
            prefetch=options.prefetch,
            service_timeout_s=options.service_timeout_s,
        )
        self._reader = BatchReader(self._client, self._epoch, self._step, how)
        if self._stopping.is_set():  # it was asked to while there was no reader to tell
            self._reader.stop()
        return self._reader

    def _train_step(self, batch: Batch) -> Tally:
        """One optimizer step over all rows of the batch."""
        began = time.perf_counter()
        tally = Tally()
        rows, at_once = [row for row in batch.micro_batches if len(row.rewards)], self._options.rows_per_forward
        for start in range(0, len(rows), at_once):
            loss = rows_loss(
                self._model, rows[start : start + at_once], batch.meta.batch_loss_tokens, self._options.objective, tally
            )
            torch.autograd.backward(loss)
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.learning_rate * min(1.0, (self._step + 1) / max(1, self._options.warm_up_steps))
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._options.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._grad_norm, self._train_s = float(norm), time.perf_counter() - began
        return tally

    # ------------------------------------------------------------------ weights and checkpoints

    def _publish_if_due(self) -> bool:
        """After the last step of a version, load the new weights into the engines and announce them.

        False where a stop came first: the step counts all the same, and a resumed trainer publishes it.
        """
        version = self._step // self._steps_per_publish
        if version == self._version:
            return True
        self._version = version
        try:
            self._load_engines()
        except Stopped:
            return False
        return True

    def _load_engines(self) -> None:
        options = self._options
        folder = options.weights_dir / f"v{self._version:06d}"
        save_model(self._model, options.model, folder)
        self._retried(lambda: self._engines.publish(folder, self._version))
        uri = folder.resolve().as_uri()
        self._retried(lambda: self._client.publish_policy(self._version, self._epoch, weights_uri=uri))
        keep_newest(options.weights_dir, "v*", KEPT_WEIGHTS)

    def _confirm(self, version: int) -> None:
        """Announce a version that is published already, which changes nothing. Raises `Fenced` for an older epoch."""
        self._client.publish_policy(version, self._epoch)

    def _checkpoint(self) -> None:
        options = self._options
        newest = latest_checkpoint(options.checkpoint_dir)
        if newest is not None and read_state(newest).step == self._step:
            return
        state = TrainerState(options.run, self._step, self._version)
        save_checkpoint(
            options.checkpoint_dir, self._model, self._optimizer, options.model, state, options.keep_checkpoints
        )
        try:
            self._retried(lambda: self._client.checkpoint(self._step, self._epoch, keep=options.keep_checkpoints))
        except Stopped:
            logger.warning("the service is away and has not heard of the checkpoint; it stands on disk all the same")
        logger.info("checkpoint run=%s step=%d", options.run, self._step)

    # ------------------------------------------------------------------ waiting and telling

    def _retried(self, call: Callable[[], T]) -> T:
        """Repeat a call while the service, or every engine, is away, for `service_timeout_s` at most."""
        deadline = time.monotonic() + self._options.service_timeout_s
        pause_s = 0.1
        while True:
            try:
                return call()
            except ServiceUnavailable as error:
                if self._stopping.is_set():
                    raise Stopped from error
                if time.monotonic() > deadline:
                    raise
                logger.warning("trying again: %s", error.detail)
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, 2.0)

    def _record(
        self, reader: BatchReader, batch: Batch, tally: Tally, wait_s: float, publish_s: float, step_s: float
    ) -> None:
        """Append one line of figures to the metrics file."""
        rows = [row for row in batch.micro_batches if len(row.rewards)]
        rewards = [reward for row in rows for reward in row.rewards.tolist()]
        ages = [age for row in rows for age in row.staleness.tolist()]
        line = {
            "time": time.time(),
            "step": batch.meta.step,
            "version": batch.meta.version,
            "loss": tally.mean("loss"),
            "reward_mean": sum(rewards) / len(rewards),
            "grad_norm": self._grad_norm,
            "clip_fraction": tally.mean("clipped"),
            "ratio_mean": tally.mean("ratio"),
            "entropy": tally.mean("entropy"),
            "tokens": batch.meta.tokens,
            "loss_tokens": tally.tokens,
            "staleness_mean": sum(ages) / len(ages),
            "staleness_max": max(ages),
            "wait_s": wait_s,
            "wait_reasons": dict(reader.waited_s),
            "train_s": self._train_s,
            "publish_s": publish_s,
            "engine_reloads": self._engines.reloads,
            "step_s": step_s,
            "tokens_per_s": batch.meta.tokens / step_s,
        }
        reader.waited_s.clear()
        logger.info(
            "step=%d reward=%.3f loss=%.4f staleness=%d wait=%.2fs train=%.2fs",
            line["step"],
            line["reward_mean"],
            line["loss"],
            line["staleness_max"],
            wait_s,
            self._train_s,
        )
        if self._options.metrics_file:
            with self._options.metrics_file.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
