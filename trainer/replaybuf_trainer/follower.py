"""A helper that follows the published version of a run and loads it into its engine.

For engines that the trainer cannot reach, and for weights in an object store. A version is announced before such an
engine has it; until then generators do not sample from it. The engine is paused, loaded and labelled as by a trainer,
and again after a restart. It gets no version that a rewind has taken back: the service is asked before and after.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from replaybuf.client.client import Client
from replaybuf.errors import ReplaybufError, ServiceUnavailable
from replaybuf.wire.contract import Policy
from replaybuf_trainer.faults import Superseded
from replaybuf_trainer.publishers.engines import Engines
from replaybuf_trainer.publishers.reload import FolderLoader
from replaybuf_trainer.weight_download.staging import Staging

logger = logging.getLogger(__name__)

POLL_MS = 5_000
LOOK_S = 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class Follower:
    """Follows an adapter of a run, "" = the whole model, until `stop` is set."""

    def __init__(self, client: Client, engines: Engines, staging: Staging, adapter: str, stop: threading.Event) -> None:
        self._client = client
        self._engines = engines
        self._staging = staging
        self._adapter = adapter
        self._stop = stop
        self._newest: Policy | None = None
        self._loading: Policy | None = None
        self._changed = threading.Event()

    def run(self) -> None:
        """Work until the end. Raises what no later try can mend: no such run, no permission."""
        asking: Future[None] = Future()

        def ask() -> None:
            try:
                self._ask()
            except ReplaybufError as error:
                asking.set_exception(error)
            self._changed.set()

        threading.Thread(target=ask, name="weights-policy", daemon=True).start()
        self._engines.watch(self._confirm)
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            self._changed.wait(LOOK_S)
            if asking.done():
                asking.result()
            policy = self._newest
            if policy is None or policy.weights_uri is None or not self._changed.is_set():
                continue
            self._changed.clear()
            try:
                self._load(policy, policy.weights_uri)
                pause_s = FIRST_PAUSE_S
            except Superseded:
                self._changed.set()
            except (ReplaybufError, OSError) as error:
                logger.warning("version %d is not loaded; next try in %g s: %s", policy.version, pause_s, error)
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                self._changed.set()

    def _ask(self) -> None:
        """Keep the published version up to date."""
        away = False
        while not self._stop.is_set():
            known = self._newest
            try:
                policy = self._client.get_policy(known.version if known else None, POLL_MS, self._adapter)
                away = False
            except ServiceUnavailable as error:
                if not away:
                    logger.warning("the service is away, trying again: %s", error.detail)
                away = True
                self._stop.wait(FIRST_PAUSE_S)
                continue
            if known is None or _identity(policy) != _identity(known):
                self._newest = policy
                self._changed.set()

    def _load(self, policy: Policy, uri: str) -> None:
        """Download a version and load it. Raises `Superseded` if another one is published meanwhile."""
        folder = self._staging.start(uri, restart=True)
        while not folder.done():
            if self._stop.wait(LOOK_S / 10) or self._newest is not policy:
                raise Superseded(f"version {policy.version} is not the newest any more", name="weights_uri", value=uri)
        self._loading = policy
        self._engines.switch(FolderLoader(folder.result(), self._adapter), policy.version, self._confirm)
        logger.info("loaded version=%d from=%s", policy.version, uri)

    def _confirm(self) -> None:
        """Ask whether the version that is loaded is still the published one. Raises `ServiceUnavailable` if not."""
        published = self._client.get_policy(adapter=self._adapter)
        if self._loading is None or _identity(published) != _identity(self._loading):
            detail = f"version {published.version} is published at {published.weights_uri} now"
            raise ServiceUnavailable(detail, name="version", value=published.version)


def _identity(policy: Policy) -> tuple[int, int, str | None]:
    return policy.generation, policy.version, policy.weights_uri
