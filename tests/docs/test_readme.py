"""The README: its example runs as it stands, its length stays readable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ServeProcess

README = Path(__file__).parents[2] / "README.md"
LONGEST_EXAMPLE_LINES = 12
PATIENCE = """
import functools, httpx
for call in ("put", "post", "get"):
    setattr(httpx, call, functools.partial(getattr(httpx, call), timeout=30.0))
"""
"""Run before the example: httpx waits 5 s, which on a loaded machine is too short for a first batch."""


def example() -> str:
    """Cut the one Python block out of the README."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    return str(blocks[0])


def run_example(url: str) -> str:
    """Run the example verbatim against a service; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PATIENCE + example()],
        env=os.environ | {"REPLAYBUF_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_appends_a_group_and_fetches_its_batch(own_service: ServeProcess) -> None:
    """The second time the group is a duplicate and the batch is the same."""
    first, second = run_example(own_service.url), run_example(own_service.url)
    assert "'status': 'stored'" in first
    assert "'status': 'duplicate'" in second
    assert first.partition("\n")[2] == second.partition("\n")[2] != ""
    assert "[5 6 7 8 5 6 7 8]" in first


def test_the_example_needs_only_httpx_and_safetensors() -> None:
    """A dozen lines, no import of ours."""
    imported = re.findall(r"^(?:import|from) (.+)$", example(), re.MULTILINE)
    assert imported == ["os, httpx, safetensors.numpy"]
    assert len(example().splitlines()) <= LONGEST_EXAMPLE_LINES


def test_the_readme_is_short() -> None:
    """Under 150 lines."""
    assert len(README.read_text().splitlines()) < 150


@pytest.mark.parametrize("verb", ["install", "demo", "check", "test"])
def test_the_verbs_of_the_readme_are_targets_of_the_makefile(verb: str) -> None:
    """What the README tells to type exists."""
    assert re.search(rf"`?make (?:\w+ )*{verb}\b", README.read_text())
    assert re.search(rf"^{verb}:", (README.parent / "Makefile").read_text(), re.MULTILINE)
