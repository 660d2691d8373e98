"""How far the streams of each run are known to reach: a Redis that holds less has lost acknowledged data.

The ends live in memory and, with a folder, in files that are written before anything is acknowledged. So a restart too
notices a Redis that was cut or replaced.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from replaybuf.wire.config import RUN_NAME
from replaybuf.wire.decoding import prepared

logger = logging.getLogger(__name__)

SUFFIX = ".ends"
LINE_BYTES = 1024
"""A payload key of the longest names takes at most 700 bytes as JSON."""
LINES = 2
MOST_OPEN = 128
"""Files kept open: opening one takes as long as writing a line, and a service has about 100 live runs."""
SYNC_S = 0.2
"""Time of one call of `sync`; the files left wait for the next."""


class Ends(msgspec.Struct, frozen=True, order=True):
    """Where the streams of a run end: number of the newest ledger entry and of the newest group; 0 = none.

    - `payload_key`: key of that group's payload, "" if unknown. It is random, so it identifies the history: an older
      Redis on which others went on has another group under the same number.
    - `entry_key`: that ledger entry's key, "" if unknown. It is random for the same reason.
    - `incarnation`: how often runs of this name had been deleted before, or a loss accepted. The run then continues at
      older ends than were known.
    """

    entry: int
    group: int
    payload_key: str = ""
    incarnation: int = 0
    entry_key: str = ""

    def __bool__(self) -> bool:
        return bool(self.entry or self.group)


NO_ENDS = Ends(0, 0)


def read_known(reply: Sequence[Any]) -> Ends:
    """Return the ends that are known, from the reply `older` of a function."""
    entry, group, payload_key, incarnation, entry_key = reply[4:9]
    return Ends(int(entry), int(group), payload_key.decode(errors="replace"), int(incarnation), entry_key.decode())


class Loss(NamedTuple):
    """A Redis whose streams end at `shown`, before what is `known`."""

    shown: Ends
    known: Ends

    @property
    def entries(self) -> int:
        """Ledger entries that are missing."""
        return max(0, self.known.entry - self.shown.entry)

    @property
    def groups(self) -> int:
        """Groups that are missing; one of them may be there as another group under its number."""
        return max(0, self.known.group - self.shown.group)


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

    @property
    def unsynced(self) -> bool:
        """Whether `sync` has something to do."""
        return bool(self._saved and self._saved.unsynced)

    def sync(self) -> None:
        """Bring the files to the disk. Blocks: call it in a thread while serving."""
        if self._saved:
            self._saved.sync()


class SavedEnds:
    """Known ends in `folder`, one file per run. One that cannot be written is logged, and the run goes on without it.

    A file has two lines of fixed size, written in turn. Each is JSON with its CRC-32, so a line that a crash cut is
    never read, and the line before it is still there. A line is in the page cache before `write` returns: it survives
    the end of the process. After `sync` it survives a loss of power too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_line: dict[str, int] = {}
        self.unsynced: set[str] = set()
        self._files: dict[str, int] = {}
        """Open files by run, the one that was written last at the end."""
        self._missing: set[str] = set()
        """Runs whose file somebody has deleted: a line written to the open one would be lost."""
        self._failing = False

    def path_of(self, run: str) -> Path:
        """Return the file of a run."""
        return self._folder / f"{run}{SUFFIX}"

    def load(self) -> dict[str, Ends]:
        """Read all files, and create the folder. Files without a whole line are logged. Raises `OSError`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        ends_by_run: dict[str, Ends] = {}
        for path in self._folder.glob(f"*{SUFFIX}"):
            run = path.name.removesuffix(SUFFIX)
            if not RUN_NAME.fullmatch(run):
                logger.warning("acknowledged ends are ignored file=%s: its name is not that of a run", path)
                continue
            with path.open("rb") as file:
                raw = file.read(LINES * LINE_BYTES)
            lines = [_decode(raw[at * LINE_BYTES : (at + 1) * LINE_BYTES]) for at in range(LINES)]
            # Ends never move back: the further line is the newer one, and the other one is overwritten next.
            newest = max(range(LINES), key=lambda at: _order(lines[at]))
            ends = lines[newest]
            if ends is None:
                logger.warning("acknowledged ends are ignored file=%s: no line has its checksum", path)
                continue
            ends_by_run[run], self._next_line[run] = ends, (newest + 1) % LINES
        return ends_by_run

    def write(self, run: str, ends: Ends) -> None:
        """Write the ends of a run."""
        text = msgspec.json.encode(ends)
        line = b"%08x %s" % (zlib.crc32(text), text)
        at = self._next_line.get(run, 0)
        try:
            self._write(run, line.ljust(LINE_BYTES - 1) + b"\n", at * LINE_BYTES)
        except OSError as error:
            self._warn(run, error)
            return
        self._failing = False
        self._next_line[run] = (at + 1) % LINES
        self.unsynced.add(run)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _write(self, run: str, line: bytes, at: int) -> None:
        """Write a line. Raises `OSError`; the file is then opened again for the next one."""
        if run in self._missing:
            self._missing.discard(run)
            self._close(run)
        file = self._files.pop(run, None)
        if file is None:
            file = os.open(self.path_of(run), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._files[run] = file  # behind those that were written before
        try:
            if os.pwrite(file, line, at) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._close(run)
            raise
        if len(self._files) > MOST_OPEN:
            self._close(next(iter(self._files)))

    def _close(self, run: str) -> None:
        file = self._files.pop(run, None)
        if file is not None:
            os.close(file)

    def _warn(self, run: str, error: OSError) -> None:
        """Log a fault once until a line is written again."""
        if not self._failing:
            logger.warning("acknowledged ends cannot be saved file=%s: %s", self.path_of(run), error)
        self._failing = True

    def delete(self, run: str) -> None:
        """Delete the file of a run."""
        self._close(run)
        self._next_line.pop(run, None)
        self.unsynced.discard(run)
        self.path_of(run).unlink(missing_ok=True)

    def sync(self) -> None:
        """Bring written files to the disk; what fails is tried again in the next call. Blocks: call it in a thread."""
        until_s = time.monotonic() + SYNC_S
        for run in list(self.unsynced):
            self.unsynced.discard(run)  # first: a line written meanwhile adds it again
            try:
                file = os.open(self.path_of(run), os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
            except FileNotFoundError:
                self._missing.add(run)
            except OSError as error:
                self.unsynced.add(run)
                self._warn(run, error)
                return
            if time.monotonic() > until_s:
                return


def _order(ends: Ends | None) -> tuple[int, Ends]:
    return (ends.incarnation, ends) if ends else (-1, NO_ENDS)


def _decode(line: bytes) -> Ends | None:
    """Return the ends of a line; None if it is missing or was cut."""
    checksum, _, text = line.rstrip().partition(b" ")
    if len(line) != LINE_BYTES or checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        return msgspec.json.decode(text, type=prepared(Ends))
    except msgspec.DecodeError:
        return None
