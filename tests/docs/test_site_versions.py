"""`make docs-version`: the releases of the site on the branch gh-pages, in a scratch repository of one page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
USER = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@localhost",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@localhost",
    "GIT_CONFIG_GLOBAL": os.devnull,
}

pytestmark = pytest.mark.skipif(
    find_spec("mike") is None, reason="needs the extra `docs`: pip install -c constraints.txt '.[docs]'"
)

Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Run a command in a repository that has the Makefile and one page, on a branch with one commit."""
    for name in ("Makefile", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# First page\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: scratch\ntheme: mkdocs\n")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | USER
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )

    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "Add a page"]):
        assert run("git", *command).returncode == 0
    return run


def docs_version(call: Call, *variables: str) -> subprocess.CompletedProcess[str]:
    """Run the verb with the environment of this test, which counts as installed."""
    stamp = f"{sys.prefix}/.installed"
    return call("make", "--silent", f"--old-file={stamp}", f"VENV={sys.prefix}", "docs-version", *variables)


def test_each_release_keeps_its_pages_and_the_newest_opens_first(call: Call, tmp_path: Path) -> None:
    """The branch has a folder per release and the list for the header; the checkout stays as it was."""
    for version in ("0.1", "0.2"):
        (tmp_path / "docs" / "index.md").write_text(f"# Page of {version}\n")
        assert call("git", "commit", "-qam", f"Release {version}").returncode == 0
        made = docs_version(call, f"VERSION={version}")
        assert made.returncode == 0, made.stdout + made.stderr

    def page(path: str) -> str:
        return call("git", "show", f"gh-pages:{path}").stdout

    assert "Page of 0.1" in page("0.1/index.html") and "Page of 0.2" in page("0.2/index.html")
    versions = json.loads(page("versions.json"))
    assert [(entry["version"], entry["aliases"]) for entry in versions] == [("0.2", ["latest"]), ("0.1", [])]
    assert "latest/" in page("index.html")
    assert call("git", "status", "--porcelain").stdout == ""
    assert call("git", "branch", "--show-current").stdout == "main\n"


def test_without_a_version_nothing_is_committed(call: Call) -> None:
    made = docs_version(call)
    assert made.returncode != 0 and "VERSION=0.1" in made.stderr
    assert call("git", "branch", "--list", "gh-pages").stdout == ""
