"""prime-rl's own transport and data loader from a checkout of the tested commit.

prime-rl is not on the package index. `PRIME_RL_SOURCE` names a checkout; else git gets the commit from
`PRIME_RL_REPOSITORY` into the environment of the adapter. Its configurations need Python 3.12 and pydantic; empty
modules stand in for them. The files, the transport's reader and the conversion to tensors are prime-rl's.
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

COMMIT = "559b44772e471d1538537b8805cc77f3824a5e64"
REPOSITORY = os.environ.get("PRIME_RL_REPOSITORY", "https://github.com/PrimeIntellect-ai/prime-rl")
FETCH_TIMEOUT_S = 120.0
ABSENT = ("prime_rl.configs", "prime_rl.configs.shared", "prime_rl.configs.trainer", "prime_rl.trainer.world")


class NoSource(Exception):
    """prime-rl's code cannot be had here, and why."""


def checkout() -> Path:
    """Return the folder of a checkout. Raises `NoSource`."""
    if given := os.environ.get("PRIME_RL_SOURCE"):
        return Path(given)
    folder = Path(sys.prefix) / "prime-rl-source"
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
        raise NoSource(f"no prime-rl: git {arguments[0]} {REPOSITORY} {COMMIT[:9]}: {detail.strip()}") from error


def load(folder: Path) -> Any:
    """Import prime-rl's data loader from a checkout; return its module."""
    sys.path.insert(0, str(folder / "src"))
    for name in ABSENT:
        sys.modules.setdefault(name, _Anything(name))
    return importlib.import_module("prime_rl.trainer.rl.data")


class _Anything(types.ModuleType):
    """A module that has every name."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value
