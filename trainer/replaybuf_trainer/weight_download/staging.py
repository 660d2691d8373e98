"""The version that a helper downloads now; a request for another one replaces it."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from replaybuf.errors import Conflict
from replaybuf_trainer.weight_download.local_weights import LocalWeights


class _Fetch(NamedTuple):
    uri: str
    stopping: threading.Event
    folder: Future[Path]


class Staging:
    """One download at a time, in a thread. Its methods may be called from any thread."""

    def __init__(self, local: LocalWeights) -> None:
        self._local = local
        self._threads = ThreadPoolExecutor(1, "weights-fetch")
        self._changing = threading.Lock()
        self._fetch: _Fetch | None = None

    def start(self, uri: str, *, restart: bool = False) -> Future[Path]:
        """Return the local folder of some weights as a future; a download of others ends.

        A download that failed is returned once more, for its reason, and the call after that starts it again with what
        is verified already; with `restart` this call does.
        """
        with self._changing:
            fetch = self._fetch
            if fetch is not None and fetch.uri == uri and not _is_deleted(fetch.folder):
                if not (fetch.folder.done() and fetch.folder.exception()):
                    return fetch.folder
                if not restart:
                    self._fetch = None
                    return fetch.folder
            if fetch is not None:
                fetch.stopping.set()
            stopping = threading.Event()
            self._fetch = _Fetch(uri, stopping, self._threads.submit(self._local.fetch, uri, stopping))
            return self._fetch.folder

    def folder(self, uri: str) -> Path:
        """Return the local folder of weights that are complete. Raises `Conflict`."""
        with self._changing:
            fetch = self._fetch
        if fetch is None or fetch.uri != uri or not fetch.folder.done() or fetch.folder.exception():
            raise Conflict(f"{uri} is not downloaded; stage it first", name="weights_uri", value=uri)
        return fetch.folder.result()

    def close(self) -> None:
        """End the download; what is verified stays for the next start."""
        with self._changing:
            if self._fetch is not None:
                self._fetch.stopping.set()
        self._threads.shutdown()


def _is_deleted(folder: Future[Path]) -> bool:
    """Return whether a copy was complete and is gone: helpers that share a folder keep few versions."""
    return folder.done() and not folder.exception() and not folder.result().is_dir()
