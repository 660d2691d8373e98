"""The rollout worker: a thread that puts the batches of a run into TRL's queue, and the calls of its trainer.

accelerate fetches the first micro-batch of step s + 1 before TRL trains the last one of step s, so the thread is one
step ahead, and not more: the service serves batch s + 1 once step s - 1 is acked::

    put s ── put s + 1 ── wait for the ack of s ── put s + 2 ── ...

When the run is finished, the queue gets one step of fillers behind the last batch. TRL fetches some of them and trains
none, because `ReplaybufCallback` ends the training after the last ack.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any

from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from replaybuf.client import BatchReader, Client, ReaderOptions, TrainerSession
from replaybuf.client.peers import Needed, check_size
from replaybuf.errors import BatchOverdue, Invalid, RunFinished, WrongStep, counted
from replaybuf.wire.batch import Batch
from replaybuf.wire.contract import WaitingAnswer
from replaybuf_trl.layout import check_run, step_rollouts
from replaybuf_trl.samples import filler_of, samples_of

logger = logging.getLogger(__name__)

LONG_POLL_MS = 1000
CALL_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0


class Samples(queue.Queue[RolloutSample]):
    """The queue that TRL reads. It translates policy versions to those that TRL counts, when TRL takes a sample.

    TRL counts from 1 in each process. Its staleness bound must not drop what the run has chosen: a dropped sample would
    shift all later ones to other steps. So a sample is at most `max_staleness` versions behind `version`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.offset = 0
        self.max_staleness = 0

    def _get(self) -> RolloutSample:
        sample = super()._get()
        sample.model_version = max(sample.model_version + self.offset, self.version - self.max_staleness)
        return sample


