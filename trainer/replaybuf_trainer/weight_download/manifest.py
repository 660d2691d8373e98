"""The manifest of a weights folder: every file in shards of a bounded size, with a SHA-256 of each.

`weights-manifest.json` is in the folder that it describes::

    {"version": 12, "shard_bytes": 67108864,
     "files": [{"name": "model.safetensors", "size": 199229440, "shards": ["9f86d0...", "60303a...", "fd61a0..."]}]}

A manifest is input: it may come from another machine or an object store. Bounds are checked before anything else is
downloaded. The SHA-256 of the manifest itself identifies the weights; a publisher announces it with their address.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from replaybuf.errors import Invalid
from replaybuf.files import write_whole
from replaybuf.wire.decoding import prepared

MANIFEST = "weights-manifest.json"
SHARD_BYTES = 64 << 20
LARGEST_SHARD_BYTES = 1 << 30
LARGEST_MANIFEST_BYTES = 16 << 20
MOST_FILES = 4096
MOST_SHARDS = 1 << 17
"""8 TiB in shards of the default size; their digests fill half of the largest manifest."""
MOST_SEGMENTS = 8
LONGEST_SEGMENT_BYTES = 255
PIECE_BYTES = 4 << 20
"""Bytes that are read, hashed and written at a time."""
HASHES_AT_ONCE = 4


class WeightsFile(msgspec.Struct, frozen=True):
    """One file: its path below the folder, its size in bytes and the SHA-256 of each of its shards, in hex."""

    name: Annotated[str, Meta(min_length=1, max_length=2048)]
    size: Annotated[int, Meta(ge=0, le=1 << 50)]
    shards: list[Annotated[str, Meta(pattern=r"^[0-9a-f]{64}(?!\n)$")]]


class Manifest(msgspec.Struct, frozen=True):
    """The files of a version. All shards of a file have `shard_bytes`, except the last one."""

    version: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    shard_bytes: Annotated[int, Meta(ge=1, le=LARGEST_SHARD_BYTES)]
    files: Annotated[list[WeightsFile], Meta(min_length=1, max_length=MOST_FILES)]

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files)


def shard_ranges(size: int, shard_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each shard of a file."""
    for start in range(0, size, shard_bytes):
        yield start, min(start + shard_bytes, size)


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of a manifest's bytes, in hex."""
    return hashlib.sha256(content).hexdigest()


def write_manifest(folder: Path, version: int, shard_bytes: int = SHARD_BYTES) -> str:
    """Write the manifest of a complete weights folder into it, durably; return the digest of the manifest.

    Hidden files are left out. Raises `OSError`, and `Invalid` for a folder that no manifest may describe.
    """
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    names = sorted(path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts))
    with ThreadPoolExecutor(HASHES_AT_ONCE, "weights-hash") as threads:
        files = [_describe(folder, name, shard_bytes, threads) for name in names if name != MANIFEST]
    content = msgspec.json.encode(Manifest(version, shard_bytes, files))
    decode_manifest(content, str(folder))
    write_whole(folder / MANIFEST, content)
    return digest_of(content)


def decode_manifest(content: bytes, where: str) -> Manifest:
    """Decode and check a manifest from `where`. Raises `Invalid`."""
    if len(content) > LARGEST_MANIFEST_BYTES:
        raise _invalid(where, "size", len(content), f"at most {LARGEST_MANIFEST_BYTES} bytes")
    try:
        manifest = msgspec.json.decode(content, type=prepared(Manifest))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Invalid(f"the manifest of {where} is not valid: {error}", name="manifest", value=where) from error
    shards = sum(len(file.shards) for file in manifest.files)
    if shards > MOST_SHARDS:
        raise _invalid(where, "number of shards", shards, f"at most {MOST_SHARDS}")
    for file in manifest.files:
        check_path(file.name, where)
        expected = -(-file.size // manifest.shard_bytes)
        if len(file.shards) != expected:
            raise _invalid(
                where, f"number of shards of {file.name!r}", len(file.shards), f"{expected} for {file.size} bytes"
            )
    names = {file.name for file in manifest.files}
    if len(names) != len(manifest.files) or any(names & set(_parents(name)) for name in names):
        raise Invalid(f"the manifest of {where} names a path twice", name="files", value=sorted(names)[:8])
    return manifest


def check_path(path: str, where: str) -> None:
    """Check that a path stays below its folder on every file system. Raises `Invalid`."""
    segments = path.split("/")
    if len(segments) > MOST_SEGMENTS or path == MANIFEST or not all(map(_is_name, segments)):
        detail = f"the manifest of {where} has the file name {path!r}; it must be a path below the folder"
        raise Invalid(detail, name="files", value=path, bound=f"at most {MOST_SEGMENTS} names, none hidden")


def sha256_of(path: Path, start: int, end: int) -> str:
    """Return the SHA-256 of a part of a file, in hex. Raises `OSError`."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < end and (piece := file.read(min(PIECE_BYTES, end - start))):
            digest.update(piece)
            start += len(piece)
    return digest.hexdigest()


def _describe(folder: Path, name: str, shard_bytes: int, threads: ThreadPoolExecutor) -> WeightsFile:
    path = folder / name
    size = path.stat().st_size
    return WeightsFile(
        name, size, list(threads.map(lambda part: sha256_of(path, *part), shard_ranges(size, shard_bytes)))
    )


def _is_name(segment: str) -> bool:
    """Return whether a path segment is an ordinary, visible name."""
    plain = segment.isprintable() and not set(segment) & set('\\:*?"<>|')
    return plain and not segment.startswith(".") and 0 < len(segment.encode()) <= LONGEST_SEGMENT_BYTES


def _parents(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def _invalid(where: str, what: str, value: int, bound: str) -> Invalid:
    return Invalid(
        f"the manifest of {where}: {what} is {value}; it must be {bound}", name=what, value=value, bound=bound
    )
