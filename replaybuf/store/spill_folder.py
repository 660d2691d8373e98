"""Folder of spilled frames: on a local file system, or in an object store by fsspec. Every call blocks.

::

    spill.url/RUN-RANDOM/replaybuf-spill          mark: this folder is there, and has all of its files
    spill.url/RUN-RANDOM/12/12345-DIGEST          frame of group 12345

The mark separates a lost file from a lost folder. Without it a disk that is not mounted would look like a folder
without files, and every spilled group would become a dead letter. So without the mark each call raises `SpillAway`.

A write is durable when it returns and its folders are synced. fsspec's local files are not synced to disk, so local
folders are written here; object stores acknowledge an object once it is stored.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from replaybuf.errors import MissingExtra, SpillAway
from replaybuf.files import sync
from replaybuf.wire.config import LARGEST_STORED_BYTES
from replaybuf.wire.spill import number_in

MARK = "replaybuf-spill"
_UNFINISHED = ".new"


class SpillFolder(ABC):
    """The files below one `spill.url`; paths are relative to it. Any call may raise `SpillAway`."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def probe(self) -> None:
        """Write and delete a file."""

    @abstractmethod
    def check(self, folder: str) -> None:
        """Check that a run's folder is there."""

    @abstractmethod
    def create(self, folder: str) -> None:
        """Create a run's folder with its mark, durably."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write a file; it appears complete or not at all. It is durable after `sync`."""

    @abstractmethod
    def sync(self, paths: Iterable[str]) -> None:
        """Make the names of written files durable."""

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Read a file; None if it is missing in a folder that is there."""

    @abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; missing ones are ignored."""

    @abstractmethod
    def list_paths(self, folder: str) -> Iterator[list[str]]:
        """Yield the files of a run's folder, one subfolder at a time, with unfinished ones, without the mark."""

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Delete a run's folder with its frames. Files that no spill wrote stay, and so does the folder then."""

    @contextlib.contextmanager
    def _reaching(self, doing: str) -> Iterator[None]:
        """Raise `SpillAway` for any error of the store: an object store's library has errors of its own."""
        try:
            yield
        except SpillAway:
            raise
        except Exception as error:
            raise self._away(f"{doing}: {error or type(error).__name__}") from error

    def _away(self, why: str) -> SpillAway:
        detail = f"the spill folder {self.url} cannot be used: {why}. Nothing is lost: make the folder available again"
        return SpillAway(detail, name="spill.url", value=self.url)

    def _not_marked(self, folder: str) -> SpillAway:
        return self._away(
            f"{folder}/{MARK} is missing, so the folder is not mounted or was deleted. If its files are lost for good, "
            "create that file: their groups then become dead letters"
        )


class LocalFolder(SpillFolder):
    """A folder of a local file system, or of one that is mounted."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._root = Path(urlsplit(url).path)

    def probe(self) -> None:
        """Write and delete a file."""
        with self._reaching("write"):
            self._root.mkdir(parents=True, exist_ok=True)
            target = self._root / f"{MARK}-{secrets.token_hex(8)}"
            _write_synced(target, b"")
            target.unlink()

    def check(self, folder: str) -> None:
        """Check that a run's folder is there."""
        with self._reaching("find"):
            self._check_mark(folder)

    def create(self, folder: str) -> None:
        """Create a run's folder with its mark, durably."""
        with self._reaching("create"):
            self._root.mkdir(parents=True, exist_ok=True)
            (self._root / folder).mkdir(exist_ok=True)
            _write_synced(self._root / folder / MARK, b"")
            sync(self._root / folder)
            sync(self._root)

    def write(self, path: str, data: bytes) -> None:
        """Write a file."""
        with self._reaching("write"):
            try:
                self._write(self._root / path, data)
            except FileNotFoundError:  # a deletion removed the subfolder while it was empty
                self._write(self._root / path, data)

    def _write(self, target: Path, data: bytes) -> None:
        if not target.parent.exists():
            # Not `parents`: an empty mount point must not get a second folder of the run.
            target.parent.mkdir(exist_ok=True)
            sync(target.parent.parent)
        # A name of its own: a former leader that is stopped within a write of this file must not cut ours later.
        unfinished = target.with_name(f"{target.name}.{secrets.token_hex(4)}{_UNFINISHED}")
        try:
            _write_synced(unfinished, data)
            unfinished.replace(target)
        except OSError:
            with contextlib.suppress(OSError):  # a full disk needs its space back
                unfinished.unlink()
            raise

    def sync(self, paths: Iterable[str]) -> None:
        """Make the names of written files durable."""
        with self._reaching("sync"):
            for part in {path.rpartition("/")[0] for path in paths}:
                try:
                    sync(self._root / part)
                except FileNotFoundError:  # gone with its last file, which a checkpoint freed meanwhile
                    self._check_mark(part.partition("/")[0])

    def read(self, path: str) -> bytes | None:
        """Read a file; None if it is missing in a folder that is there."""
        with self._reaching("read"):
            try:
                with (self._root / path).open("rb") as file:
                    return file.read(min(os.fstat(file.fileno()).st_size, LARGEST_STORED_BYTES))
            except FileNotFoundError:
                self._check_mark(path.partition("/")[0])
                return None

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; missing ones are ignored."""
        with self._reaching("delete"):
            parts = set()
            for path in paths:
                (self._root / path).unlink(missing_ok=True)
                parts.add(path.rpartition("/")[0])
            for part in parts:
                with contextlib.suppress(OSError):  # other files are in it
                    (self._root / part).rmdir()
            for folder in {part.partition("/")[0] for part in parts}:
                self._check_mark(folder)

    def list_paths(self, folder: str) -> Iterator[list[str]]:
        """Yield the files of a run's folder, one subfolder at a time."""
        with self._reaching("list"):
            self._check_mark(folder)
            for part in sorted(entry for entry in (self._root / folder).iterdir() if entry.is_dir()):
                with contextlib.suppress(FileNotFoundError):  # another server removed it with its last file
                    yield [f"{folder}/{part.name}/{entry.name}" for entry in part.iterdir()]

    def remove(self, folder: str) -> None:
        """Delete a run's folder with its frames."""
        with self._reaching("remove"):
            if not (self._root / folder).exists():
                return
            for paths in self.list_paths(folder):
                self.delete(path for path in paths if number_in(path) is not None)
            for part in (self._root / folder).iterdir():
                with contextlib.suppress(OSError):  # somebody else's file is in it, or it is the mark
                    part.rmdir()
            if [entry.name for entry in (self._root / folder).iterdir()] == [MARK]:
                (self._root / folder / MARK).unlink()
                (self._root / folder).rmdir()

    def _check_mark(self, folder: str) -> None:
        if not (self._root / folder / MARK).exists():
            raise self._not_marked(folder)


