"""Printed commands run when a user pastes them into the shell."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from replaybuf.lab.demo.folder import DEFAULT_DATA_DIR, demo_command
from replaybuf.program import program


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Create a program named replaybuf outside of PATH."""
    path = tmp_path / "bin" / "replaybuf"
    path.parent.mkdir()
    path.touch(mode=0o755)
    return path


def test_a_program_outside_path_keeps_the_path_it_was_started_with(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` runs `.venv/bin/replaybuf`; another program of that name in PATH does not count."""
    other = script.parent.parent / "other" / "replaybuf"
    other.parent.mkdir()
    other.touch(mode=0o755)
    monkeypatch.chdir(script.parent.parent)
    for path in ("/nowhere", str(other.parent)):
        monkeypatch.setenv("PATH", path)
        assert program("bin/replaybuf") == ["bin/replaybuf"]


def test_a_program_in_path_is_named_without_its_folder(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an activated environment."""
    monkeypatch.setenv("PATH", str(script.parent))
    assert program(str(script)) == ["replaybuf"]


@pytest.mark.parametrize("started_as", ["-c", "/somewhere/replaybuf/cli/main.py", "/nowhere/replaybuf"])
def test_a_module_or_missing_program_runs_as_a_python_module(started_as: str) -> None:
    """As in `python -m replaybuf`."""
    assert program(started_as) == [sys.executable, "-m", "replaybuf"]


def test_the_demo_command_names_its_folder_unless_it_is_the_default(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is quoted for the shell."""
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script), "demo"])
    assert demo_command(DEFAULT_DATA_DIR, "--resume") == "replaybuf demo --resume"
    assert demo_command(Path("my demo"), "--resume") == "replaybuf demo --resume --data-dir 'my demo'"
