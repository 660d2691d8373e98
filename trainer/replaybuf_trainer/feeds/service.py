"""The feed of a run of the service."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from replaybuf.client.client import Client
from replaybuf.client.reader import ReaderOptions
from replaybuf.errors import Conflict, Fenced
from replaybuf.wire.config import Cost
from replaybuf.wire.contract import BodyOptions, WaitingAnswer
from replaybuf.wire.run_status import RunFacts
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.reading import TensorBatch, TensorReader
from replaybuf_trainer.retries import Retries

logger = logging.getLogger(__name__)


class ServiceFeed:
    """A run of the service, by `replaybuf.client`; any other trainer can make the same calls.

    Calls are repeated while the service is unreachable, for at most `service_timeout_s`. Every rank reads its own part
    of a batch; only the first one changes the run.
    """

    def __init__(self, options: TrainOptions, client: Client, ranks: Ranks | None = None) -> None:
        self._options = options
        self._client = client
        self._ranks = ranks or Ranks()
        self._retries = Retries(options.service_timeout_s)
        self._reader: TensorReader | None = None
        self._published: dict[str, int] = {}
        self._confirmed = ""

    def facts(self) -> RunFacts:
        """Return the facts of the run's configuration."""
        facts = self._retries.call(self._client.get_run).facts()
        self._confirmed = min(facts.adapters, default="")
        return facts

    def attach(self, step: int, cost: Cost) -> None:
        """Take the run over at `step`; every older trainer is fenced."""
        options, ranks = self._options, self._ranks
        self._epoch, step, self._published[""] = ranks.first(lambda: self._attach(step, cost))
        how = ReaderOptions(
            dp_rank=ranks.rank,
            dp_world_size=ranks.size,
            poll_s=options.poll_s,
            wait_ms=options.wait_ms,
            prefetch=options.prefetch,
            service_timeout_s=options.service_timeout_s,
        )
        self._reader = TensorReader(self._client, self._epoch, step, how)
        if self._retries.stopped:  # `stop` came before there was a reader
            self._reader.stop()
        logger.info("attached run=%s epoch=%d step=%d ranks=%d", options.run, self._epoch, step, ranks.size)

    def _attach(self, step: int, cost: Cost) -> tuple[int, int, int]:
        extras: BodyOptions = {"lengths": True, "reward_parts": True} if self._options.tables else {}
        attached = self._retries.call(
            lambda: self._client.attach(
                dp_world_size=self._ranks.size,
                resume_step=step,
                on_resume=self._options.on_resume,
                cost=cost,
                **extras,
            )
        )
        return attached.epoch, attached.step, attached.published_version

    @contextlib.contextmanager
    def batches(self) -> Iterator[Iterator[TensorBatch]]:
        """Open the reader, which requests the next batch while this one trains."""
        with self._attached_reader() as reader:
            yield self._ranks.in_step(reader)

    def ack(self) -> None:
        """Report that the newest batch is trained."""
        self._ranks.first(lambda: self._retries.call(self._attached_reader().ack))

    def publish(self, version: int, weights_uri: str | None, adapter: str = "") -> None:
        """Announce a version of an adapter that the engines have loaded."""
        self._ranks.first(
            lambda: self._retries.call(lambda: self._client.publish_policy(version, self._epoch, weights_uri, adapter))
        )
        self._published[adapter] = version

    def confirm(self) -> None:
        """Announce the published version again, which changes nothing. Raises `Fenced` for an older epoch."""
        try:
            adapter = self._confirmed
            self._client.publish_policy(self._published.get(adapter, 0), self._epoch, adapter=adapter)
        except Fenced:
            raise
        except Conflict:  # a newer version is published; the service checks the epoch first
            return

    def save(self, step: int, keep: int) -> None:
        """Report that the checkpoint of `step` is on disk."""
        self._ranks.first(lambda: self._retries.call(lambda: self._client.checkpoint(step, self._epoch, keep=keep)))

    def waiting(self) -> WaitingAnswer | None:
        """Return the newest answer of the service that there is no batch, while the trainer waits."""
        return self._reader.waiting if self._reader else None

    def take_waits(self) -> dict[str, float]:
        """Return the seconds waited for batches since the last call, by reason of the service."""
        reader = self._attached_reader()
        taken = dict(reader.waited_s)
        reader.waited_s.clear()
        return taken

    def stop(self) -> None:
        """End retries and the batches."""
        self._retries.stop()
        if self._reader:
            self._reader.stop()

    def _attached_reader(self) -> TensorReader:
        if self._reader is None:
            raise RuntimeError("attach comes before batches")
        return self._reader
