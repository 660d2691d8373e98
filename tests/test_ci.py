"""`.ci/packages` says what is not tested; it never ends a build."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / ".ci" / "packages"
SHELL = ("bash", "env", "cut", "paste", "sed", "id")


def run(folder: Path, *present: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the script where only these programs exist."""
    for name in (*SHELL, *present):
        (folder / name).symlink_to(shutil.which(name) or "/bin/true")
    return subprocess.run([PACKAGES, *options], env={"PATH": str(folder)}, capture_output=True, text=True, timeout=60)


def test_what_cannot_be_installed_is_named_in_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "promtool", "amtool", "chromium")
    assert done.returncode == 0 and "there is no apt-get" in done.stdout
    assert done.stderr == (
        "NOT TESTED HERE: accessibility of the console; completion in zsh; completion in fish; install npm zsh fish\n"
    )


@pytest.mark.parametrize("browser", ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"])
def test_nothing_is_installed_where_all_is_there(tmp_path: Path, browser: str) -> None:
    done = run(tmp_path, "promtool", "amtool", "npm", "zsh", "fish", browser)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_missing_programs_are_installed_once_by_apt_get(tmp_path: Path) -> None:
    """The apt-get of this test makes the program that its package has."""
    installer = tmp_path / "apt-get"
    installer.write_text(
        f"#!{shutil.which('bash')}\n"
        f'[ "$1" = update ] || {shutil.which("ln")} -s /bin/true {tmp_path}/fish; echo "$@" >>{tmp_path}/asked\n'
    )
    installer.chmod(0o755)
    sudo = tmp_path / "sudo"
    sudo.write_text('#!/bin/sh\nshift; exec "$@"\n')
    sudo.chmod(0o755)
    done = run(tmp_path, "promtool", "amtool", "chromium", "npm", "zsh")
    assert done.returncode == 0 and "installing fish" in done.stdout and not done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["update -qq", "install -y -qq --no-install-recommends fish"]