class ReplaybufRolloutWorker:
    """TRL's `RolloutWorkerProtocol` over a run. `url` may be several addresses with commas between.

    `service_timeout_s`: how long each call is repeated while the service is away. On all processes of a training it may
    be made; the first one alone uses it.
    """

    def __init__(
        self,
        url: str,
        run: str,
        token: str | None = None,
        *,
        service_timeout_s: float = 300.0,
        wait_ms: int = LONG_POLL_MS,
    ) -> None:
        self.run = run
        self.rollout_buffer = Samples()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.steps_per_publish = 1
        self._needed = Needed(0, "")
        self.ended_at: int | None = None
        """Number of steps that the run has, once it is finished."""
        self._client = Client(url, run, token, timeout_s=CALL_TIMEOUT_S)
        self._service_timeout_s = service_timeout_s
        self._wait_ms = wait_ms
        self._session: TrainerSession[Batch] | None = None
        self._version = 0
        self._published = False
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._acked = 0

    # ------------------------------------------------------------------ calls of callback and weight transfer

    def attach(self, args: AsyncGRPOConfig, step: int, keep: int | None = None) -> None:
        """Take the run over at the checkpoint of `step`, 0 = none, and report that checkpoint.

        `keep`: the newest checkpoints that stay resumable; None = this one and all that the run knows. Raises `Invalid`
        if TRL cannot train the batches of the run, and `WrongStep`.
        """
        session = self._open(step, keep)
        check_run(args, session.call(self._client.get_run))
        self._session = session
        try:
            attached = session.attach()
        except WrongStep as error:
            way_out = "give train(resume_from_checkpoint=...) a checkpoint of these steps, or use a new run"
            detail = f"{error.detail}; {way_out}"
            raise WrongStep(detail, name=error.name, value=error.value, bound=error.bound) from error
        if session.call(self._client.get_run).state == "finished":
            raise RunFinished(
                f"run {self.run} is finished after {counted(step, 'step')}; there is nothing left to train"
            )
        self.steps_per_publish, self._needed = args.weight_sync_steps, step_rollouts(args)
        self.rollout_buffer.max_staleness = args.max_staleness
        self._acked, self._version = attached.step, attached.published_version
        logger.info("attached run=%s epoch=%d step=%d", self.run, attached.epoch, attached.step)

    def _open(self, step: int, keep: int | None) -> TrainerSession[Batch]:
        # Without prefetch: the reader must not ask for a step before the one that is two steps older is acked.
        how = ReaderOptions(
            prefetch=False,
            wait_ms=self._wait_ms,
            service_timeout_s=self._service_timeout_s,
            on_waiting=self._check_waiting,
        )
        return TrainerSession(
            self._client,
            lambda epoch, first: BatchReader(self._client, epoch, first, how),
            steps_done=step,
            keep_checkpoints=keep,
            service_timeout_s=self._service_timeout_s,
            reward_parts=True,
            fixed=True,
        )

    def settle(self, step: int, keep: int) -> None:
        """Report the checkpoint of `step`, after which nothing is left to train, if the report was lost."""
        self._open(step, keep).settle()

    def ack(self, steps: int) -> None:
        """Report that so many steps are trained, and let the thread fetch one more. Raises `Fenced`."""
        self._attached.ack(steps=steps)
        with self._changed:
            self._acked = steps
            self._changed.notify_all()

    def checkpoint(self, step: int) -> None:
        """Report that the checkpoint of `step` is on disk."""
        self._attached.checkpoint(step)

    def publish(self, version: int, weights_uri: str | None) -> None:
        """Announce a version that the engines have loaded."""
        self._attached.publish(weights_uri, version)
        self._version, self._published = version, True

    def confirm(self) -> None:
        """Ask whether this trainer still has the run. Raises `Fenced`."""
        self._attached.call(self._attached.confirm)

    @property
    def _attached(self) -> TrainerSession[Batch]:
        if self._session is None:
            raise Invalid(
                f"run {self.run} has no trainer yet; give AsyncGRPOTrainer(callbacks=[ReplaybufCallback(worker)])",
                name="callbacks",
            )
        return self._session

    @property
    def epoch(self) -> int:
        """The epoch of this trainer. Raises `Invalid` before `ReplaybufCallback` attached."""
        return self._attached.epoch

    @property
    def version(self) -> int:
        """The policy version after the steps that are acked."""
        return self._acked // self.steps_per_publish

    @property
    def is_between_versions(self) -> bool:
        """Whether steps are acked since the last publication, as after a resume."""
        return self._acked % self.steps_per_publish > 0

    # ------------------------------------------------------------------ TRL's protocol

    def start(self) -> None:
        """Start to fetch; TRL has sent the first weights. Raises `Invalid` if nobody published them."""
        session = self._attached
        if not self._published:
            raise Invalid(
                f"the weights are not published to run {self.run}, so its generators would wait for ever; give "
                "AsyncGRPOTrainer(weight_transfer=ReplaybufWeightTransfer(worker, ...))",
                name="weight_transfer",
            )
        self._thread = threading.Thread(target=self._work, args=(session,), name="replaybuf batches", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        if self._session is not None:
            self._session.stop()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def update_model_version(self, model_version: int) -> None:
        """Take the version that TRL counts: it is the one that was published last."""
        self.rollout_buffer.version = model_version
        self.rollout_buffer.offset = model_version - self._version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the thread. A wait is healthy while the service answers why; the log has the reason."""
        if self._failure is not None:
            raise self._failure
        if self._thread is None or not (self._thread.is_alive() or self.ended_at is not None):
            raise RuntimeError(f"the worker of run {self.run} is not running: make a new trainer for each train()")

    # ------------------------------------------------------------------ the thread

    def _work(self, session: TrainerSession[Batch]) -> None:
        try:
            self._feed(session)
        except Exception as error:  # noqa: BLE001  # check_health raises it in the trainer
            self._failure = error

    def _feed(self, session: TrainerSession[Batch]) -> None:
        last: list[RolloutSample] = []
        with session:
            while self._wait_for_ack(session, session.reader.step - 1):
                began_s = time.monotonic()
                batch = next(session, None)
                if batch is None:
                    break
                check_size(batch.meta, self._needed)
                last = samples_of(batch)
                self._report(batch, time.monotonic() - began_s)
                for sample in last:
                    self.rollout_buffer.put(sample)
            if session.reader.finished:
                self._end(session.reader.step, last)

    def _check_waiting(self, waiting: WaitingAnswer) -> None:
        """Raise `BatchOverdue` for a wait that only TRL could end, which waits for this batch."""
        if waiting.reason == "awaiting_ack":
            raise BatchOverdue(
                f"run {self.run} has a strategy without look-ahead, so the next batch comes after the ack of this one. "
                "accelerate fetches its first micro-batch before TRL trains this one: use another strategy",
                waiting,
                name="strategy",
                value="awaiting_ack",
            )

    def _wait_for_ack(self, session: TrainerSession[Batch], steps: int) -> bool:
        """Wait until so many steps are acked; return False once the worker stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._acked >= steps or session.stopped)
        return not session.stopped

    def _end(self, steps: int, last: list[RolloutSample]) -> None:
        if not last:
            raise RunFinished(f"run {self.run} finished after {counted(steps, 'step')}; there is nothing left to train")
        self.ended_at = steps
        for sample in last:
            self.rollout_buffer.put(filler_of(sample))

    def _report(self, batch: Batch, waited_s: float) -> None:
        values = {"replaybuf/batch_wait_s": waited_s}
        parts: Any = batch.meta.batch_reward_parts or {}
        values |= {f"rewards/{name}": part.mean for name, part in parts.items()}
        self.metrics_queue.put(values)
