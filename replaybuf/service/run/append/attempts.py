"""Deletes what append attempts left behind that were cut between their two steps, on a Redis Cluster."""

from __future__ import annotations

import logging

from replaybuf.service.run.journal import Journal

logger = logging.getLogger(__name__)

SWEEP_PERIOD_S = 600.0
"""An attempt may take so long. One that takes twice as long is refused, and starts again."""


class AttemptSweep:
    """Sweeps the attempts of one run, on its leader."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._next_s = journal.clock.monotonic() + SWEEP_PERIOD_S

    async def tick(self) -> None:
        """Sweep when it is due. Raises `NotLeader`."""
        journal = self._journal
        if journal.store.groups.buckets is None or journal.clock.monotonic() < self._next_s:
            return
        self._next_s = journal.clock.monotonic() + SWEEP_PERIOD_S
        if swept := await journal.store.groups.sweep(journal.name, journal.token):
            logger.info("cut appends removed run=%s payloads=%d", journal.name, swept)
