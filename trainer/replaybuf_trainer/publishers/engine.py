"""One engine of a publisher: its calls, and whether it has the published weights.

A load changes an engine in this order::

    stage ──► confirm ──► pause ──► send weights ──► confirm ──► label ──► resume
                                      │    └──────────────────────┴── fault: in doubt, stays paused, completions aborted
                                      └── rejected with 4xx: nothing has changed ──► resume

- An engine that samples has the weights of its label. After a fault nobody knows its weights, so it samples nothing
  until a load succeeds.
- A trainer that lost the run stops at a `confirm`. If it finds out only after it sent weights, it labels the engine
  -1, which is no version. The watch of its successor then loads the engine again.
- One window stays open: a trainer that is frozen between its first `confirm` and its load, and killed before the
  second. Only a fence in the engine could close it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any, Protocol

import httpx
import msgspec

from replaybuf.errors import Fenced, ServiceUnavailable
from replaybuf.wire.decoding import prepared
from replaybuf_trainer.publishers.publisher import Confirm

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 2.0
VERSION_TIMEOUT_S = 5.0
STAGE_POLL_S = 0.05
SHOWN_CHARACTERS = 600
"""Of an answer that is an error."""
RETRY_CEILING_S = 30.0
"""The pause before an engine that is behind is tried again doubles up to this."""
FENCED_LABEL = "-1"

_NEEDS = {
    "/v1/load_lora_adapter": "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and let it read the folder",
    "/init_weight_transfer_engine": """VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "nccl"}'""",
}
_DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
"""What vLLM must be started with to have a route; dev mode for most of them."""


class Rejected(ServiceUnavailable):
    """The engine rejected a call, with 4xx, and changed nothing."""


class Unknown(Rejected):
    """The engine has no such route or adapter."""


class Loader(Protocol):
    """How the weights of one version reach a paused engine. `adapter`: its LoRA adapter; "" = a whole model."""

    @property
    def adapter(self) -> str:
        """Name of the adapter."""

    def stage(self, engine: Engine) -> int | None:
        """Bring weights near the engine, which samples on; None = they are there, else the bytes so far.

        Raises `ServiceUnavailable`.
        """

    def send(self, engine: Engine) -> None:
        """Replace the weights of the engine. Raises `ServiceUnavailable`."""

    def label(self, engine: Engine, version: int) -> None:
        """Set the version of the engine's weights. Raises as `send`."""


class _WeightInfo(msgspec.Struct):
    weight_version: int | str


