"""Completion of commands and options, in a real bash; scripts of the other shells."""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from replaybuf.cli.main import main
from replaybuf.plugins import entry_points as plugins

ASK_BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
_replaybuf
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the script of each shell, as the command prints it."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        with pytest.MonkeyPatch.context() as patch, (folder / shell).open("w") as file:
            patch.setattr("sys.stdout", file)
            main(["completion", shell])
    return folder


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash: apt-get install bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ex"], {"explain", "export"}),
        (["runs", "pa"], {"pause"}),
        (["explain", "--ge"], {"--generation"}),
        (["groups", "list", "--state", "li"], {"live"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        (["train", "--mod"], {"--model", "--model-options"}),
        (["nothing-starts-like-this"], set()),
    ],
)
def test_bash_completes_commands_options_and_values(scripts: Path, words: list[str], offered: set[str]) -> None:
    asked = ["bash", "-c", ASK_BASH, "bash", str(scripts / "bash"), "replaybuf", *words]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    assert {word.strip() for word in done.stdout.splitlines()} - {""} == offered


@pytest.mark.parametrize(("shell", "start"), [("zsh", "#compdef replaybuf"), ("fish", "")])
def test_each_shell_gets_a_script_with_every_command(scripts: Path, shell: str, start: str) -> None:
    script = (scripts / shell).read_text()
    assert script.startswith(start)
    assert all(word in script for word in ("explain", "export", "strategies", "generation", "fish"))


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh: apt-get install zsh")
def test_zsh_reads_its_script(scripts: Path) -> None:
    subprocess.run(["zsh", "-n", str(scripts / "zsh")], timeout=60, check=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish: apt-get install fish")
def test_fish_reads_its_script(scripts: Path) -> None:
    subprocess.run(["fish", "--no-execute", str(scripts / "fish")], timeout=60, check=True)


def test_a_command_that_cannot_be_imported_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other commands complete all the same."""
    broken = EntryPoint("broken", "no_such_module:run", plugins.COMMANDS)
    monkeypatch.setattr(plugins, "installed", lambda group: EntryPoints([broken]))
    main(["completion", "bash"])
    shown = capsys.readouterr()
    assert "command broken is left out" in shown.err and "no_such_module" in shown.err
    assert "explain" in shown.out and "broken" not in shown.out


def test_an_unknown_shell_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
    assert "tcsh" in "".join(capsys.readouterr())
