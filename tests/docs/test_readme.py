"""The README: its example runs unchanged, and its verbs exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ServeProcess

README = Path(__file__).parents[2] / "README.md"
PATIENCE = """
import functools, httpx
for call in ("put", "post", "get"):
    setattr(httpx, call, functools.partial(getattr(httpx, call), timeout=30.0))
"""
"""Runs before the example: the default timeout of httpx, 5 s, is too short on a loaded machine."""


def example() -> str:
    """Cut the only Python block out of the README."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    return str(blocks[0])


def run_example(url: str) -> str:
    """Run the example unchanged against a service; return what it prints."""
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
    """The second time the group is a duplicate and the batch has the same bytes."""
    first, second = run_example(own_service.url), run_example(own_service.url)
    assert "'status': 'stored'" in first
    assert "'status': 'duplicate'" in second
    assert first.partition("\n")[2] == second.partition("\n")[2] != ""
    assert "[5 6 7 8 5 6 7 8]" in first


def test_the_example_needs_only_httpx_and_safetensors() -> None:
    """It imports nothing of replaybuf."""
    imported = re.findall(r"^(?:import|from) (.+)$", example(), re.MULTILINE)
    assert imported == ["os, httpx, safetensors.numpy"]


@pytest.mark.parametrize("verb", ["install", "demo", "docs", "check", "test"])
def test_the_verbs_of_the_readme_are_targets_of_the_makefile(verb: str) -> None:
    """A reader can type each `make VERB` of the README."""
    assert re.search(rf"`?make (?:\w+ )*{verb}\b", README.read_text())
    assert re.search(rf"^{verb}:", (README.parent / "Makefile").read_text(), re.MULTILINE)