class ObjectFolder(SpillFolder):
    """A folder of an object store, by fsspec and the package of the store."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        try:
            import fsspec  # an extra, and it takes 50 ms

            with self._reaching("open"):
                self._store: Any = fsspec.filesystem(urlsplit(url).scheme, use_listings_cache=False)
        except ImportError as error:
            raise MissingExtra("a spill folder in an object store", "spill") from error
        self._root = self._store._strip_protocol(url).rstrip("/")

    def probe(self) -> None:
        """Write and delete a file."""
        with self._reaching("write"):
            target = f"{self._root}/{MARK}-{secrets.token_hex(8)}"
            self._store.pipe_file(target, b"")
            self._store.rm_file(target)

    def check(self, folder: str) -> None:
        """Check that a run's folder is there."""
        with self._reaching("find"):
            self._check_mark(folder)

    def create(self, folder: str) -> None:
        """Create a run's folder with its mark, durably."""
        with self._reaching("create"):
            self._store.pipe_file(f"{self._root}/{folder}/{MARK}", b"")

    def write(self, path: str, data: bytes) -> None:
        """Write a file."""
        with self._reaching("write"):
            self._store.pipe_file(f"{self._root}/{path}", data)

    def sync(self, paths: Iterable[str]) -> None:
        """Do nothing: an object is stored with its name."""

    def read(self, path: str) -> bytes | None:
        """Read a file; None if it is missing in a folder that is there."""
        with self._reaching("read"):
            try:
                content: bytes = self._store.cat_file(f"{self._root}/{path}", start=0, end=LARGEST_STORED_BYTES)
            except FileNotFoundError:
                self._check_mark(path.partition("/")[0])
                return None
            return content

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; missing ones are ignored."""
        with self._reaching("delete"):
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._store.rm_file(f"{self._root}/{path}")

    def list_paths(self, folder: str) -> Iterator[list[str]]:
        """Yield the files of a run's folder, one subfolder at a time."""
        with self._reaching("list"):
            self._check_mark(folder)
            for part in self._store.ls(f"{self._root}/{folder}", detail=True):
                if part["type"] == "directory":
                    names = self._store.ls(part["name"], detail=False)
                    yield [f"{folder}/{'/'.join(name.split('/')[-2:])}" for name in names]

    def remove(self, folder: str) -> None:
        """Delete a run's folder with its frames."""
        with self._reaching("remove"):
            if not self._store.exists(f"{self._root}/{folder}/{MARK}"):
                return
            for paths in self.list_paths(folder):
                self.delete(path for path in paths if number_in(path) is not None)
            self._store.rm_file(f"{self._root}/{folder}/{MARK}")

    def _check_mark(self, folder: str) -> None:
        if not self._store.exists(f"{self._root}/{folder}/{MARK}"):
            raise self._not_marked(folder)


def open_folder(url: str) -> SpillFolder:
    """Open the folder of a `spill.url`. Raises `MissingExtra` without the packages of an object store."""
    return LocalFolder(url) if urlsplit(url).scheme == "file" else ObjectFolder(url)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
