"""The feed of a run of the service."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping

import msgspec

from replaybuf.client.client import Client
from replaybuf.client.reader import ReaderOptions
from replaybuf.client.session import TrainerSession
from replaybuf.wire.answer.run_status import RunFacts
from replaybuf.wire.config import Cost
from replaybuf.wire.contract import BodyOptions, WaitingAnswer
from replaybuf_trainer.feeds.feed import Feed
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.reading import TensorBatch, TensorReader

logger = logging.getLogger(__name__)


class ServiceFeed(Feed):
    """A run of the service, by the session of `replaybuf.client`; any other trainer can make the same calls.

    Every rank reads its own part of a batch; only the first one changes the run.
    """

    def __init__(self, options: TrainOptions, client: Client, ranks: Ranks | None = None) -> None:
        self._options = options
        self._client = client
        self._ranks = ranks or Ranks()
        extras: BodyOptions = {"lengths": True, "reward_parts": True} if options.tables else {}
        self._session = TrainerSession(
            client,
            self._open_reader,
            keep_checkpoints=options.keep_checkpoints,
            service_timeout_s=options.service_timeout_s,
            dp_world_size=self._ranks.size,
            on_resume=options.on_resume,
            **extras,
        )

    def _open_reader(self, epoch: int, step: int) -> TensorReader:
        options = self._options
        how = ReaderOptions(
            dp_rank=self._ranks.rank,
            dp_world_size=self._ranks.size,
            service_timeout_s=options.service_timeout_s,
            **msgspec.structs.asdict(options.reader_options),
        )
        return TensorReader(self._client, epoch, step, how)

    def facts(self) -> RunFacts:
        """Return the facts of the run's configuration."""
        return self._session.read_facts()

    def attach(self, step: int, cost: Cost) -> None:
        """Take the run over at `step`; every older trainer is fenced."""
        epoch, step = self._ranks.first(lambda: self._attach(step, cost))
        self._session.join(epoch, step)
        logger.info("attached run=%s epoch=%d step=%d ranks=%d", self._options.run, epoch, step, self._ranks.size)

    def _attach(self, step: int, cost: Cost) -> tuple[int, int]:
        attached = self._session.attach(step, cost=cost)
        return attached.epoch, attached.step

    def settle(self, step: int) -> None:
        """Report the checkpoint of `step`, after which nothing is left to train, if the report was lost."""
        self._ranks.first(lambda: self._session.settle(step))

    @contextlib.contextmanager
    def batches(self) -> Iterator[Iterator[TensorBatch]]:
        """Open the reader, which requests the next batch while this one trains."""
        with self._session as session:
            yield self._ranks.in_step(session)

    def ack(self, metrics: Mapping[str, float | None] | None = None) -> None:
        """Report that the newest batch is trained."""
        self._ranks.first(lambda: self._session.ack(metrics=metrics))

    def publish(self, version: int, weights_uri: str | None, adapter: str = "") -> None:
        """Announce a version of an adapter that the engines have loaded."""
        self._ranks.first(lambda: self._session.publish(weights_uri, version, adapter))

    def confirm(self) -> None:
        """Ask once whether this trainer has the run. Raises `Fenced` for an older epoch."""
        self._session.confirm()

    def save(self, step: int) -> None:
        """Report that the checkpoint of `step` is on disk."""
        self._ranks.first(lambda: self._session.checkpoint(step))

    def waiting(self) -> WaitingAnswer | None:
        """Return the newest answer of the service that there is no batch, while the trainer waits."""
        return self._session.waiting

    def take_waits(self) -> dict[str, float]:
        """Return the seconds waited for batches since the last call, by reason of the service."""
        waited_s = self._session.reader.waited_s
        taken = dict(waited_s)
        waited_s.clear()
        return taken

    def stop(self) -> None:
        """End retries and the batches."""
        self._session.stop()
