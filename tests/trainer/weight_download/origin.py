"""An HTTP server of a weights folder that fails as scripted, and counts what it sends."""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from replaybuf_trainer.weight_download.local_weights import with_digest
from replaybuf_trainer.weight_download.manifest import MANIFEST, write_manifest

SHARD_BYTES = 1 << 16
Fault = Callable[[str, int, bytes], bytes | None]
"""Gets the name of a file, the start of the range and its bytes; returns what is sent. None = the answer is cut."""


class Origin:
    """Serves `folder`. `sent` are the ranges that were not cut; `fault` may change or cut an answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent: list[tuple[str, int, int]] = []
        self.fault: Fault = lambda name, start, content: content
        self.token: str | None = None
        self.whole_files = False
        self._counting = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"origin": self}))
        self._server.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._server.server_port}/"
        self.thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def count(self, name: str, start: int, size: int) -> None:
        """Record a range that was sent."""
        with self._counting:
            self.sent.append((name, start, size))

    def sent_bytes(self) -> int:
        """Return the bytes of files that were sent, without the manifest."""
        with self._counting:
            return sum(size for name, _, size in self.sent if name != MANIFEST)

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self.thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    origin: Origin

    def do_GET(self) -> None:
        """Send a range of a file, or the whole file."""
        origin, name = self.origin, self.path.lstrip("/")
        if origin.token and self.headers.get("authorization") != f"Bearer {origin.token}":
            self.send_response(401)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        if not (origin.folder / name).is_file():
            self.send_response(404)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        content = (origin.folder / name).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        start, end = (int(asked[1]), int(asked[2]) + 1) if asked and not origin.whole_files else (0, len(content))
        part = content[start:end]
        changed = origin.fault(name, start, part)
        self.send_response(206 if asked and not origin.whole_files else 200)
        if asked and not origin.whole_files:
            self.send_header("content-range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("content-length", str(len(part)))
        self.end_headers()
        if changed is None:
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
            return
        origin.count(name, start, len(part))
        with contextlib.suppress(OSError):  # a killed client
            self.wfile.write(changed)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Origin]:
    """Serve a folder until the block ends."""
    origin = Origin(folder)
    origin.thread.start()
    try:
        yield origin
    finally:
        origin.close()


def write_version(folder: Path, version: int, shards: int = 8) -> str:
    """Write a folder of random bytes with its manifest; return the digest of the manifest."""
    (folder / "parts").mkdir(parents=True)
    numbers = random.Random(version)
    (folder / "config.json").write_text("{}")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "parts" / "model.safetensors").write_bytes(numbers.randbytes(shards * SHARD_BYTES - 100))
    return write_manifest(folder, version, SHARD_BYTES)


def announced(origin: Origin, digest: str) -> str:
    """Return the weights_uri of a version."""
    return with_digest(origin.uri, digest)


def same_files(folder: Path, copy: Path) -> bool:
    """Return whether two folders have the same files."""
    names = [sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file()) for root in (folder, copy)]
    return names[0] == names[1] and all((folder / name).read_bytes() == (copy / name).read_bytes() for name in names[0])
