"""Download of one version into a folder: parallel, verified shard by shard, and resumable.

The folder holds files of their full size from the start. Bytes that are not there yet are holes, so what is verified
needs no list of its own: after a restart every shard that does not begin with a hole is hashed again, and only those
that differ from the manifest are downloaded. A connection that is cut costs one piece of 4 MiB.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from replaybuf.errors import ServiceUnavailable
from replaybuf_trainer.faults import Superseded, WrongDigest
from replaybuf_trainer.weight_download.manifest import PIECE_BYTES, Manifest, sha256_of, shard_ranges
from replaybuf_trainer.weight_download.sources import Source

logger = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 4
READ_TRIES = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses between the tries of one read double: eight tries take 12 s."""
DIGEST_TRIES = 3


class Shard(NamedTuple):
    """A part of a file, and the SHA-256 that it must have."""

    name: str
    number: int
    start: int
    end: int
    digest: str


class Download:
    """One version on its way. `received_bytes` came from the source, `verified_bytes` are in the folder."""

    def __init__(self, source: Source, uri: str, manifest: Manifest, folder: Path, stopping: threading.Event) -> None:
        self.received_bytes = self.verified_bytes = 0
        self._source = source
        self._uri = uri
        self._manifest = manifest
        self._folder = folder
        self._stopping = stopping
        self._failed = threading.Event()
        self._next = threading.Lock()
        self._shards = self._all_shards()

    def run(self) -> None:
        """Bring all files into the folder; the caller makes them durable.

        Raises `Superseded` after `stopping`, `WrongDigest`, `OSError` of the disk, and what the source raises after
        all tries.
        """
        for file in self._manifest.files:
            path = self._folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as opened:
                opened.truncate(file.size)
        with ThreadPoolExecutor(THREADS, "weights-download") as threads:
            workers = [threads.submit(self._work) for _ in range(THREADS)]
        faults = [error for worker in workers if (error := worker.exception())]
        if faults:  # the other threads end as superseded, because one failed
            raise next((error for error in faults if not isinstance(error, Superseded)), faults[0])

    def _all_shards(self) -> Iterator[Shard]:
        for file in self._manifest.files:
            parts = shard_ranges(file.size, self._manifest.shard_bytes)
            for number, ((start, end), digest) in enumerate(zip(parts, file.shards, strict=True)):
                yield Shard(file.name, number, start, end, digest)

    def _work(self) -> None:
        """Bring shards until there are none, or until another thread fails."""
        try:
            while not self._failed.is_set():
                with self._next:
                    shard = next(self._shards, None)
                if shard is None:
                    return
                self._bring(shard)
                with self._next:
                    self.verified_bytes += shard.end - shard.start
        except BaseException:
            self._failed.set()
            raise

    def _bring(self, shard: Shard) -> None:
        path = self._folder / shard.name
        if not _begins_with_hole(path, shard) and sha256_of(path, shard.start, shard.end) == shard.digest:
            return
        for attempt in range(1, DIGEST_TRIES + 1):
            arrived = self._receive(path, shard)
            if arrived == shard.digest:
                return
            what = f"shard {shard.number} of {shard.name} from {self._uri}"
            logger.warning("%s has the SHA-256 %s, try %d of %d", what, arrived, attempt, DIGEST_TRIES)
        detail = f"{what} has the SHA-256 {arrived}; the manifest says {shard.digest}; tried {DIGEST_TRIES} times"
        raise WrongDigest(detail, name=shard.name, value=arrived, bound=shard.digest)

    def _receive(self, path: Path, shard: Shard) -> str:
        """Write a shard into its file; return its SHA-256."""
        digest = hashlib.sha256()
        descriptor = os.open(path, os.O_WRONLY)
        try:
            for start in range(shard.start, shard.end, PIECE_BYTES):
                end = min(start + PIECE_BYTES, shard.end)
                piece = patiently(lambda: self._source.read(shard.name, start, end), self._stops)  # noqa: B023
                digest.update(piece)
                _write_all(descriptor, piece, start)
                with self._next:
                    self.received_bytes += end - start
        finally:
            os.close(descriptor)
        return digest.hexdigest()

    def _stops(self, pause_s: float) -> bool:
        """Wait; return whether this download shall end, for a newer version or because another thread failed."""
        return self._stopping.wait(pause_s) or self._failed.is_set()


def patiently(read: Callable[[], T], stops: Callable[[float], bool]) -> T:
    """Repeat a read while it raises `ServiceUnavailable`, at most `READ_TRIES` times. Raises `Superseded`."""
    pause_s = FIRST_PAUSE_S
    for tries_left in reversed(range(READ_TRIES)):
        if stops(0.0):
            break
        try:
            return read()
        except ServiceUnavailable as error:
            if not tries_left:
                raise
            logger.warning("trying again in %g s: %s", pause_s, error.detail)
            if stops(pause_s):
                break
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    raise Superseded("the download ends before the version is complete", name="weights_uri")


def _begins_with_hole(path: Path, shard: Shard) -> bool:
    """Return whether nothing was written at the start of a shard; file systems without holes have none."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.lseek(descriptor, shard.start, os.SEEK_DATA) > shard.start
    except OSError as error:
        if error.errno == errno.ENXIO:  # no data up to the end of the file
            return True
        raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, piece: bytes | bytearray, start: int) -> None:
    view = memoryview(piece)
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written
