"""Weights into the engines: the calls that load them, and a watch that loads them again where they got lost.

An engine that was started anew has the weights it was started with. Generators leave it aside until its version is
right, and only whoever has the weights can make it right: with every engine started anew no batch would come any more,
and without a batch no publication. So a thread asks every engine for its version, also while a batch is waited for::

    current ──(does not take a publication, tells another version, does not answer)──► behind ──(loaded)──► current
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from replaybuf.errors import ReplaybufError, ServiceUnavailable
from replaybuf.generator.fleet.publication import OnPublish

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 2.0
VERSION_TIMEOUT_S = 5.0
"""Bound of a question for the version, which computes nothing."""
RETRY_CEILING_S = 30.0
"""The pause before an engine that is behind is tried again doubles up to this."""
CLOSE_TIMEOUT_S = 10.0

_MODES: dict[OnPublish, str] = {"drain": "wait", "in-flight": "keep", "abort-and-resume": "abort", "abort": "abort"}
"""How engines are paused while they load: what is running finishes first, is frozen, or is cut off."""


class _WeightInfo(msgspec.Struct):
    weight_version: int | str


class _Engine:
    """One engine. `behind`: why it lacks the weights published last; None = it has them, as far as is known."""

    def __init__(self, url: str, http: httpx.Client, pause: str) -> None:
        self.url = url.rstrip("/")
        self.behind: ServiceUnavailable | None = None
        self._http = http
        self._pause = pause
        self._pause_s = 0.0
        self._look_at_s = 0.0

    # ------------------------------------------------------------------ calls

    def load(self, folder: Path, version: int) -> None:
        """Have it sample with the weights in `folder`, as `version`. Raises `ServiceUnavailable`."""
        self._post(self._pause)
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
            self._post("/collective_rpc", reload)
            self._post("/update_weight_version", {"new_version": str(version)})
        finally:
            self._post("/resume")

    def lacks(self, version: int) -> bool:
        """Say whether it tells another version. Raises `ServiceUnavailable` where it tells none."""
        try:
            response = self._http.get(f"{self.url}/weight_info", timeout=VERSION_TIMEOUT_S)
            response.raise_for_status()
            return str(msgspec.json.decode(response.content, type=_WeightInfo).weight_version) != str(version)
        except (httpx.HTTPError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ServiceUnavailable(
                f"engine {self.url} tells no version: {error or type(error).__name__}", name="engine", value=self.url
            ) from error

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        for attempt in (1, 2):
            try:
                response = self._http.post(self.url + path, json=body)
            except httpx.TransportError as error:
                if attempt == 1:
                    continue  # an engine resets its kept-alive connections after an error: once more on a new one
                raise ServiceUnavailable(
                    f"engine {self.url} does not answer {path}: {error or type(error).__name__}",
                    name="engine",
                    value=self.url,
                ) from error
            if response.is_success:
                return
            if response.is_server_error and attempt == 1:
                logger.warning("engine %s answered %s with %d, asking once more", self.url, path, response.status_code)
                continue
            raise ServiceUnavailable(
                f"engine {self.url} answered {path} with {response.status_code}: {response.text[:300]}",
                name="engine",
                value=self.url,
                bound=200,
            )

    # ------------------------------------------------------------------ how it is doing

    @property
    def due(self) -> bool:
        """Whether it is time to look at it."""
        return time.monotonic() >= self._look_at_s

    def caught_up(self) -> None:
        """Take in that it has the weights."""
        self.behind, self._pause_s, self._look_at_s = None, 0.0, 0.0

    def fell_behind(self, fault: ServiceUnavailable, version: int) -> None:
        """Take in that it does not have them, and pause before the next look; say so, unless the last one just did."""
        self.behind = fault
        if not self.due:
            return
        self._pause_s = min(max(2 * self._pause_s, WATCH_EVERY_S), RETRY_CEILING_S)
        self._look_at_s = time.monotonic() + self._pause_s
        logger.warning(
            "engine %s lacks version %d and samples nothing for the run; looked at again in %g s: %s",
            self.url,
            version,
            self._pause_s,
            fault,
        )


class EnginePublisher:
    """Loads weights into every engine and names their version.

    Nothing is sampled meanwhile, so no token is sampled by new weights under the old name; `on_publish` decides what
    becomes of running completions. `timeout_s` bounds each call; with `drain` it must be above the longest completion.
    `reloads`: times an engine was loaded again between two publications.
    """

    def __init__(self, urls: Sequence[str], timeout_s: float, on_publish: OnPublish = "in-flight") -> None:
        self.reloads = 0
        self._http = httpx.Client(timeout=timeout_s)
        pause = f"/pause?mode={_MODES[on_publish]}"
        self._engines = [_Engine(url, self._http, pause) for url in urls]
        self._published: tuple[Path, int] | None = None
        self._loading = threading.Lock()
        self._closing = threading.Event()
        self._watch: threading.Thread | None = None

    def publish(self, folder: Path, version: int) -> None:
        """Have the engines sample with the weights in `folder`, as `version`; the folder stays until the next.

        An engine that does not take them is left behind, to the watch, while another one takes them. Raises
        `ServiceUnavailable` where none does, naming the first with its status and answer.
        """
        with self._loading:
            self._published = folder, version
            current = [engine for engine in self._engines if engine.behind is None]
            for engine in current or self._engines:
                self._load(engine)
            faults = [engine.behind for engine in self._engines if engine.behind is not None]
            if faults and len(faults) == len(self._engines):
                raise faults[0]
        logger.debug("published version=%d engines=%d behind=%d", version, len(self._engines), len(faults))

    def watch(self, confirm: Callable[[int], object], every_s: float = WATCH_EVERY_S) -> None:
        """From now on load the weights published last into engines that lack them, in a thread, until `close`.

        `confirm` is called with their version before; it raises where another trainer has the run, which ends the
        watch: what an engine then has is that trainer's.
        """
        self._watch = threading.Thread(
            target=self._watch_engines, args=(confirm, every_s), name="watch of engines", daemon=True
        )
        self._watch.start()

    def close(self) -> None:
        """End the watch, after the load in work, and close the connections."""
        self._closing.set()
        if self._watch is not None:
            self._watch.join(CLOSE_TIMEOUT_S)
            if self._watch.is_alive():
                logger.warning("an engine is still being loaded after %g s; it may stay paused", CLOSE_TIMEOUT_S)
                return
        self._http.close()

    # ------------------------------------------------------------------ loading

    def _load(self, engine: _Engine) -> None:
        """Load what is published; the caller holds `_loading`."""
        folder, version = self._now()
        try:
            engine.load(folder, version)
        except ServiceUnavailable as error:
            engine.fell_behind(error, version)
        else:
            engine.caught_up()

    def _now(self) -> tuple[Path, int]:
        if self._published is None:
            raise ReplaybufError("publish comes before watch", name="version")
        return self._published

    # ------------------------------------------------------------------ the thread

    def _watch_engines(self, confirm: Callable[[int], object], every_s: float) -> None:
        while not self._closing.wait(every_s):
            for engine in self._engines:
                if not engine.due or self._closing.is_set():
                    continue
                try:
                    self._look(engine, confirm)
                except ServiceUnavailable as error:
                    engine.fell_behind(error, self._now()[1])
                except ReplaybufError as error:
                    logger.warning("engines are no longer watched: %s", error)
                    return

    def _look(self, engine: _Engine, confirm: Callable[[int], object]) -> None:
        """Load an engine that lacks what is published. Raises `ServiceUnavailable`, and what `confirm` raises."""
        version = self._now()[1]
        if not engine.lacks(version):
            engine.caught_up()
            return
        confirm(version)
        with self._loading:  # a publication may have come first, or be the reason for what the engine tells
            version = self._now()[1]
            if self._closing.is_set() or not engine.lacks(version):
                return
            logger.warning("engine %s does not have version %d, it is loaded again", engine.url, version)
            self._load(engine)
            self.reloads += engine.behind is None
