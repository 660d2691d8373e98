"""The data source of slime that is the trainer of a run: rollout_id is the step.

What slime calls, and what it means for the run::

    __init__(args)        check the run; nobody is fenced yet
    load(k - 1)           attach at step k: redeliver what the checkpoint lacks, ack what only the checkpoint has
    generate_rollout(r)   the steps before r - steps_ahead are trained and their weights loaded: ack, publish, fetch r
    save(r)               step r is trained and its checkpoint written: ack r, record the checkpoint. Its weights are
                          loaded after this call, so their version is published by the next generate_rollout
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from replaybuf.client import BatchReader, Client, ReaderOptions, TrainerSession
from replaybuf.client.peers import Needed, check_size
from replaybuf.errors import BatchOverdue, Invalid, RunFinished, WrongStep, counted
from replaybuf.files import CONFIG_BYTES, read_bounded, write_whole
from replaybuf.wire.batch import Batch
from replaybuf.wire.contract import WaitingAnswer
from replaybuf_slime.settings import Settings, check_run

logger = logging.getLogger(__name__)

KEPT = 1
"""Checkpoints from which the run can resume."""
READ_ONLY = "samples come from the producers of the run; append them there (`replaybuf generate`, `group_builder`)"


class ReplaybufDataSource:
    """`--data-source-path replaybuf_slime.ReplaybufDataSource`; needs `replaybuf_slime.generate_rollout`.

    Raises `Invalid` for arguments and runs that do not fit.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.settings = Settings.of(args)
        self._client = Client(self.settings.url, self.settings.run, self.settings.token)
        options = ReaderOptions(wait_ms=1000, deadline_s=self.settings.deadline_s, on_waiting=self._check_waiting)
        self._session: TrainerSession[Batch] = TrainerSession(
            self._client,
            lambda epoch, step: BatchReader(self._client, epoch, step, options),
            keep_checkpoints=KEPT,
            lengths=True,
            fixed=True,
        )
        status = self._session.call(self._client.get_run)
        check_run(args, self.settings, status)
        prompts, samples = args.rollout_batch_size, args.n_samples_per_prompt
        self._needed = Needed(prompts * samples, f"rollout_batch_size {prompts} x n_samples_per_prompt {samples}")
        self._prompts: int | None = status.config["tickets"]["prompts"]

    # ------------------------------------------------------------------ what slime calls

    def load(self, rollout_id: int | None = None) -> None:
        """Attach after rollout `rollout_id`; None and -1 mean a new training.

        Raises `WrongStep` for a checkpoint of another run, of steps that are freed, or between two publications.
        """
        steps_done = 0 if rollout_id is None else rollout_id + 1
        self._check_publication(steps_done)
        if steps_done:
            self._check_same_run(steps_done)
        attached = self._session.attach(steps_done)
        logger.info("attached run=%s epoch=%d step=%d", self.settings.run, attached.epoch, attached.step)

    def save(self, rollout_id: int) -> None:
        """Record the checkpoint of rollout `rollout_id`, which slime has written.

        With --async-save slime writes it until the next save, so it is recorded then.
        """
        steps_done = rollout_id + 1
        self._session.ack(steps=steps_done)
        path = self._state_path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"run": self.settings.run, "steps_done": steps_done}).encode())
        last = rollout_id == self.args.num_rollout - 1
        self._session.checkpoint(steps_done, written=last or not getattr(self.args, "async_save", False))

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Reject: prompts belong to the tickets of the run."""
        raise RuntimeError(READ_ONLY)

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Reject: the groups of a run come from its producers."""
        raise RuntimeError(READ_ONLY)

    def __len__(self) -> int:
        """Return the number of prompts, from which slime computes the rollouts of an epoch. Raises `Invalid`."""
        if self._prompts is None:
            detail = "the prompts of the run are endless; set --num-rollout instead of --num-epoch"
            raise Invalid(detail, name="tickets.prompts", value=None)
        return self._prompts

    # ------------------------------------------------------------------ what the rollout function calls

    def fetch(self, rollout_id: int) -> Batch:
        """Wait for the batch of a rollout. Raises `RunFinished`, `BatchOverdue`, `Fenced`, `Invalid`, `Conflict`."""
        reader = self._session.reader
        if rollout_id != reader.step:
            detail = f"slime asks for rollout {rollout_id}; the next step of the run is {reader.step}"
            raise WrongStep(detail, name="rollout_id", value=rollout_id, bound=reader.step)
        self._session.ack(steps=rollout_id - self.settings.steps_ahead)
        self._session.publish_due()
        batch = next(self._session, None)
        if batch is None:
            detail = f"the run ended after {counted(reader.step, 'step')}; --num-rollout is {self.args.num_rollout}"
            raise RunFinished(detail)
        check_size(batch.meta, self._needed)  # slime would drop rollouts
        return batch

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Return what slime logs beside its own metrics."""
        staleness = np.concatenate([row.staleness for row in batch.micro_batches])
        return {
            "replaybuf/staleness_mean": float(staleness.mean()),
            "replaybuf/staleness_max": float(staleness.max()),
            "replaybuf/waited_s_total": sum(self._session.reader.waited_s.values()),
        }

    def close(self) -> None:
        """Stop fetching and close the connections."""
        self._session.close()
        self._client.close()

    # ------------------------------------------------------------------

    def _check_waiting(self, waiting: WaitingAnswer) -> None:
        """Raise `BatchOverdue` for a wait that only this process could end: it trains while it waits for no batch."""
        if waiting.reason in ("awaiting_ack", "awaiting_publication"):
            ahead = self.settings.steps_ahead
            detail = f"{waiting.reason} would never end: the strategy does not allow replaybuf_steps_ahead = {ahead}"
            raise BatchOverdue(detail, waiting, name="replaybuf_steps_ahead", value=ahead)

    def _check_publication(self, steps_done: int) -> None:
        """Raise `WrongStep` for a checkpoint whose weights are no version: slime loads them into its engines."""
        interval = self._session.facts.steps_per_publish
        if steps_done % interval and steps_done < self.args.num_rollout:
            raise WrongStep(
                f"the checkpoint has {counted(steps_done, 'step')}, and a version has {interval}: its engines would "
                "sample from weights that are no version of the run. Resume at a checkpoint of a multiple "
                "(--ckpt-step), if the run still has its steps, or train from its model in a new run",
                name="rollout_id",
                value=steps_done - 1,
                bound=interval,
            )

    def _check_same_run(self, steps_done: int) -> None:
        if self.args.load is None:
            return
        path = self._state_path(self.args.load, steps_done - 1)
        if not path.exists():  # killed between slime's checkpoint and `save`: the run knows enough
            logger.warning("no %s; the run decides whether it has these steps", path)
            return
        saved_run = json.loads(read_bounded(path, CONFIG_BYTES))["run"]
        if saved_run != self.settings.run:
            bound = self.settings.run
            detail = f"{path} is a checkpoint of run {saved_run}; replaybuf_run is {bound}"
            raise WrongStep(detail, name="replaybuf_run", value=saved_run, bound=bound)

    @staticmethod
    def _state_path(folder: str, rollout_id: int) -> Path:
        return Path(folder) / "rollout" / f"replaybuf_{rollout_id}.json"
