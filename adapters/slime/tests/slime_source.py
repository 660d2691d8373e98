"""slime's own code from a checkout of the tested commit, on a machine without its engines.

slime is not on the package index. `SLIME_SOURCE` names a checkout; else git gets the commit from `SLIME_REPOSITORY`
into the environment of the adapter. What a CPU lacks is replaced by empty modules: ray, SGLang and trackers. Everything
else that a batch passes through is slime's.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

COMMIT = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
REPOSITORY = os.environ.get("SLIME_REPOSITORY", "https://github.com/THUDM/slime")
FETCH_TIMEOUT_S = 120.0
ABSENT = (
    "ray",
    "ray.util",
    "ray.util.scheduling_strategies",
    "sglang",
    "sglang.srt",
    "sglang.srt.constants",
    "slime.backends",
    "slime.backends.sglang_utils",
    "slime.backends.sglang_utils.external",
    "slime.backends.sglang_utils.sglang_config",
    "slime.backends.sglang_utils.sglang_engine",
    "slime.observability.logging_utils",
)


class NoSource(Exception):
    """slime's code cannot be had here, and why."""


def checkout() -> Path:
    """Return the folder of a checkout. Raises `NoSource`."""
    if given := os.environ.get("SLIME_SOURCE"):
        return Path(given)
    folder = Path(sys.prefix) / "slime-source"
    if not (folder / ".complete").exists():
        folder.mkdir(exist_ok=True)
        _git(folder, "init", "-q")
        _git(folder, "fetch", "-q", "--depth", "1", REPOSITORY, COMMIT)
        _git(folder, "checkout", "-q", COMMIT)
        (folder / ".complete").touch()
    return folder


def _git(folder: Path, *arguments: str) -> None:
    environment = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    try:
        subprocess.run(
            ["git", "-C", str(folder), *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=FETCH_TIMEOUT_S,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        raise NoSource(f"no slime: git {arguments[0]} {REPOSITORY} {COMMIT[:9]}: {detail.strip()}") from error


def load(folder: Path) -> Any:
    """Import slime from a checkout; return its class of the rollout manager, without ray."""
    sys.path.insert(0, str(folder))
    for name in ABSENT:
        if name not in sys.modules:
            sys.modules[name] = _Anything(name)
    ray: Any = sys.modules["ray"]
    ray.remote, ray.put = (lambda made: made), (lambda value: value)
    return importlib.import_module("slime.ray.rollout").RolloutManager


class _Anything(types.ModuleType):
    """A module that has every name."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value
