"""Sources of peers that are not on the package index, from a checkout of a tested commit."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

FETCH_TIMEOUT_S = 120.0


class NoSource(Exception):
    """The source cannot be had here, and why."""


@dataclasses.dataclass(frozen=True)
class PinnedSource:
    """A repository at a commit. `NAME_SOURCE` names a checkout instead, `NAME_REPOSITORY` another address."""

    name: str
    repository: str
    commit: str

    def checkout(self) -> Path:
        """Return the folder of a checkout; git gets it into the environment once. Raises `NoSource`."""
        if source := os.environ.get(f"{self._variable}_SOURCE"):
            return Path(source)
        repository = os.environ.get(f"{self._variable}_REPOSITORY", self.repository)
        folder = Path(sys.prefix) / f"{self.name}-source"
        if not (folder / ".complete").exists():
            folder.mkdir(exist_ok=True)
            for command in (["init"], ["fetch", "--depth", "1", repository, self.commit], ["checkout", self.commit]):
                self._git(folder, *command)
            (folder / ".complete").touch()
        return folder

    @property
    def _variable(self) -> str:
        return self.name.upper().replace("-", "_")

    def _git(self, folder: Path, command: str, *arguments: str) -> None:
        try:
            subprocess.run(
                ["git", "-C", str(folder), command, "-q", *arguments],
                check=True,
                capture_output=True,
                text=True,
                timeout=FETCH_TIMEOUT_S,
                env=os.environ | {"GIT_TERMINAL_PROMPT": "0"},
            )
        except (OSError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", "") or str(error)
            raise NoSource(
                f"no {self.name}: git {command} {' '.join(arguments)}: {detail.strip()}. Set {self._variable}_SOURCE "
                f"to a checkout of {self.commit}, or {self._variable}_REPOSITORY to a repository that has it"
            ) from error


def stand_in(names: Iterable[str]) -> None:
    """Make modules that a CPU lacks importable; each has every name."""
    for name in names:
        sys.modules.setdefault(name, _Anything(name))


class _Anything(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # as a package has

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value
