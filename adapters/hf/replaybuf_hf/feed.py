"""The batches of a run for one training: attach or resume, batches in step with the other ranks, ack, publish, save.

The order of a step: batch s -> train -> ack s -> write and load weights -> publish the version -> batch s+1. Every rank
makes the same calls in the same order. Only the first one changes the run, and its errors are raised on every rank.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from replaybuf.client import Client, ReaderOptions, TrainerSession
from replaybuf.client.retries import Retries
from replaybuf.errors import Invalid, counted
from replaybuf.files import sync
from replaybuf.wire.answer.run_status import RunFacts
from replaybuf_trainer.folders import sync_folder
from replaybuf_trainer.parallel.ranks import Ranks, TorchRanks
from replaybuf_trainer.reading import TensorBatch, TensorReader
from replaybuf_trainer.report.figures import ack_metrics

logger = logging.getLogger(__name__)

Publish = Callable[[int], str | None]
"""Writes the weights of a version and loads them into the engines; returns their URI. Called on every rank."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Which run to train from, and how.

    - `keep_checkpoints`: newest checkpoints from which the run can resume; delete no newer one
    - `columns`: optional columns that the loss reads, such as `ref_logprobs`; a batch without them is an error
    - `on_resume`: `redeliver` serves the batches after the checkpoint again, `resample` draws new ones
    - `allow_other_ranks`: resume a checkpoint of another number of ranks; then losses differ by rounding
    - `service_timeout_s`: how long the service may be away; `wait_ms`: how long it may hold a request for a batch
    """

    url: str
    run: str
    token: str | None = dataclasses.field(default=None, repr=False)
    keep_checkpoints: int = 2
    columns: tuple[str, ...] = ()
    on_resume: Literal["redeliver", "resample"] = "redeliver"
    allow_other_ranks: bool = False
    service_timeout_s: float = 60.0
    wait_ms: int = 1000


class Feed:
    """The batches of a run, in step with the other ranks. Made -> `attach` -> batches, `ack`, `publish_due` -> `close`.

    `step`: steps done; `wait_s`: seconds that this rank waited for the newest batch.
    """

    def __init__(self, options: RunOptions, device: torch.device) -> None:
        self.options = options
        self.ranks = _ranks(device)
        self.step = 0
        self._client = Client(options.url, options.run, options.token)
        self._session: TrainerSession[TensorBatch] | None = None
        self._facts: RunFacts | None = None

    @property
    def facts(self) -> RunFacts:
        """Facts of the run's configuration. Raises `Invalid` for a run with LoRA adapters."""
        if self._facts is None:
            facts = Retries(self.options.service_timeout_s).call(self._client.get_run).facts()
            if facts.adapters:
                raise _refusal(
                    f"run {self.options.run} has LoRA adapters {sorted(facts.adapters)}; this trainer has one policy. "
                    "Create a run without adapters, or use replaybuf train --lora-rank",
                    "adapters",
                    sorted(facts.adapters),
                )
            self._facts = facts
        return self._facts

    def check_publishes(self, publishes: bool, way_out: str) -> None:
        """Raise `Invalid` if nothing publishes weights and the run bounds staleness: it would soon wait for ever."""
        options = self.facts.strategy.options
        if not publishes and options.get("max_staleness", 0) is not None:
            raise _refusal(
                f"nothing publishes weights, and strategy {self.facts.strategy.name} of run {self.options.run} bounds "
                f"staleness: the batches would stop with awaiting_publication. {way_out}",
                "publish",
            )

    def attach(self, step: int) -> int:
        """Take the run over after `step` steps; return how many steps ahead of the acks it serves.

        Every older trainer is fenced. Raises `WrongStep` for a checkpoint that the run can no longer resume.
        """
        self.close()
        options = self.options
        how = ReaderOptions(
            dp_rank=self.ranks.rank,
            dp_world_size=self.ranks.size,
            wait_ms=options.wait_ms,
            service_timeout_s=options.service_timeout_s,
        )
        session = TrainerSession(
            self._client,
            lambda epoch, first: TensorReader(self._client, epoch, first, how),
            steps_done=step,
            keep_checkpoints=options.keep_checkpoints,
            service_timeout_s=options.service_timeout_s,
            dp_world_size=self.ranks.size,
            on_resume=options.on_resume,
            reward_parts=True,
        )
        epoch, look_ahead = self.ranks.first(lambda: _attach(session))
        session.join(epoch, step)
        self._session, self.step = session, step
        logger.info("attached run=%s epoch=%d step=%d ranks=%d", options.run, epoch, step, self.ranks.size)
        return look_ahead

    def batches(self) -> Iterator[TensorBatch]:
        """Yield the batches of this rank until the run is finished; all ranks stop after the same step."""
        return self.ranks.in_step(self._checked())

    def _checked(self) -> Iterator[TensorBatch]:
        for batch in self._attached:
            for row in batch.micro_batches:
                missing = [name for name in self.options.columns if name not in row]
                if missing and len(row["rewards"]):
                    raise _refusal(
                        f"batch {batch.meta.batch_id} has no {missing}, which the loss needs. Have every generator of "
                        "the run send them, or take them out of RunOptions(columns=)",
                        "columns",
                        missing,
                    )
            yield batch

    def ack(self, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Report that the newest batch is trained, with numbers of the step that people want to see, by name."""
        numbers = ack_metrics({name: float(value) for name, value in metrics.items()})
        self.ranks.first(lambda: self._attached.ack(metrics=numbers))
        self.step += 1

    def publish_due(self, publish: Publish | None) -> None:
        """Publish the version of `step`, if it is one.

        After a resume between two publications the weights are no version, and a published version keeps its weights:
        engines that lack it wait for the next one.
        """
        version, rest = divmod(self.step, self.facts.steps_per_publish)
        if publish is None or rest:
            return
        uri = publish(version)
        self.ranks.first(lambda: self._attached.publish(uri, version))

    def sync(self, checkpoint: Path) -> None:
        """Write a checkpoint, a file or a folder, through to the disk. Every rank calls it after its last write.

        Each rank does so, because the ranks of another node have files of their own, or none.
        """
        self.ranks.exchange(None)  # every rank has written its files
        self.ranks.together(lambda: _sync(checkpoint))

    def save(self, step: int) -> None:
        """Report that the checkpoint of `step` is on disk."""
        self.ranks.first(lambda: self._attached.checkpoint(step))

    def confirm(self) -> None:
        """Raise `Fenced` if another trainer has the run: call it right before files are deleted or replaced.

        Every rank calls it. Outside of a training, between `close` and the next `attach`, it does nothing.
        """
        self.ranks.first(self.confirm_alone)

    def confirm_alone(self) -> None:
        """Do as `confirm`, on the only rank that deletes."""
        if self._session is not None:
            self._session.call(self._session.confirm)

    def take_wait_s(self) -> float:
        """Return the seconds that this rank waited for batches since the last call."""
        waited = self._attached.reader.waited_s
        total = sum(waited.values())
        waited.clear()
        return total

    def close(self) -> None:
        """Stop fetching."""
        if self._session is not None:
            self._session.close()
            self._session = None

    @property
    def _attached(self) -> TrainerSession[TensorBatch]:
        if self._session is None:
            raise RuntimeError("attach comes before batches")
        return self._session


def _sync(checkpoint: Path) -> None:
    if checkpoint.exists():
        sync_folder(checkpoint)
        sync(checkpoint.parent)


def _attach(session: TrainerSession[TensorBatch]) -> tuple[int, int]:
    attached = session.attach()
    return attached.epoch, attached.look_ahead


def check_settings(refused: dict[str, tuple[bool, object, str]]) -> None:
    """Raise `Invalid` for the first setting that is refused: name -> (refused, its value, why and the way out)."""
    for name, (wrong, value, why) in refused.items():
        if wrong:
            raise _refusal(f"{name} is {value}; {why}", name, value)


def check_origin(options: RunOptions, ranks: Ranks, what: str, run: str, written_by: int) -> None:
    """Raise `Invalid` if a checkpoint belongs to another run, or was written by another number of ranks."""
    if run != options.run:
        detail = (
            f"{what} is of run {run}, not {options.run}. Resume with RunOptions(run={run!r}), or start a new folder"
        )
        raise Invalid(detail, name="run", value=run, bound=options.run)
    if written_by != ranks.size and not options.allow_other_ranks:
        raise Invalid(
            f"{what} was written by {counted(written_by, 'rank')}; now there are {ranks.size}, so losses would "
            f"differ by rounding. Start {counted(written_by, 'rank')}, or set RunOptions(allow_other_ranks=True)",
            name="ranks",
            value=written_by,
            bound=ranks.size,
        )


def loss_scale(batch: TensorBatch) -> float:
    """Return the factor that makes the summed loss of a row its share of the mean over the loss tokens of all ranks.

    The frameworks average gradients over ranks, so it is ranks / loss tokens of the batch.
    """
    return batch.meta.dp_world_size / max(1, batch.meta.batch_loss_tokens)


def _ranks(device: torch.device) -> Ranks:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Ranks()
    control = dist.new_group(backend="gloo")  # NCCL cannot send what is in main memory
    return TorchRanks(device, control, control)


def _refusal(detail: str, name: str, value: object = None) -> Invalid:
    return Invalid(detail, name=name, value=value)
