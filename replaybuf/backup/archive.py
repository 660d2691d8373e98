"""The file of a copy: a tar archive with one member per section, and a manifest with their digests as the last member.

A file that is cut has no manifest, and a changed one has other digests: both are refused before anything is restored.
The manifest has a digest of itself. Files of format 1 lack it, and name payloads by their whole keys.
The file appears under its name when it is whole and on disk.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import secrets
import tarfile
import zlib
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
from replaybuf.files import sync
from replaybuf.store import keys
from replaybuf.wire.config import check_run_name

MANIFEST = "manifest.json"
MOST_MEMBER_BYTES = 1 << 30
MOST_HEADER_BYTES = 1 << 16
MOST_MEMBERS = 1 << 21
"""A member has about 8 MiB of payloads; their names and digests take 500 MB of memory at most."""
LONGEST_SHOWN = 200


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`sections`: name and SHA-256 of the members that count, in order; others are of earlier rounds.

    `digest`: SHA-256 of the other fields; two files with the same digest hold the same.
    """

    format: int
    summary: Summary
    sections: list[tuple[str, str]]
    digest: str = ""

    def sealed(self) -> Manifest:
        """Return this manifest with its digest."""
        content = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        return msgspec.structs.replace(self, digest=hashlib.sha256(content).hexdigest())


class ArchiveWriter:
    """A sink that writes a file; without `finish`, no file appears. Raises `Conflict` for a file that exists."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise _exists(path)
        self._path = path
        # Random: writers in two containers may have the same process id.
        self._scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
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
        """Write the manifest and let the file appear. Raises `Conflict` if another writer was faster."""
        manifest = Manifest(format=FORMAT, summary=summary, sections=[*self._keys, *self._payloads]).sealed()
        self._add(MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._name()
        sync(self._path.parent)
        return manifest

    def _name(self) -> None:
        """Give the file its name. A rename would replace a backup that was finished meanwhile."""
        try:
            os.link(self._scratch, self._path)
        except FileExistsError as error:
            raise _exists(self._path) from error
        except OSError:  # a file system without hard links
            if self._path.exists():
                raise _exists(self._path) from None
            self._scratch.rename(self._path)

    def _add(self, name: str, raw: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(raw)
        self._tar.addfile(member, io.BytesIO(raw))


def read_manifest(path: Path) -> Manifest:
    """Check a whole file by its digests and return its manifest.

    Raises `Invalid` for a file that is cut or changed, is not a copy of a run, has a run name that HTTP rejects, or has
    the format of a newer release.
    """
    digests: dict[str, str] = {}
    manifest: Manifest | None = None
    for name, raw in _members(path):
        if name in digests or manifest:
            raise _broken(path, f"two members are named {name}" if name in digests else f"{name} is after {MANIFEST}")
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
    """Read the sections that count. The file must have been checked by `read_manifest`.

    Raises `Invalid` for a section that is not of this run, and for a file that has changed since the check.
    """
    counting = dict(manifest.sections)
    for name, raw in _members(path):
        if name not in counting:
            continue
        if hashlib.sha256(raw).hexdigest() != counting[name]:
            raise _broken(path, f"{name} has changed since it was checked")
        try:
            section = decode_section(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _broken(path, f"{name} is not a section of a backup: {error}") from error
        if manifest.format == 1 and isinstance(section, PayloadsSection):
            section = _named_in_run(path, manifest.summary.run, section)
        yield section


def _named_in_run(path: Path, run: str, section: PayloadsSection) -> PayloadsSection:
    frames: dict[str, bytes] = {}
    for key, frame in section.frames.items():
        name = keys.payload_name(run, key)
        if name is None:
            raise _broken(path, f"it names the key {key[:LONGEST_SHOWN]!r}, which is not a payload of run {run}")
        frames[name] = frame
    return PayloadsSection(frames)


class _BoundedHeader(tarfile.TarInfo):
    """A member with a bounded size. tarfile reads long names and extended headers whole, before it returns a member."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Read a header. Raises `ReadError` for a member that is too large."""
        member = super().frombuf(buf, encoding, errors)
        most = MOST_MEMBER_BYTES if member.isreg() else MOST_HEADER_BYTES
        if not 0 <= member.size <= most:
            raise tarfile.ReadError(f"{member.name[:LONGEST_SHOWN]} has {member.size} bytes; the maximum is {most}")
        return member


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(path, "r|*", tarinfo=_BoundedHeader) as tar:
            for number, member in enumerate(tar, 1):
                if number > MOST_MEMBERS:
                    raise _broken(path, f"it has more than {MOST_MEMBERS} members")
                file = tar.extractfile(member)
                yield member.name, file.read() if file else b""
    except (OSError, EOFError, RecursionError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        raise _broken(path, str(error)) from error


def _decode_manifest(path: Path, raw: bytes) -> Manifest:
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _broken(path, f"its manifest does not decode: {error}") from error
    if manifest.format > FORMAT:
        raise Invalid(
            f"{path} has format {manifest.format}, of replaybuf {manifest.summary.release}; "
            f"the newest known is {FORMAT}",
            name="format",
            value=manifest.format,
            bound=FORMAT,
        )
    sealed = manifest.sealed()
    if (manifest.digest or manifest.format > 1) and manifest.digest != sealed.digest:
        raise _broken(path, f"the digest of {MANIFEST} is {sealed.digest}; it has {manifest.digest or 'none'}")
    try:
        check_run_name(manifest.summary.run)
    except Invalid as error:
        raise _broken(path, error.detail) from error
    return sealed


def _broken(path: Path, why: str) -> Invalid:
    return Invalid(f"{path} cannot be restored: {why}. Nothing was restored", name="from", value=str(path))


def _exists(path: Path) -> Conflict:
    return Conflict(f"{path} exists; choose another file", name="to", value=str(path))
