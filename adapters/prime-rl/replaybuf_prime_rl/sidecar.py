"""The process between a run and prime-rl's trainer.

::

    the trainer broadcasts policy N ──► ack steps below N, publish version N, record complete checkpoints
    the run has the batch of step N ──► rollouts/step_{N+1}/rank_*.bin
    the trainer broadcasts an older policy ──► it has resumed: rewind the run to that step, and deliver again

Everything follows from the run and the folder, so this process may be killed and started again at any moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from replaybuf.client import Client, TrainerSession
from replaybuf.client.peers import check_run_settings
from replaybuf.client.retries import Stopped
from replaybuf.errors import RunFinished
from replaybuf.wire.batch import Batch, read_batch
from replaybuf.wire.contract import WaitingAnswer
from replaybuf_prime_rl.folders import Folders
from replaybuf_prime_rl.micro_batches import encode

logger = logging.getLogger(__name__)

WARN_AFTER_POLLS = 250
SERVICE_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SidecarOptions:
    """Options of the process.

    - `output_dir`: that of prime-rl's trainer; `dp_world_size`: its data-parallel ranks
    - `pad_to_multiple_of`: that of its context parallelism, None = the run's
    - `keep_checkpoints`: newest complete checkpoints that stay resumable; None = all that are on disk
    - `poll_s`: seconds between two looks at the folder; a batch is awaited in between
    """

    output_dir: Path
    dp_world_size: int = 1
    pad_to_multiple_of: int | None = None
    keep_checkpoints: int | None = None
    poll_s: float = 0.1


class Sidecar:
    """Walks with the trainer through a run. `load_weights` is called with folder and version before a publication."""

    def __init__(
        self, client: Client, options: SidecarOptions, load_weights: Callable[[Path, int], None] | None = None
    ) -> None:
        self._client = client
        # The trainer is where its newest broadcast is; its checkpoint may be older, and `_record` reports that.
        self._session: TrainerSession[Batch] = TrainerSession(
            client,
            service_timeout_s=SERVICE_TIMEOUT_S,
            checkpoint=False,
            dp_world_size=options.dp_world_size,
            pad_to_multiple_of=options.pad_to_multiple_of,
        )
        self._options = options
        self._load_weights = load_weights
        self._folders = Folders(options.output_dir)
        self._stopped = threading.Event()
        self._attached = False
        self._written = self._recorded = 0
        self._waiting = ""
        self._polls = 0

    def stop(self) -> None:
        """End `run` after the present call, which is repeated no more."""
        self._stopped.set()
        self._session.stop()

    def run(self) -> None:
        """Feed the trainer until the run has ended and the last batch is trained, or until `stop`.

        Calls are repeated for `SERVICE_TIMEOUT_S` while the service is away. Raises `Fenced` if another trainer
        attached, and `WrongStep` if the folder belongs to another run.
        """
        with contextlib.suppress(Stopped):
            self._feed()

    def _feed(self) -> None:
        self._check_run()
        while not self._stopped.is_set():
            looked_s = time.monotonic()
            done = self._folders.steps_done()
            if done is None:
                markers = self._folders.broadcasts / "step_N" / "STABLE"
                self._report(
                    f"no {markers}: the trainer is not up, or its weight broadcast is neither filesystem nor nccl"
                )
            else:
                if not self._attached or done < self._session.steps_done:
                    self._attach(done)
                elif done > self._session.steps_done:
                    self._trained(done)
                if self._deliver():
                    return
            self._stopped.wait(looked_s + self._options.poll_s - time.monotonic())  # 0 where the service has waited

    # ------------------------------------------------------------------ the trainer's side

    def _attach(self, done: int) -> None:
        """Become the run's trainer where prime-rl's trainer is."""
        if self._attached:
            logger.warning("the trainer has resumed at step %d; it had done %d", done, self._session.steps_done)
        ranks = self._options.dp_world_size
        rewinds = self._session.call(self._client.get_run).step > done
        attached = self._session.attach(done)
        if rewinds or self._folders.has_rank(ranks):
            self._folders.remove_all()  # of another history or layout
        self._folders.remove_before(done)  # later ones are written again, perhaps while they are read: the same bytes
        self._attached, self._written, self._recorded = True, done, 0
        self._publish(done)
        logger.info("attached epoch=%d step=%d ranks=%d", attached.epoch, done, ranks)

    def _trained(self, done: int) -> None:
        self._session.ack(steps=done)
        self._publish(done)
        self._folders.remove_before(done)
        logger.info("trained steps=%d", done)

    def _publish(self, done: int) -> None:
        weights = self._folders.weights(done)
        if self._load_weights is not None:
            self._load_weights(weights, done)
        by_files = any(weights.glob("*.safetensors"))  # a broadcast by NCCL has only the marker
        self._session.publish(weights.absolute().as_uri() if by_files else None)

    def _record(self) -> None:
        """Record the newest complete checkpoint; older ones on disk stay resumable."""
        saved = [step for step in self._folders.saved_steps() if step <= self._session.steps_done]
        if saved and saved[-1] > self._recorded:
            kept = self._options.keep_checkpoints or len(saved)
            self._session.checkpoint(saved[-1], keep=kept)
            self._recorded = saved[-1]

    # ------------------------------------------------------------------ the run's side

    def _deliver(self) -> bool:
        """Write the batches that are ready. Return whether the run has ended and everything is trained."""
        self._record()
        done = self._session.steps_done
        try:
            while not self._stopped.is_set() and self._written <= done + self._session.attachment.look_ahead:
                if not self._write(self._written):
                    return False
                self._written += 1
        except RunFinished:
            if self._written == done:
                logger.info("the run has ended after %d steps", done)
                return True
        return False

    def _write(self, step: int) -> bool:
        ranks, wait_ms = [], int(1000 * self._options.poll_s)
        for rank in range(self._options.dp_world_size):
            body = self._session.fetch(step, dp_rank=rank, wait_ms=wait_ms)
            if isinstance(body, WaitingAnswer):
                lacks = f"blocked on {body.blocked_on}, have {body.have}, need {body.need}"
                self._report(f"step {step}: {body.reason}, {lacks}")
                return False
            ranks.append(encode(read_batch(body)))
        self._folders.write(step, ranks, lambda: self._session.call(self._session.confirm))
        self._waiting, self._polls = "", 0
        logger.info("wrote step=%d as step_%d bytes=%d", step, step + 1, sum(map(len, ranks)))
        return True

    def _report(self, why: str) -> None:
        """Log a new reason at once, and one that lasts from time to time."""
        self._polls = 0 if why != self._waiting else self._polls + 1
        if self._polls % WARN_AFTER_POLLS == 0:
            logger.log(logging.WARNING if self._polls else logging.INFO, "waiting: %s", why)
        self._waiting = why

    def _check_run(self) -> None:
        status = self._session.call(self._client.get_run)
        facts, why = status.facts(), "prime-rl broadcasts one policy after each step"
        needed = {"adapters": (sorted(facts.adapters), [], why), "steps_per_publish": (facts.steps_per_publish, 1, why)}
        check_run_settings(status.run, needed)
