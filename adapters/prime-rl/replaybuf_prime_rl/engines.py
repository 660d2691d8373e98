"""Load broadcast weights into vLLM engines before their version is published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx

from replaybuf.errors import EngineFault

TIMEOUT_S = 600.0


class Engines:
    """vLLM servers with `VLLM_SERVER_DEV_MODE=1` that see the trainer's folder."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._http = httpx.Client(timeout=TIMEOUT_S)

    def load(self, folder: Path, version: int) -> None:
        """Load the weights in `folder` into every engine and label them. Raises `EngineFault`.

        Requests in flight go on with the new weights. An engine whose load failed stays paused, because nobody knows
        its weights.
        """
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}}
        for url in self._urls:
            self._post(f"{url}/pause?mode=keep", None)
            self._post(f"{url}/collective_rpc", reload)
            self._post(f"{url}/update_weight_version", {"new_version": str(version)})
            self._post(f"{url}/resume", None)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _post(self, address: str, body: object) -> None:
        try:
            self._http.post(address, json=body).raise_for_status()
        except httpx.HTTPError as error:
            raise EngineFault("engine_away", f"POST {address}: {error!r}", name="engine", value=address) from error
