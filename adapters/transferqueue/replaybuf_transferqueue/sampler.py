"""The sampler for verl: batches come from a replaybuf run, by its strategy, and its ledger records what was trained.

What verl calls, and what it means for the run::

    sample(G, "train")    the steps before are trained and their weights are loaded: ack, publish, fetch the next batch
    sample(G, "val")      global step G is trained: ack it; the groups are those of verl's own sampler
    on_save(G)            the checkpoint of global step G is on disk: record it

A finished group of the queue is appended to the run and then cleared from the queue. A group's id is its prompt's uid,
so a crash between the two appends a duplicate, which changes nothing. The first `sample` attaches at the steps that the
checkpoint of verl has trained. A batch goes back to the queue under keys of its step, which verl clears after training.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch
import transfer_queue
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from replaybuf.client import Client
from replaybuf.client.peers import misfit
from replaybuf.client.reader import WaitingLog
from replaybuf.client.session import TrainerSession
from replaybuf.errors import GroupRejected, Invalid, NoRoom, ServiceUnavailable, WrongStep
from replaybuf.wire.answer.run_status import RunStatus
from replaybuf.wire.batch import Batch, read_batch
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.group import Group
from replaybuf_transferqueue.sampler_settings import Pace, SamplerSettings, check_run, finished_steps, read_settings
from replaybuf_transferqueue.trajectories import Trajectory, group_of, trajectories_of, uid_of

logger = logging.getLogger(__name__)

TRAIN = "train"
PRODUCER = "verl"
GROUPS_PER_APPEND = 16
_MARK = "-step"
_WAY_OUT = (
    "give its groups back with Client.attach(on_resume='resample'), PATCH batch.groups_per_batch, and start verl again"
)


class ReplaybufSampler(ReplayBufferAsync):  # type: ignore[misc]  # verl is not typed
    """`trainer.v1.sampler.custom_sampler.name`; its path is `pkg://replaybuf_transferqueue.sampler`.

    verl's own `max_off_policy_threshold` has no effect: the run's strategy bounds staleness.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._settings = read_settings(self.sampler_kwargs)
        self._pace = Pace.of(self.trainer_mode, self.trainer_config)
        self.poll_interval = self._settings.poll_s
        self._client = _client_of(self._settings)  # without retries: what does not fit yet stays in the queue
        self._session = _session_of(self._client, self._settings)
        self._attached = False
        self._step = self._evicted = self._rejected = 0

    # ------------------------------------------------------------------ what verl calls

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """Wait for the next batch of the run; for validation, for verl's own.

        Raises `WrongStep`, `RunFinished`, `Fenced`, and `Invalid` where the run or a field does not fit.
        """
        if partition_id != TRAIN:
            if self._attached:
                self._ack_before(global_steps * self._pace.batches)
            result: tuple[KVBatchMeta, dict[str, float]] = super().sample(global_steps, partition_id, batch_size)
            return result
        self._begin_step(global_steps, batch_size)
        began_s = time.monotonic()
        batch = self._wait_for_batch(batch_size)
        waited_s = time.monotonic() - began_s
        kept = self._put_back(batch)
        self._step += 1
        return kept, {"replaybuf/waited_s": waited_s} | self._metrics(batch)

    def record_checkpoint(self, global_steps: int, *, written: bool = True) -> None:
        """Record that training can resume after `global_steps`, which ends with their last batch.

        One that is not `written` yet is recorded at the save after it.
        """
        steps = global_steps * self._pace.batches
        self._ack_before(steps)
        self._session.checkpoint(steps, written=written)

    # ------------------------------------------------------------------ the trainer of the run

    def _begin_step(self, global_steps: int, batch_size: int) -> None:
        """Attach at the first call; then ack the steps before this one and publish their weights."""
        first = (global_steps - 1) * self._pace.batches
        if not self._attached:
            check_run(self._session.call(self._client.get_run), self._pace, batch_size)
            attachment = self._session.attach(first, fixed=True, lengths=True, metadata=True)
            self._attached, self._step = True, first
            self._evicted = self._dropped(self._session.call(self._client.get_run))
            self._clear_batches()
            logger.info("attached epoch=%d step=%d", attachment.epoch, first)
        if not first <= self._step < first + self._pace.batches:
            detail = f"verl asks for global step {global_steps}; the next step of the run is {self._step}"
            raise WrongStep(detail, name="global_steps", value=global_steps, bound=self._step)
        self._ack_before(self._step)
        self._session.publish_due()

    def _ack_before(self, step: int) -> None:
        self._session.ack(steps=min(step, self._step))

    def _wait_for_batch(self, batch_size: int) -> Batch:
        log, began_s = WaitingLog(), time.monotonic()
        level = ahead = self._pace.prompts_ahead(batch_size, self._step)
        while True:
            self._sync_metadata_from_transfer_queue()
            self._store_finished(batch_size)
            live = self._refill(level)
            answer = self._session.fetch(self._step, wait_ms=int(self.poll_interval * 1000))
            if not isinstance(answer, WaitingAnswer):
                return _whole(read_batch(answer), batch_size)
            log.report(self._step, answer, time.monotonic() - began_s)
            level = max(ahead, live + answer.need.groups - answer.have.groups)

    # ------------------------------------------------------------------ from the queue to the run

    def _store_finished(self, batch_size: int) -> None:
        """Append the finished groups to the run and clear them and the failed ones from the queue.

        Raises `GroupRejected` once the run has rejected a whole batch in a row.
        """
        keys: dict[str, list[str]] = defaultdict(list)
        for key in self.partitions[TRAIN]:
            keys[uid_of(key)].append(key)
        finished = sorted(self.finished_keys[TRAIN], key=lambda uid: (self.prompt_global_steps[TRAIN][uid], uid))
        self._clear_groups(TRAIN, self.failure_keys[TRAIN] | {uid for uid in finished if not keys[uid]})
        ready = [uid for uid in finished if keys[uid]]
        for first in range(0, len(ready), GROUPS_PER_APPEND):
            uids = ready[first : first + GROUPS_PER_APPEND]
            try:
                self._store(self._read({uid: keys[uid] for uid in uids}), batch_size)
            except (NoRoom, ServiceUnavailable) as error:
                logger.info("finished groups stay in the queue: %s", error)
                return
            self._clear_groups(TRAIN, set(uids))

    def _store(self, finished: dict[str, list[Trajectory]], batch_size: int) -> None:
        groups: dict[str, Group] = {}
        for uid, trajectories in finished.items():
            try:
                groups[uid] = group_of(trajectories, uid)
            except GroupRejected as error:
                self._count_rejected(uid, error, batch_size)
        again = []
        for uid, result in zip(groups, self._client.append(list(groups.values())), strict=True):
            if result.status == "rejected":
                reason = str(result.reason)
                self._count_rejected(uid, GroupRejected(reason, f"{reason}: {result.detail}", name=reason), batch_size)
                continue
            self._rejected = 0
            if result.status == "duplicate" and self._is_lost(uid):
                again.append(group_of(finished[uid], f"{uid}.{self._session.attachment.generation}"))
        if again:
            self._client.append(again)

    def _is_lost(self, group_id: str) -> bool:
        """Return whether a rewind evicted this group, whose prompt verl has generated again since."""
        stored = self._session.call(lambda: self._client.get_group(group_id))
        return stored.state == "evicted" and stored.reason == "lost_lineage"

    def _count_rejected(self, group_id: str | None, error: GroupRejected, batch_size: int) -> None:
        logger.warning("the run rejects group %s, verl generates another: %s", group_id, error)
        self._rejected += 1
        if self._rejected >= max(batch_size, GROUPS_PER_APPEND):
            raise error

    def _read(self, keys: dict[str, list[str]]) -> dict[str, list[Trajectory]]:
        """Return the trajectories of each uid. Groups with the same fields are one read of the queue."""
        client, alike = transfer_queue.get_client(), defaultdict(list)
        for uid in keys:
            # The queue reads the fields that all keys have. Groups with others would silently lose them.
            names = client.kv_retrieve_meta(keys=keys[uid], partition_id=TRAIN).field_names
            alike[tuple(names)].append(uid)
        trajectories: dict[str, list[Trajectory]] = defaultdict(list)
        for uids in alike.values():
            wanted = [key for uid in uids for key in keys[uid]]
            data = transfer_queue.kv_batch_get(keys=wanted, partition_id=TRAIN)
            columns = {name: _values(data, name) for name in data.keys()}  # noqa: SIM118 - not a dict
            for key, row in zip(wanted, zip(*columns.values(), strict=True), strict=True):
                fields = dict(zip(columns, row, strict=True))
                trajectories[uid_of(key)].append(Trajectory(key, fields, self.partitions[TRAIN][key]))
        return {uid: trajectories[uid] for uid in keys}

    def _refill(self, level: int) -> int:
        """Submit prompts in place of those that failed or were evicted; return the number of live groups.

        Invariant: prompts in the queue + live groups >= level, which is what verl generates ahead, or more where the
        batch needs more.
        """
        coming = len(self.prompt_global_steps[TRAIN])
        with contextlib.suppress(ServiceUnavailable):
            self._client.send_heartbeat(PRODUCER, in_flight=coming)
        live = self._session.call(self._client.get_run).groups.live
        lacking = level - coming - live
        if lacking > 0:
            logger.info("verl generates %d prompts more: %d in the queue, %d live groups", lacking, coming, live)
            self.refill_fn(lacking)
        return live

    # ------------------------------------------------------------------ from the run to the queue

    def _put_back(self, batch: Batch) -> KVBatchMeta:
        trajectories = trajectories_of(batch, f"{_MARK}{batch.meta.step}")
        for _, alike in itertools.groupby(trajectories, key=lambda trajectory: sorted(trajectory.fields)):
            some = list(alike)
            transfer_queue.kv_batch_put(
                keys=[trajectory.key for trajectory in some],
                partition_id=TRAIN,
                fields=list_of_dict_to_tensordict([trajectory.fields for trajectory in some]),
                tags=[trajectory.tag for trajectory in some],
            )
        keys, tags = [trajectory.key for trajectory in trajectories], [trajectory.tag for trajectory in trajectories]
        return KVBatchMeta(partition_id=TRAIN, keys=keys, tags=tags)

    def _clear_batches(self) -> None:
        """Clear batches that a checkpoint of the queue brought back; verl saves it before it clears the batch."""
        listed = (transfer_queue.kv_list(TRAIN) or {}).get(TRAIN, {})
        old = [key for key in listed if _MARK in uid_of(key)]
        if old:
            transfer_queue.kv_clear(keys=old, partition_id=TRAIN)

    @staticmethod
    def _dropped(status: RunStatus) -> int:
        return sum(status.groups.evicted.values()) + status.groups.dead_lettered

    def _metrics(self, batch: Batch) -> dict[str, float]:
        """Return what verl logs beside its own metrics."""
        staleness, uses = (
            np.concatenate([getattr(row, name) for row in batch.micro_batches])
            for name in ("staleness", "times_sampled")
        )
        before, self._evicted = self._evicted, self._dropped(self._session.call(self._client.get_run))
        return {
            "replaybuf/staleness/mean": float(staleness.mean()),
            "replaybuf/staleness/max": float(staleness.max()),
            "replaybuf/times_sampled/mean": float(uses.mean()),
            "training/off_policy/evicted_samples": float(self._evicted - before),
        }


