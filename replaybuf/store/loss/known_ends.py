"""How far the streams of each run are known to reach: a Redis that holds less has lost acknowledged data.

The ends live in memory and, with a folder, in files that are written before anything is acknowledged. So a restart too
notices a Redis that was cut or replaced.
"""

from __future__ import annotations

import logging
from pathlib import Path

from replaybuf.store.loss.ends import NO_ENDS, Ends
from replaybuf.store.loss.saved_ends import SavedEnds

logger = logging.getLogger(__name__)


class KnownEnds:
    """The furthest ends by run that this process knows to be confirmed. They never move back, except by `forget`."""

    def __init__(self) -> None:
        self._ends: dict[str, Ends] = {}
        self._saved: SavedEnds | None = None

    @property
    def runs(self) -> list[str]:
        """List the runs with a known end."""
        return [run for run, ends in self._ends.items() if ends]

    def of(self, run: str) -> Ends:
        """Return how far the streams of a run are known to reach."""
        return self._ends.get(run, NO_ENDS)

    def advance(self, run: str, ends: Ends) -> None:
        """Record that both streams reach at least these ends, also in the file of the run.

        Ends of an older incarnation, from work that began before the run was deleted, are ignored.
        """
        known = self._ends.get(run, NO_ENDS)
        if ends == known or ends.incarnation < known.incarnation:
            return
        if ends.incarnation > known.incarnation:
            furthest = ends
        else:
            group = ends if (ends.group, ends.payload_key) > (known.group, known.payload_key) else known
            entry = ends if (ends.entry, ends.entry_key) > (known.entry, known.entry_key) else known
            furthest = Ends(entry.entry, group.group, group.payload_key, known.incarnation, entry.entry_key)
        if furthest == known:
            return
        self._ends[run] = furthest
        if self._saved:
            self._saved.write(run, furthest)

    def forget(self, run: str) -> None:
        """Forget a run that was deleted, or that continues from what a relaxed Redis has kept."""
        self._ends.pop(run, None)
        if self._saved:
            self._saved.delete(run)

    def begin(self, run: str, incarnation: int) -> None:
        """Forget the ends of an older incarnation of a run: this one has none yet."""
        if incarnation > self.of(run).incarnation:
            self.forget(run)
            self._ends[run] = Ends(0, 0, "", incarnation)

    def load(self, folder: Path) -> None:
        """Read the ends that an earlier process saved in `folder`, and save them there from now on.

        A folder that cannot be used is logged: a restart then cannot notice a loss.
        """
        saved = SavedEnds(folder)
        try:
            ends_by_run = saved.load()
        except OSError as error:
            logger.warning("acknowledged ends are not kept folder=%s: %s", folder, error)
            return
        for run, ends in ends_by_run.items():
            self.advance(run, ends)
        self._saved = saved

    def close(self) -> None:
        """Close the files."""
        if self._saved:
            self._saved.close()

    def sync(self) -> None:
        """Bring the files to the disk. Blocks: call it in a thread while serving."""
        if self._saved:
            self._saved.sync()
