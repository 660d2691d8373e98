"""The file of a copy: a tar archive with one member per section, and a manifest with their digests as the last member.

A file that is cut has no manifest, and a changed one has other digests: both are refused before anything is restored.
The file appears under its name when it is whole and on disk.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from replaybuf.backup.section import (
    FORMAT,
    MomentSection,
    PayloadsSection,
    Section,
    Summary,
    decode_section,
    encode_section,
)
from replaybuf.errors import Conflict, Invalid

MANIFEST = "manifest.json"
MOST_MEMBER_BYTES = 1 << 30


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`sections`: name and SHA-256 of the members that count, in order; others are of earlier rounds."""

    format: int
    summary: Summary
    sections: list[tuple[str, str]]

    @property
    def digest(self) -> str:
        """SHA-256 of all digests: two files with the same digest hold the same."""
        return hashlib.sha256("".join(digest for _, digest in self.sections).encode()).hexdigest()


class ArchiveWriter:
    """A sink that writes a file; without `finish`, no file appears. Raises `Conflict` for a file that exists."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise Conflict(f"{path} exists; choose another file", name="to", value=str(path))
        self._path = path
        self._scratch = path.with_name(f".{path.name}.{os.getpid()}")
        self._number = 0
        self._payloads: list[tuple[str, str]] = []
        self._keys: list[tuple[str, str]] = []

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._scratch.open("wb")
        self._tar = tarfile.open(fileobj=self._file, mode="w|")  # closed by `finish` and `__exit__`
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._scratch.unlink(missing_ok=True)

    async def add(self, section: Section) -> None:
        """Write one section."""
        name = f"{self._number:08d}.msgpack"
        self._number += 1
        if isinstance(section, MomentSection):
            self._keys.clear()
        written = self._payloads if isinstance(section, PayloadsSection) else self._keys
        raw = encode_section(section)
        written.append((name, hashlib.sha256(raw).hexdigest()))
        self._add(name, raw)

    def finish(self, summary: Summary) -> Manifest:
        """Write the manifest and let the file appear."""
        manifest = Manifest(format=FORMAT, summary=summary, sections=[*self._keys, *self._payloads])
        self._add(MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._scratch.rename(self._path)
        _sync(self._path.parent)
        return manifest

    def _add(self, name: str, raw: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(raw)
        self._tar.addfile(member, io.BytesIO(raw))


def read_manifest(path: Path) -> Manifest:
    """Check a whole file by its digests and return its manifest.

    Raises `Invalid` for a file that is cut or changed, is no copy of a run, or has the format of a newer release.
    """
    digests: dict[str, str] = {}
    manifest: Manifest | None = None
    for name, raw in _members(path):
        if name == MANIFEST:
            manifest = _decode_manifest(path, raw)
        else:
            digests[name] = hashlib.sha256(raw).hexdigest()
    if manifest is None:
        raise _broken(path, "it has no manifest: the file is cut, or no backup")
    for name, digest in manifest.sections:
        if digests.get(name) != digest:
            raise _broken(path, f"the digest of {name} is {digests.get(name)}; the manifest has {digest}")
    return manifest


def read_sections(path: Path, manifest: Manifest) -> Iterator[Section]:
    """Read the sections that count. The file must have been checked by `read_manifest`."""
    counting = {name for name, _ in manifest.sections}
    for name, raw in _members(path):
        if name in counting:
            yield decode_section(raw)


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(path, "r|*") as tar:
            for member in tar:
                if member.size > MOST_MEMBER_BYTES:
                    raise _broken(path, f"{member.name} has {member.size} bytes; the maximum is {MOST_MEMBER_BYTES}")
                file = tar.extractfile(member)
                yield member.name, file.read() if file else b""
    except (OSError, tarfile.TarError) as error:
        raise _broken(path, str(error)) from error


def _decode_manifest(path: Path, raw: bytes) -> Manifest:
    try:
        found = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _broken(path, f"its manifest does not decode: {error}") from error
    if found.format > FORMAT:
        raise Invalid(
            f"{path} has format {found.format}, of replaybuf {found.summary.release}; the newest known is {FORMAT}",
            name="format",
            value=found.format,
            bound=FORMAT,
        )
    return found


def _broken(path: Path, why: str) -> Invalid:
    return Invalid(f"{path} cannot be restored: {why}. Nothing was restored", name="from", value=str(path))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
