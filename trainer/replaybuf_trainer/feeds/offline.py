"""The feed without a service: batches from a source, and nobody to report to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

from replaybuf.wire.answer.run_status import RunFacts
from replaybuf.wire.config import Cost
from replaybuf.wire.contract import WaitingAnswer
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.reading import TensorBatch, read_tensors


class Source(Protocol):
    """Batches that need no service."""

    def facts(self) -> RunFacts:
        """Return the facts of the run that the batches are of."""

    def bodies(self, step: int, dp_rank: int = 0, dp_world_size: int = 1) -> Iterator[memoryview]:
        """Yield the bodies of one rank after `step` batches."""


class OfflineFeed:
    """The batches of a source. Acks, publications and checkpoints are not reported to anybody."""

    def __init__(self, source: Source, ranks: Ranks | None = None) -> None:
        self._source = source
        self._ranks = ranks or Ranks()
        self._step = 0
        self._stopping = threading.Event()

    def facts(self) -> RunFacts:
        """Return the facts of the source."""
        return self._source.facts()

    def attach(self, step: int, cost: Cost) -> None:
        """Begin after `step` batches; the cost is that of the recorded layout."""
        self._step = step

    def settle(self, step: int) -> None:
        """Do nothing."""

    @contextlib.contextmanager
    def batches(self) -> Iterator[Iterator[TensorBatch]]:
        """Open the batches; they end with the source and with `stop`."""
        yield self._ranks.in_step(self._read())

    def _read(self) -> Iterator[TensorBatch]:
        for body in self._source.bodies(self._step, self._ranks.rank, self._ranks.size):
            if self._stopping.is_set():
                return
            yield read_tensors(body)

    def ack(self, metrics: Mapping[str, float | None] | None = None) -> None:
        """Do nothing."""

    def publish(self, version: int, weights_uri: str | None, adapter: str = "") -> None:
        """Do nothing."""

    def confirm(self) -> None:
        """Do nothing: no other trainer can have the run."""

    def save(self, step: int) -> None:
        """Do nothing."""

    def waiting(self) -> WaitingAnswer | None:
        """Return None: a source never waits for a producer."""
        return None

    def take_waits(self) -> dict[str, float]:
        """Return no waits."""
        return {}

    def stop(self) -> None:
        """End the batches."""
        self._stopping.set()
