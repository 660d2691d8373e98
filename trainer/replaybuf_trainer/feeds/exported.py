"""The batches of an export: the recorded steps as they were trained, or all its groups in the order of storing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from replaybuf.client.exports.reader import ExportReader
from replaybuf.client.exports.steps import RecordedSteps, stored_batches
from replaybuf.errors import Invalid, counted
from replaybuf.wire.answer.run_status import RunFacts

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