class CheckpointReport(CheckpointCallback):  # type: ignore[misc]  # verl is not typed
    """`trainer.checkpoint_callback_class`: records verl's checkpoints in the run, which frees what they do not need.

    A training that was killed between its last checkpoint and the report of it has nothing left to train, so that verl
    never asks the sampler for a step: the report is sent when the callback is made.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        steps = finished_steps(config) if config is not None else None
        if steps is not None:
            settings = read_settings(config.trainer.v1.sampler.sampler_kwargs)
            with _client_of(settings) as client:
                _session_of(client, settings).settle(steps)

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        """Record a checkpoint; one that is saved asynchronously is recorded at the save after it."""
        sampler = trainer.replay_buffer
        if not isinstance(sampler, ReplaybufSampler):
            name, sampler_name = "trainer.v1.sampler.custom_sampler.name", type(sampler).__name__
            raise Invalid(f"{name} is {sampler_name}; needed: ReplaybufSampler", name=name, value=sampler_name)
        sampler.record_checkpoint(global_step, written=not async_save)


def _client_of(settings: SamplerSettings) -> Client:
    return Client(settings.address, settings.run_name, os.environ.get("REPLAYBUF_TOKEN"))


def _session_of(client: Client, settings: SamplerSettings) -> TrainerSession[Batch]:
    return TrainerSession(client, keep_checkpoints=settings.keep_checkpoints)


def _whole(batch: Batch, batch_size: int) -> Batch:
    """Raise `Invalid` for a batch that verl cannot train whole, such as one that was made before a change."""
    groups = batch.meta.batch_groups
    if groups % batch_size:
        raise misfit(f"batch {batch.meta.batch_id}: groups", groups, f"a multiple of {batch_size}; {_WAY_OUT}")
    return batch


def _values(data: TensorDict, name: str) -> list[Any]:
    """Return the values of a field, one per row."""
    column = data[name]
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return [value.data if isinstance(value, NonTensorData) else value for value in column]
