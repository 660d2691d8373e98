"""The feed without a service: batches from a source, and nobody to report to."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from replaybuf.client.exports.reader import ExportReader
from replaybuf.client.exports.steps import RecordedSteps, stored_batches
from replaybuf.errors import Invalid, counted
from replaybuf.wire.answer.run_status import RunFacts
from replaybuf.wire.config import Cost
from replaybuf_trainer.feeds.feed import Feed
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.reading import TensorBatch, read_tensors


class Source(Protocol):
    """Batches that need no service."""

    def facts(self) -> RunFacts:
        """Return the facts of the run that the batches are of."""

    def bodies(self, step: int, dp_rank: int = 0, dp_world_size: int = 1) -> Iterator[memoryview]:
        """Yield the bodies of one rank after `step` batches."""


class OfflineFeed(Feed):
    """The batches of a source; nobody gets reports."""

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

    @contextlib.contextmanager
    def batches(self) -> Iterator[Iterator[TensorBatch]]:
        """Open the batches; they end with the source and with `stop`."""
        yield self._ranks.in_step(self._read())

    def _read(self) -> Iterator[TensorBatch]:
        for body in self._source.bodies(self._step, self._ranks.rank, self._ranks.size):
            if self._stopping.is_set():
                return
            yield read_tensors(body)

    def stop(self) -> None:
        """End the batches."""
        self._stopping.set()


logger = logging.getLogger(__name__)


class ExportedBatches:
    """The batches of a folder of `replaybuf export`, each once.

    Recorded steps come in their order. Steps with a group whose rollouts were freed before the export are left out. An
    export without any step has its groups cut into batches as the configuration says. Raises `Invalid` for a folder
    that is not an export or has no batch.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = ExportReader(folder)
        self._recorded = RecordedSteps(self._reader)
        manifest, recorded = self._reader.manifest, self._recorded
        if not recorded.steps and not (manifest.rows["rollouts"] and not manifest.steps):
            raise Invalid(f"{folder} has no batch to train on: {self._lack()}", name="from_export", value=str(folder))
        if recorded.missing:
            logger.warning(
                "left out: %d of %s: %s", len(recorded.missing), counted(len(manifest.steps), "step"), self._lack()
            )

    def facts(self) -> RunFacts:
        """Return the facts of the exported run."""
        return self._reader.config(RunFacts)

    def bodies(self, step: int, dp_rank: int = 0, dp_world_size: int = 1) -> Iterator[memoryview]:
        """Yield the bodies of one rank; `step`: number of batches to skip."""
        if self._recorded.steps:
            return (self._recorded.body(exported, dp_rank, dp_world_size) for exported in self._recorded.steps[step:])
        return stored_batches(self._reader, dp_rank, dp_world_size, skip=step)

    def _lack(self) -> str:
        missing = self._recorded.missing
        if not missing:
            return "it holds no rollouts"
        step, group_id = next(iter(missing.items()))
        return (
            f"the rollouts of group {group_id!r} of step {step} are not in the export, because a checkpoint had freed "
            "them; keep the bytes of a run by a cursor, or export it earlier"
        )
