"""Commands that the demo prints run as typed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from replaybuf.lab.demo.typed import DEFAULT_DATA_DIR, demo_command, program


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A program of this name, not in a folder of PATH."""
    path = tmp_path / "bin" / "replaybuf"
    path.parent.mkdir()
    path.touch(mode=0o755)
    return path


def test_a_program_out_of_path_is_named_as_it_was_typed(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make demo` calls it: `.venv/bin/replaybuf`; one of the same name elsewhere in PATH is not meant."""
    other = script.parent.parent / "other" / "replaybuf"
    other.parent.mkdir()
    other.touch(mode=0o755)
    monkeypatch.chdir(script.parent.parent)
    for path in ("/nowhere", str(other.parent)):
        monkeypatch.setenv("PATH", path)
        assert program("bin/replaybuf") == ["bin/replaybuf"]


def test_a_program_in_path_is_named_alone(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment that is activated."""
    monkeypatch.setenv("PATH", str(script.parent))
    assert program(str(script)) == ["replaybuf"]


@pytest.mark.parametrize("started_as", ["-c", "/somewhere/replaybuf/cli/main.py", "/nowhere/replaybuf"])
def test_what_is_no_program_is_named_as_a_module(started_as: str) -> None:
    """As with `python -m replaybuf`."""
    assert program(started_as) == [sys.executable, "-m", "replaybuf"]


def test_a_folder_is_told_where_it_is_not_the_default(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quoted as a shell wants it."""
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script), "demo"])
    assert demo_command(DEFAULT_DATA_DIR, "--resume") == "replaybuf demo --resume"
    assert demo_command(Path("my demo"), "--resume") == "replaybuf demo --resume --data-dir 'my demo'"