class Engine:
    """One engine.

    `behind`: why it lacks the published weights; None = it has them, as far as is known. `_in_doubt`: adapters whose
    load began and did not end well, so their labels say nothing about their weights. `_loaded`: adapters that this
    trainer has loaded, to the end. A trainer before it may have published other weights under the same version.
    """

    def __init__(self, url: str, http: httpx.Client, pause_mode: str) -> None:
        self.url = url.rstrip("/")
        self.behind: ServiceUnavailable | None = None
        self._http = http
        self._pause_mode = pause_mode
        self._in_doubt: set[str] = set()
        self._loaded: set[str] = set()
        self._backoff_s = 0.0
        self._next_check_s = 0.0

    # ------------------------------------------------------------------ loading

    def load(self, loader: Loader, version: int, confirm: Confirm) -> None:
        """Load weights as `version`; record in `behind` whether that worked. Raises `Fenced`."""
        try:
            if (staged := loader.stage(self)) is not None:
                raise self._fault(f"still downloads the weights, {staged} bytes so far")
            confirm()
            self._loaded.discard(loader.adapter)
            self.post(f"/pause?mode={self._pause_mode}")
            try:
                self._replace(loader, version, confirm)
            finally:
                self._resume_or_abort()
            self._loaded.add(loader.adapter)
        except ServiceUnavailable as error:
            self.mark_behind(error, version)
        else:
            self.mark_current()

    def _replace(self, loader: Loader, version: int, confirm: Confirm) -> None:
        doubted = loader.adapter in self._in_doubt
        self._in_doubt.add(loader.adapter)
        try:
            loader.send(self)
        except Rejected:
            if not doubted:
                self._in_doubt.discard(loader.adapter)
            raise
        try:
            confirm()
        except Fenced:
            with contextlib.suppress(ServiceUnavailable):  # the engine may be gone
                self.label(FENCED_LABEL, loader.adapter)
            raise
        loader.label(self, version)
        self._in_doubt.discard(loader.adapter)

    def _resume_or_abort(self) -> None:
        """Resume, or abort frozen completions so that their generator samples them elsewhere."""
        if not self._in_doubt:
            self.post("/resume")
            return
        with contextlib.suppress(ServiceUnavailable):  # the engine may be gone; the fault of the load is reported
            self.post("/pause?mode=abort", timeout_s=VERSION_TIMEOUT_S)

    def label(self, label: str, adapter: str = "") -> None:
        """Set the label of the present weights. Raises as `post`."""
        self.post("/update_weight_version", {"new_version": label} | ({"model": adapter} if adapter else {}))

    def unload(self, adapter: str) -> None:
        """Serve an adapter no more. Raises `ServiceUnavailable`."""
        with contextlib.suppress(Unknown):
            self.post("/v1/unload_lora_adapter", {"lora_name": adapter})
        self._in_doubt.discard(adapter)

    def lacks(self, version: int, adapter: str = "") -> bool:
        """Ask the engine whether it has other weights. Raises `ServiceUnavailable` if it reports no version."""
        if adapter not in self._loaded:
            return True
        model = {"model": adapter} if adapter else None
        try:
            response = self._http.get(f"{self.url}/weight_info", params=model, timeout=VERSION_TIMEOUT_S)
            if adapter and response.status_code == httpx.codes.NOT_FOUND:
                return True
            response.raise_for_status()
            return str(msgspec.json.decode(response.content, type=prepared(_WeightInfo)).weight_version) != str(version)
        except (httpx.HTTPError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._fault(f"reports no version: {error or type(error).__name__}") from error

    # ------------------------------------------------------------------ calls

    def post(
        self, path: str, body: dict[str, Any] | None = None, *, attempts: int = 2, timeout_s: float | None = None
    ) -> bytes:
        """Post once, and again after an error: an engine resets kept-alive connections and may fail once.

        Returns the body of the answer. Raises `ServiceUnavailable`.
        """
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        for attempt in range(1, attempts + 1):
            try:
                response = self._http.post(self.url + path, json=body, timeout=timeout)
            except httpx.TransportError as error:
                if attempt == attempts:
                    raise self._fault(f"does not answer {path}: {error or type(error).__name__}") from error
                continue
            if response.is_success:
                return response.content
            if response.is_client_error:
                raise self._rejected(path, response)
            if attempt == attempts:
                raise self._fault(f"answered {path} with {response.status_code}: {response.text[:SHOWN_CHARACTERS]}")
            logger.warning("engine %s answered %s with %d, retrying", self.url, path, response.status_code)
        raise ValueError(f"attempts is {attempts}; it must be at least 1")

    def get(self, path: str) -> bytes:
        """Return the answer to a GET. Raises `ServiceUnavailable`."""
        try:
            response = self._http.get(self.url + path)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise self._fault(f"does not answer {path}: {error or type(error).__name__}") from error
        return response.content

    def _rejected(self, path: str, response: httpx.Response) -> Rejected:
        what = f"engine {self.url} answered {path} with {response.status_code}: {response.text[:SHOWN_CHARACTERS]}"
        if response.status_code != httpx.codes.NOT_FOUND:
            return Rejected(what, name="engine", value=self.url)
        return Unknown(f"{what}; start vLLM with {_NEEDS.get(path, _DEV_MODE)}", name="engine", value=self.url)

    def _fault(self, what: str) -> ServiceUnavailable:
        return ServiceUnavailable(f"engine {self.url} {what}", name="engine", value=self.url)

    # ------------------------------------------------------------------ state

    @property
    def due(self) -> bool:
        """Whether it is time to check this engine."""
        return time.monotonic() >= self._next_check_s

    def wait_staged(self, loader: Loader, version: int, timeout_s: float) -> ServiceUnavailable | None:
        """Wait until a load can begin, while the engine samples on; return why it cannot.

        After a fault, or `timeout_s` without progress, the engine is behind.
        """
        progress, deadline_s = -1, time.monotonic() + timeout_s
        try:
            while (staged := loader.stage(self)) is not None:
                if staged > progress:
                    progress, deadline_s = staged, time.monotonic() + timeout_s
                elif time.monotonic() > deadline_s:
                    raise self._fault(f"downloaded {staged} bytes of the weights and none for {timeout_s:g} s")
                time.sleep(STAGE_POLL_S)
        except ServiceUnavailable as error:
            self.mark_behind(error, version)
            return error
        return None

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
