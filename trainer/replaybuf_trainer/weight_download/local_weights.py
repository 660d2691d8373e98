"""The folder of downloaded weights on the machine of an engine. Several helpers of a machine may share it.

::

    FOLDER/v000012-4f1c...           version 12, complete; 4f1c... is the start of its manifest's SHA-256
    FOLDER/.v000013-90ab....part     version 13, on its way
    FOLDER/.lock                     held by the helper that downloads; the others then find the version complete

The digest in the name keeps apart what a rewind published again under the same version.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urldefrag

from replaybuf.errors import Gone, Invalid
from replaybuf.files import sync
from replaybuf_trainer.faults import Superseded
from replaybuf_trainer.folders import sync_folder
from replaybuf_trainer.weight_download.download import Download, patiently
from replaybuf_trainer.weight_download.manifest import MANIFEST, Manifest, decode_manifest, digest_of
from replaybuf_trainer.weight_download.sources import Source, open_source

logger = logging.getLogger(__name__)

_ANNOUNCED = re.compile("sha256=([0-9a-f]{64})")
DIGEST_CHARACTERS = 32
_VERSION = re.compile(rf"v\d{{6,}}-[0-9a-f]{{{DIGEST_CHARACTERS}}}")
_PART = re.compile(rf"\.{_VERSION.pattern}\.part")
LOCK_POLL_S = 0.1


def with_digest(uri: str, digest: str) -> str:
    """Return a weights_uri that names the SHA-256 of its manifest."""
    return f"{uri}#sha256={digest}"


class LocalWeights:
    """Downloads versions and keeps the newest `keep` of them, by their last use, and those that helpers hold.

    A helper holds the version that it got last, by a shared lock of its manifest: without it, three helpers with a
    version each and `keep` 2 would delete what another one is about to load. The disk needs room for one version more
    than these.
    """

    def __init__(self, root: Path, keep: int, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._current: Download | None = None
        self._held: BinaryIO | None = None
        self._root = root
        self._keep = keep
        self._token = token
        self._tls = tls or ssl.create_default_context()

    def fetch(self, weights_uri: str, stopping: threading.Event) -> Path:
        """Return the local folder of the weights at an address, downloaded if it is not here yet.

        Raises `Superseded` after `stopping`, `WrongDigest`, `Gone`, `Unauthorized`, `ServiceUnavailable`, `Invalid`
        for a manifest that is not acceptable or a disk that is too small, and `OSError`.
        """
        uri, fragment = urldefrag(weights_uri)
        announced = match[1] if (match := _ANNOUNCED.fullmatch(fragment)) else ""
        self._root.mkdir(parents=True, exist_ok=True)
        with self._locked(stopping):
            if announced and (folder := self._complete(announced)):
                return folder
            with contextlib.closing(open_source(uri, self._token, self._tls)) as source:
                content = patiently(source.manifest, stopping.wait)
                digest = digest_of(content)
                if announced and digest != announced:
                    detail = f"{uri} has other weights now: its manifest has the SHA-256 {digest}, not {announced}"
                    raise Gone(detail, name="weights_uri", value=weights_uri)
                return self._complete(digest) or self._download(source, uri, content, stopping)

    def progress_bytes(self) -> int:
        """Return a number that grows while a version comes, also if another helper of the folder downloads it."""
        verified = 0 if self._current is None else self._current.verified_bytes
        return verified + sum(_allocated_bytes(scratch) for scratch in self._named(_PART))

    def close(self) -> None:
        """Give up the version that was got last."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _complete(self, digest: str) -> Path | None:
        for folder in self._named(_VERSION):
            if folder.name.endswith(digest[:DIGEST_CHARACTERS]):
                self._use(folder)
                return folder
        return None

    def _download(self, source: Source, uri: str, content: bytes, stopping: threading.Event) -> Path:
        manifest = decode_manifest(content, uri)
        folder = self._root / f"v{manifest.version:06d}-{digest_of(content)[:DIGEST_CHARACTERS]}"
        scratch = folder.with_name(f".{folder.name}.part")
        for other in self._named(_PART):
            if other != scratch:
                shutil.rmtree(other, ignore_errors=True)
        scratch.mkdir(exist_ok=True)
        self._check_room(manifest, scratch)
        begun_s = time.monotonic()
        self._current = download = Download(source, uri, manifest, scratch, stopping)
        download.run()
        (scratch / MANIFEST).write_bytes(content)
        sync_folder(scratch)
        scratch.rename(folder)
        sync(self._root)
        logger.info(
            "fetched version=%d from=%s bytes=%d reused=%d seconds=%.1f",
            manifest.version,
            uri,
            download.received_bytes,
            manifest.total_bytes - download.received_bytes,
            time.monotonic() - begun_s,
        )
        self._use(folder)
        self._prune()
        return folder

    def _use(self, folder: Path) -> None:
        """Make a version the newest by its time, also after the clock was set back, and hold it."""
        newest_ns = max(path.stat().st_mtime_ns for path in self._named(_VERSION))
        now_ns = max(time.time_ns(), newest_ns + 1)
        os.utime(folder, ns=(now_ns, now_ns))
        self.close()
        self._held = (folder / MANIFEST).open("rb")
        fcntl.flock(self._held, fcntl.LOCK_SH)

    def _check_room(self, manifest: Manifest, scratch: Path) -> None:
        needed, free = manifest.total_bytes - _allocated_bytes(scratch), shutil.disk_usage(self._root).free
        if needed > free:
            detail = f"version {manifest.version} needs {needed} more bytes in {self._root}, and {free} are free"
            raise Invalid(detail, name="folder", value=needed, bound=free)

    def _prune(self) -> None:
        """Delete old versions that no helper holds; the lock of the folder keeps helpers from taking one meanwhile."""
        folders = sorted(self._named(_VERSION), key=lambda path: path.stat().st_mtime_ns)
        for folder in folders[: -self._keep]:
            if not _is_held(folder):
                # Half of a version must not look whole if this process dies here; the next download takes it up again.
                shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.part")), ignore_errors=True)

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        """Return what has such a name; the folder may have models of a user beside the versions."""
        return [path for path in self._root.glob("*") if pattern.fullmatch(path.name)]

    @contextlib.contextmanager
    def _locked(self, stopping: threading.Event) -> Iterator[None]:
        """Hold the lock of the folder; the system releases it when a process dies."""
        with (self._root / ".lock").open("ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if stopping.wait(LOCK_POLL_S):
                        raise Superseded("the download ends before it began", name="weights_uri") from None
            yield


def _is_held(folder: Path) -> bool:
    """Return whether a helper got this version last; the system releases the locks of dead ones."""
    try:
        with (folder / MANIFEST).open("r+b") as manifest:  # an exclusive lock on NFS needs a writable file
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # a helper was killed while it deleted this version
        pass
    return False


def _allocated_bytes(folder: Path) -> int:
    """Return the disk space of the files below a folder, without holes; 0 if it was renamed meanwhile."""
    try:
        return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    except FileNotFoundError:
        return 0
