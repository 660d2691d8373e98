"""Load weights into the engines, and load them again into engines that lost them.

A restarted engine has the weights it was started with. Generators do not use it until its version is right, and only
the trainer can load the right weights. If every engine restarts, no batch would come, and without a batch there is no
publication. So a thread asks every engine for its version, also while the trainer waits for a batch::

    current ──(refuses a publication, reports another version, does not answer)──► behind ──(loaded)──► current

A whole model, adapter "", is loaded by `reload_weights`; a LoRA adapter by name, in place. vLLM has one version for all
models of a server, so there each adapter needs a server of its own; the small engine has one per adapter.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from replaybuf.errors import ReplaybufError, ServiceUnavailable
from replaybuf_trainer.options import OnPublish

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 2.0
VERSION_TIMEOUT_S = 5.0
NOT_FOUND = 404
RETRY_CEILING_S = 30.0
"""The pause before an engine that is behind is tried again doubles up to this."""
CLOSE_TIMEOUT_S = 10.0

_MODES: dict[OnPublish, str] = {"drain": "wait", "in-flight": "keep", "abort-and-resume": "abort", "abort": "abort"}
"""The pause mode of vLLM for each policy: running completions finish, freeze, or abort."""


class _UnknownThere(ServiceUnavailable):
    """The engine knows no such route, adapter or folder."""


class _WeightInfo(msgspec.Struct):
    weight_version: int | str


class _Engine:
    """One engine. `behind`: why it lacks the published weights; None = it has them, as far as is known."""

    def __init__(self, url: str, http: httpx.Client, pause: str) -> None:
        self.url = url.rstrip("/")
        self.behind: ServiceUnavailable | None = None
        self._http = http
        self._pause = pause
        self._backoff_s = 0.0
        self._next_check_s = 0.0

    def load(self, folder: Path, version: int, adapter: str = "") -> None:
        """Load the weights in `folder` as `version`; record in `behind` whether that worked."""
        try:
            self._post(self._pause)
            try:
                if adapter:
                    self._load_adapter(str(folder.resolve()), version, adapter)
                else:
                    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
                    self._post("/collective_rpc", reload)
                    self._post("/update_weight_version", {"new_version": str(version)})
            finally:
                self._post("/resume")
        except ServiceUnavailable as error:
            self.mark_behind(error, version)
        else:
            self.mark_current()

    def unload(self, adapter: str) -> None:
        """Serve an adapter no more. Raises `ServiceUnavailable`."""
        with contextlib.suppress(_UnknownThere):
            self._post("/v1/unload_lora_adapter", {"lora_name": adapter})

    def _load_adapter(self, folder: str, version: int, adapter: str) -> None:
        named = {"lora_name": adapter, "lora_path": folder, "load_inplace": True, "weight_version": version}
        try:
            self._post("/v1/load_lora_adapter", named)
        except _UnknownThere as error:
            raise self._fault(
                f"cannot load adapters ({error.detail}); start vLLM with --enable-lora and "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and let the engine read {folder}"
            ) from error
        self._post("/update_weight_version", {"model": adapter, "new_version": str(version)})

    def lacks(self, version: int, adapter: str = "") -> bool:
        """Ask the engine whether it has another version. Raises `ServiceUnavailable` if it reports none."""
        model = {"model": adapter} if adapter else None
        try:
            response = self._http.get(f"{self.url}/weight_info", params=model, timeout=VERSION_TIMEOUT_S)
            if adapter and response.status_code == NOT_FOUND:
                return True
            response.raise_for_status()
            return str(msgspec.json.decode(response.content, type=_WeightInfo).weight_version) != str(version)
        except (httpx.HTTPError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._fault(f"reports no version: {error or type(error).__name__}") from error

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Post once, and again after an error: an engine resets kept-alive connections and may fail once."""
        for attempt in (1, 2):
            try:
                response = self._http.post(self.url + path, json=body)
            except httpx.TransportError as error:
                if attempt == 2:
                    raise self._fault(f"does not answer {path}: {error or type(error).__name__}") from error
                continue
            if response.is_success:
                return
            if response.status_code == NOT_FOUND:
                raise _UnknownThere(f"engine {self.url} answered {path} with 404: {response.text[:300]}", name="engine")
            if not response.is_server_error or attempt == 2:
                raise self._fault(f"answered {path} with {response.status_code}: {response.text[:300]}")
            logger.warning("engine %s answered %s with %d, retrying", self.url, path, response.status_code)

    def _fault(self, what: str) -> ServiceUnavailable:
        return ServiceUnavailable(f"engine {self.url} {what}", name="engine", value=self.url)

    @property
    def due(self) -> bool:
        """Whether it is time to check this engine."""
        return time.monotonic() >= self._next_check_s

    def mark_current(self) -> None:
        """Record that the engine has the published weights."""
        self.behind, self._backoff_s, self._next_check_s = None, 0.0, 0.0

    def mark_behind(self, fault: ServiceUnavailable, version: int) -> None:
        """Record that the engine lacks the published weights; log it and back off, once per pause."""
        self.behind = fault
        if not self.due:
            return
        self._backoff_s = min(max(2 * self._backoff_s, WATCH_EVERY_S), RETRY_CEILING_S)
        self._next_check_s = time.monotonic() + self._backoff_s
        logger.warning(
            "engine %s lacks version %d and samples nothing for the run; next check in %g s: %s",
            self.url,
            version,
            self._backoff_s,
            fault,
        )


