"""Publication of weights to an engine: over HTTP on loopback beside a shared folder, from the manifest to the load.

    python benchmarks/weights.py --rounds 5 --megabytes 200

Both sides write the same folder and call an engine that loads nothing. The difference is what `http` adds: digests of
all shards, the download by a helper process with its digests, and the copy on the disk. Sides take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from measured import Measured

from replaybuf_trainer.publishers.http import HttpOptions, HttpPublisher
from replaybuf_trainer.publishers.publisher import Publisher, PublisherSetup
from replaybuf_trainer.publishers.reload import ReloadPublisher

FOLDER, HTTP = "reload", "http"


class Engine(BaseHTTPRequestHandler):
    """An engine that accepts every call and loads nothing."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Accept."""
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self._answer(b"{}")

    def do_GET(self) -> None:
        """Return a version."""
        self._answer(json.dumps({"weight_version": 0}).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class Bytes:
    """Weights of random bytes, as a model of one file has them."""

    adapter = ""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def tensors(self) -> Mapping[str, Any]:
        """Return none."""
        return {}

    def save_weights(self, folder: Path) -> None:
        """Write the folder through to the disk."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with (folder / "model.safetensors").open("wb") as file:
            file.write(self._content)
            file.flush()
            os.fsync(file.fileno())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=200)
    arguments = parser.parse_args()
    weights = Bytes(os.urandom(arguments.megabytes * 1_000_000))
    writes: dict[str, list[float]] = {FOLDER: [], HTTP: []}
    loads: dict[str, list[float]] = {FOLDER: [], HTTP: []}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        command = [
            sys.executable,
            "-m",
            "replaybuf",
            "fetch-weights",
            "--engine",
            engine,
            "--port",
            "0",
            "--log-level",
            "error",
        ]
        helper = subprocess.Popen([*command, "--folder", str(root / "local")], stdout=subprocess.PIPE, text=True)
        try:
            address = helper.stdout.readline().split()[-1] if helper.stdout else ""
            publishers: dict[str, Publisher] = {
                FOLDER: ReloadPublisher(PublisherSetup(weights_dir=root / FOLDER, engines=(engine,)), None),
                HTTP: HttpPublisher(PublisherSetup(weights_dir=root / HTTP, engines=(address,)), HttpOptions(port=0)),
            }
            for version in range(arguments.rounds + 1):
                for side, publisher in publishers.items():
                    begun_s = time.monotonic()
                    publisher.prepare(version, weights)
                    written_s = time.monotonic()
                    publisher.commit(version, lambda: None)
                    if version:  # the first round warms up
                        writes[side].append(written_s - begun_s)
                        loads[side].append(time.monotonic() - written_s)
            for publisher in publishers.values():
                publisher.close()
        finally:
            helper.kill()
            helper.communicate()
            server.shutdown()
    results = Measured(
        "weights", reference=FOLDER, packages=["httpx", "starlette", "uvicorn"], settings=vars(arguments)
    )
    both = {side: [sum(pair) for pair in zip(writes[side], loads[side], strict=True)] for side in writes}
    results.record("write the folder, with its manifest for http", writes, unit="s")
    results.record("download and load", loads, unit="s")
    results.record("publication to loaded", both, unit="s")
    results.save()


if __name__ == "__main__":
    main()
