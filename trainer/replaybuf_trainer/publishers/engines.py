"""The engines of a publisher: all get each version, and again if they lost it.

A restarted engine has the weights it was started with. Generators do not use it until its version is right, and only
the trainer can load the right weights. If every engine restarts, no batch would come, and without a batch there is no
publication. So a thread asks every engine for its version, also while the trainer waits for a batch::

    current ──(refuses a publication, reports another version, does not answer)──► behind ──(loaded)──► current

vLLM has one version for all models of a server, so there each LoRA adapter needs a server of its own; the small engine
has one per adapter.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import ssl
import threading
from collections.abc import Sequence
from typing import Any

import httpx

from replaybuf.errors import ReplaybufError, ServiceUnavailable
from replaybuf_trainer.options import OnPublish
from replaybuf_trainer.publishers.engine import WATCH_EVERY_S, Engine, Loader
from replaybuf_trainer.publishers.publisher import Confirm, Publisher

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
LOADS_AT_ONCE = 16

_MODES: dict[OnPublish, str] = {"drain": "wait", "in-flight": "keep", "abort-and-resume": "abort", "abort": "abort"}
"""The pause mode of vLLM for each policy: running completions finish, freeze, or abort."""


class Engines:
    """Loads weights into every engine and sets their version.

    The engines sample nothing during a load, so no token of new weights carries the old version; `on_publish` decides
    what happens to running completions. `timeout_s` bounds each call; with `drain` it must exceed the longest
    completion. `reloads` counts loads between two publications.
    """

    def __init__(
        self,
        urls: Sequence[str],
        timeout_s: float,
        on_publish: OnPublish = "in-flight",
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.reloads = 0
        self._timeout_s = timeout_s
        headers = {"authorization": f"Bearer {token}"} if token else None
        self._http = httpx.Client(timeout=timeout_s, headers=headers, verify=True if tls is None else tls)
        self._engines = [Engine(url, self._http, _MODES[on_publish]) for url in urls]
        self._threads = concurrent.futures.ThreadPoolExecutor(LOADS_AT_ONCE, "engine-load")
        self._published: dict[str, tuple[Loader, int]] = {}
        self._retired: frozenset[str] = frozenset()
        self._loading = threading.Lock()
        self._closing = threading.Event()
        self._watch: threading.Thread | None = None

    def stage(self, loader: Loader, version: int) -> None:
        """Bring weights near the engines that are current; those that fail are behind.

        Raises `ServiceUnavailable` if all fail, with the reason of the first.
        """
        current = [engine for engine in self._engines if engine.behind is None] or self._engines
        waits = [self._threads.submit(engine.wait_staged, loader, version, self._timeout_s) for engine in current]
        faults = [wait.result() for wait in waits]
        if faults[0] is not None and None not in faults:
            raise faults[0]

    def switch(self, loader: Loader, version: int, confirm: Confirm) -> None:
        """Load weights into the engines, as `version`. The loader must work until the next call.

        The watch takes care of engines that refuse, as long as one engine takes the weights. Raises
        `ServiceUnavailable` if none does, with the answer of the first engine, and `Fenced`.
        """
        with self._loading:
            self._published[loader.adapter] = loader, version
            if loader.adapter in self._retired:
                return
            current = [engine for engine in self._engines if engine.behind is None]
            loads = [self._threads.submit(engine.load, loader, version, confirm) for engine in current or self._engines]
            concurrent.futures.wait(loads)
            for load in loads:
                load.result()
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

    def figures(self) -> dict[str, Any]:
        """Return the number of engines that are behind, and of loads between two publications."""
        behind = sum(engine.behind is not None for engine in self._engines)
        return {"engines_behind": behind, "engine_reloads": self.reloads}

    def watch(self, confirm: Confirm, every_s: float = WATCH_EVERY_S) -> None:
        """Start a thread that loads the published weights into engines that lack them, until `close`.

        If `confirm` raises because another trainer has the run, the watch ends: the engines belong to that trainer.
        """
        self._watch = threading.Thread(
            target=self._watch_engines, args=(confirm, every_s), name="engine-watch", daemon=True
        )
        self._watch.start()

    def close(self) -> None:
        """End the watch after its current load, and close the connections."""
        self._closing.set()
        self._threads.shutdown(wait=False)
        if self._watch is not None:
            self._watch.join(CLOSE_TIMEOUT_S)
            if self._watch.is_alive():
                logger.warning("an engine is still loading after %g s; it may stay paused", CLOSE_TIMEOUT_S)
                return
        self._http.close()

    def _watch_engines(self, confirm: Confirm, every_s: float) -> None:
        while not self._closing.wait(every_s):
            for engine in self._engines if self._published else []:
                if not engine.due or self._closing.is_set():
                    continue
                try:
                    self.check(engine, confirm)
                except ServiceUnavailable as error:
                    engine.mark_behind(error, max(version for _, version in self._published.values()))
                except ReplaybufError as error:
                    logger.warning("the watch of the engines ends: %s", error)
                    return

    def check(self, engine: Engine, confirm: Confirm) -> None:
        """Load what an engine lacks of the published weights. Raises `ServiceUnavailable` and `Fenced`."""
        if all(self._check(engine, adapter, confirm) for adapter in self._served()):
            engine.mark_current()

    def _check(self, engine: Engine, adapter: str, confirm: Confirm) -> bool:
        """Load the published weights of an adapter if the engine lacks them; return whether it has them."""
        if not engine.lacks(self._published[adapter][1], adapter):
            return True
        with self._loading:  # race: a publication may have come first, and may even explain the other version
            loader, version = self._published[adapter]
            if self._closing.is_set() or adapter in self._retired or not engine.lacks(version, adapter):
                return engine.behind is None
            of = f" of adapter {adapter}" if adapter else ""
            logger.warning("engine %s lacks version %d%s, loading it again", engine.url, version, of)
            engine.load(loader, version, confirm)
            self.reloads += engine.behind is None
            return engine.behind is None

    def _served(self) -> list[str]:
        with self._loading:
            return [adapter for adapter in self._published if adapter not in self._retired]


class EnginePublisher(Publisher):
    """A publisher that may load the weights into engines itself; `_engines` None: others do that."""

    _engines: Engines | None = None

    def watch(self, confirm: Confirm) -> None:
        """Load the published weights into engines that lack them, until `close`."""
        if self._engines is not None:
            self._engines.watch(confirm)

    def retire(self, adapters: frozenset[str]) -> None:
        """Unload these adapters from the engines."""
        if self._engines is not None:
            self._engines.retire(adapters)

    def close(self) -> None:
        """End the watch after its current load, and close the connections."""
        if self._engines is not None:
            self._engines.close()

    def figures(self) -> dict[str, Any]:
        """Return the number of engines that are behind, and of loads between two publications."""
        return {} if self._engines is None else self._engines.figures()