class _Published(NamedTuple):
    folder: Path
    version: int


class EnginePublisher:
    """Loads weights into every engine and sets their version.

    The engines sample nothing during a load, so no token of new weights carries the old version; `on_publish` decides
    what happens to running completions. `timeout_s` bounds each call; with `drain` it must exceed the longest
    completion. `reloads` counts loads between two publications.
    """

    def __init__(self, urls: Sequence[str], timeout_s: float, on_publish: OnPublish = "in-flight") -> None:
        self.reloads = 0
        self._http = httpx.Client(timeout=timeout_s)
        pause = f"/pause?mode={_MODES[on_publish]}"
        self._engines = [_Engine(url, self._http, pause) for url in urls]
        self._published: dict[str, _Published] = {}
        self._retired: frozenset[str] = frozenset()
        self._loading = threading.Lock()
        self._closing = threading.Event()
        self._watch: threading.Thread | None = None

    def publish(self, folder: Path, version: int, adapter: str = "") -> None:
        """Load the weights in `folder` into the engines, as `version`. The folder must stay until the next call.

        The watch takes care of engines that refuse, as long as one engine takes the weights. Raises
        `ServiceUnavailable` if none does, with the status and answer of the first engine.
        """
        with self._loading:
            self._published[adapter] = _Published(folder, version)
            if adapter in self._retired:
                return
            current = [engine for engine in self._engines if engine.behind is None]
            for engine in current or self._engines:
                engine.load(folder, version, adapter)
            faults = [engine.behind for engine in self._engines if engine.behind is not None]
            if faults and len(faults) == len(self._engines):
                raise faults[0]
        logger.debug("published version=%d engines=%d behind=%d", version, len(self._engines), len(faults))

    def retire(self, adapters: frozenset[str]) -> None:
        """Unload these adapters; from now on all others are served, those of an earlier call again by the watch."""
        with self._loading:
            leaving, self._retired = adapters - self._retired, adapters
            for adapter, engine in itertools.product(sorted(leaving), self._engines):
                try:
                    engine.unload(adapter)
                except ServiceUnavailable as error:
                    logger.warning("engine %s may still serve the removed adapter %s: %s", engine.url, adapter, error)

    def watch(self, confirm: Callable[[], object], every_s: float = WATCH_EVERY_S) -> None:
        """Start a thread that loads the published weights into engines that lack them, until `close`.

        It calls `confirm` before each load. If `confirm` raises because another trainer has the run,
        the watch ends: the engines belong to that trainer.
        """
        self._watch = threading.Thread(
            target=self._watch_engines, args=(confirm, every_s), name="engine-watch", daemon=True
        )
        self._watch.start()

    def close(self) -> None:
        """End the watch after its current load, and close the connections."""
        self._closing.set()
        if self._watch is not None:
            self._watch.join(CLOSE_TIMEOUT_S)
            if self._watch.is_alive():
                logger.warning("an engine is still loading after %g s; it may stay paused", CLOSE_TIMEOUT_S)
                return
        self._http.close()

    def _watch_engines(self, confirm: Callable[[], object], every_s: float) -> None:
        while not self._closing.wait(every_s):
            for engine in self._engines:
                if not engine.due or self._closing.is_set():
                    continue
                try:
                    if all(self._check(engine, adapter, confirm) for adapter in self._served()):
                        engine.mark_current()
                except ServiceUnavailable as error:
                    engine.mark_behind(error, max(published.version for published in self._published.values()))
                except ReplaybufError as error:
                    logger.warning("the watch of the engines ends: %s", error)
                    return

    def _check(self, engine: _Engine, adapter: str, confirm: Callable[[], object]) -> bool:
        """Load an engine that lacks the published weights of an adapter; return whether it has them.

        Raises `ServiceUnavailable`, and what `confirm` raises.
        """
        if not engine.lacks(self._published[adapter].version, adapter):
            return True
        confirm()
        with self._loading:  # race: a publication may have come first, and may even explain the other version
            folder, version = self._published[adapter]
            if self._closing.is_set() or adapter in self._retired or not engine.lacks(version, adapter):
                return engine.behind is None
            logger.warning("engine %s lacks version %d%s, loading it again", engine.url, version, _of(adapter))
            engine.load(folder, version, adapter)
            self.reloads += engine.behind is None
            return engine.behind is None

    def _served(self) -> list[str]:
        if not self._published:
            raise ReplaybufError("publish must come before watch", name="version")
        with self._loading:
            return [adapter for adapter in self._published if adapter not in self._retired]


def _of(adapter: str) -> str:
    return f" of adapter {adapter}" if adapter else ""
