"""The trainer package's commands: mounted by entry point, and clear where torch is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaybuf import plugins
from replaybuf.errors import MissingExtra
from replaybuf_trainer import cli

COMMANDS = {"engine": cli.engine, "init-model": cli.init_model, "train": cli.train}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_is_found_by_its_entry_point(name: str) -> None:
    """`replaybuf NAME` is the function of this package."""
    assert plugins.load(plugins.COMMANDS, name) is COMMANDS[name]


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (cli.engine, {"model": Path("m")}),
        (cli.init_model, {"out": Path("m")}),
        (cli.train, {"run": "r", "model": Path("m"), "engine": []}),
    ],
)
def test_without_torch_the_command_to_install_it_is_told(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., None], options: dict[str, Any]
) -> None:
    """Before anything else happens."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"pip install 'replaybuf\[trainer\]'"):
        command(**options)
