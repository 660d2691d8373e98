"""How far the streams of each run are known to reach: a Redis that holds less has lost acknowledged data.

The ends live in memory and, with a folder, in one file per run, so that a restart notices a Redis that was cut or
replaced while the service was down. A file is at most a second behind.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

_SUFFIX = ".json"


class Ends(msgspec.Struct, frozen=True):
    """Where the streams of a run end: number of the newest ledger entry and of the newest group; 0 = none.

    `payload_key`: key of that group's payload, "" if unknown. It is random, so it identifies the history: an older
    Redis on which others went on has another group under the same number.
    """

    entry: int
    group: int
    payload_key: str = ""


NO_ENDS = Ends(0, 0)


class KnownEnds:
    """The furthest ends by run that this process has seen confirmed. They never move back, except by `forget`."""

    def __init__(self) -> None:
        self._ends: dict[str, Ends] = {}
        self._saved: dict[str, Ends] = {}
        self._folder: Path | None = None
        self._failing = False

    @property
    def runs(self) -> list[str]:
        """List the runs with a known end."""
        return list(self._ends)

    def of(self, run: str) -> Ends:
        """Return how far the streams of a run are known to reach."""
        return self._ends.get(run, NO_ENDS)

    def advance(self, run: str, ends: Ends) -> None:
        """Record that both streams reach at least these ends."""
        known = self.of(run)
        newest = ends if (ends.group, ends.payload_key) > (known.group, known.payload_key) else known
        self._ends[run] = Ends(max(known.entry, ends.entry), newest.group, newest.payload_key)

    def forget(self, run: str) -> None:
        """Forget a run that was deleted, or that continues from what a relaxed Redis has kept."""
        self._ends.pop(run, None)
        self._saved.pop(run, None)
        path = self.path_of(run)
        if path:
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ files

    def path_of(self, run: str) -> Path | None:
        """Return the file of a run; None without a folder."""
        return self._folder / f"{run}{_SUFFIX}" if self._folder else None

    def load(self, folder: Path) -> None:
        """Read the ends that an earlier process saved in `folder`, and save them there from now on.

        A folder that cannot be written is logged: a restart then cannot notice a loss. So is a file that does not
        decode, as after a crash of the machine.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = {path.stem: path.read_bytes() for path in folder.glob(f"*{_SUFFIX}")}
        except OSError as error:
            logger.warning("acknowledged ends are not kept folder=%s: %s", folder, error)
            return
        self._folder = folder
        for run, raw in found.items():
            try:
                self._saved[run] = msgspec.json.decode(raw, type=Ends)
                self.advance(run, self._saved[run])
            except msgspec.DecodeError as error:
                logger.warning("acknowledged ends are ignored file=%s: %s", self.path_of(run), error)

    def save(self) -> None:
        """Write the ends that have changed, each file atomically. Blocks: call it in a thread while serving."""
        for run, ends in list(self._ends.items()):
            path = self.path_of(run)
            if path is None or self._saved.get(run) == ends:
                continue
            scratch = path.with_suffix(f".{os.getpid()}")
            try:
                scratch.write_bytes(msgspec.json.encode(ends))
                scratch.replace(path)
            except OSError as error:
                if not self._failing:
                    logger.warning("acknowledged ends cannot be saved file=%s: %s", path, error)
                self._failing = True
                return
            self._saved[run], self._failing = ends, False
            if run not in self._ends:  # forgotten meanwhile
                self.forget(run)
