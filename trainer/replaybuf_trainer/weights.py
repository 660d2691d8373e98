"""Weights on their way to the engines: model folders that are whole or not there, and the calls that load them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from safetensors import safe_open

from replaybuf.errors import ServiceUnavailable
from replaybuf.generator.publication import OnPublish

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"

_MODES: dict[OnPublish, str] = {"drain": "wait", "in-flight": "keep", "abort-and-resume": "abort", "abort": "abort"}
"""How engines are paused while they load: what is running finishes first, is frozen, or is cut off."""


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Fill a folder beside `folder` and move it there at once: a reader never sees half of it."""
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            _sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def save_model(model: Any, tokenizer_dir: Path, folder: Path) -> None:
    """Write a complete model folder (config, weights, tokenizer) and read its header back."""
    with whole_folder(folder) as scratch:
        model.save_pretrained(scratch, safe_serialization=True)
        for path in tokenizer_dir.glob("token*"):
            shutil.copy2(path, scratch)
        with safe_open(scratch / WEIGHTS_FILE, framework="pt") as file:
            file.keys()


def keep_newest(folder: Path, pattern: str, keep: int) -> None:
    """Delete all but the `keep` newest folders by name."""
    for old in sorted(folder.glob(pattern))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


class EnginePublisher:
    """Loads weights into every engine and names their version.

    Nothing is sampled meanwhile, so no token is sampled by new weights under the old name; `on_publish` decides what
    becomes of running completions. `timeout_s` bounds each call; with `drain` it must be above the longest completion.
    Raises `ServiceUnavailable` naming engine, status and answer; an engine that refused weights must be restarted.
    """

    def __init__(self, urls: Sequence[str], timeout_s: float, on_publish: OnPublish = "in-flight") -> None:
        self._pause = f"/pause?mode={_MODES[on_publish]}"
        self._urls = [url.rstrip("/") for url in urls]
        self._http = httpx.Client(timeout=timeout_s)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def publish(self, folder: Path, version: int) -> None:
        """Have every engine sample with the weights in `folder`, as `version`."""
        for url in self._urls:
            self._call(url, self._pause)
            try:
                reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
                self._call(url, "/collective_rpc", reload)
                self._call(url, "/update_weight_version", {"new_version": str(version)})
            finally:
                self._call(url, "/resume")
        logger.debug("published version=%d engines=%d", version, len(self._urls))

    def _call(self, url: str, path: str, body: dict[str, Any] | None = None) -> None:
        for attempt in (1, 2):
            try:
                response = self._http.post(url + path, json=body)
            except httpx.TransportError as error:
                if attempt == 1:
                    continue  # an engine resets its kept-alive connections after an error: once more on a new one
                raise ServiceUnavailable(
                    f"engine {url} does not answer {path}: {error or type(error).__name__}", name="engine", value=url
                ) from error
            if response.is_success:
                return
            if response.is_server_error and attempt == 1:
                logger.warning("engine %s answered %s with %d, asking once more", url, path, response.status_code)
                continue
            raise ServiceUnavailable(
                f"engine {url} answered {path} with {response.status_code}: {response.text[:300]}",
                name="engine",
                value=url,
                bound=200,
            )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
