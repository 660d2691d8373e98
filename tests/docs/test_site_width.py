"""The built site in a real Chromium: no page is wider than the window, on a phone and on a desktop."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.console.conftest import browser

__all__ = ["browser"]
ROOT = Path(__file__).parents[2]
WAIT_MS = 60_000
WIDE_ELEMENTS = """
() => {
  const limit = document.documentElement.clientWidth;
  const scrolls = (element) => {
    for (let box = element.parentElement; box && box !== document.body; box = box.parentElement)
      if (getComputedStyle(box).overflowX !== "visible") return true;
    return false;
  };
  return [...document.querySelectorAll(".md-content *")]
    .filter((element) => element.getBoundingClientRect().right > limit + 1 && !scrolls(element))
    .map((element) => `${element.tagName} ${element.textContent.trim().slice(0, 60)}`);
}
"""
"""Elements of a page that reach beyond the window and are in no box that scrolls."""

pytestmark = pytest.mark.skipif(
    find_spec("mkdocs") is None, reason="needs the extra `docs`: pip install -c constraints.txt '.[docs]'"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once for both widths."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=250)
    return folder


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_the_window(browser: Any, site: Path, width: int) -> None:
    """Tables and code scroll inside their own box."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(WAIT_MS)
    files = sorted(site.rglob("*.html"))
    assert files
    wide = {}
    for file in files:
        page.goto(file.as_uri())
        window, content = page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
        elements = page.evaluate(WIDE_ELEMENTS)
        if content > window or elements:
            wide[str(file.relative_to(site))] = (content, elements)
    page.close()
    assert wide == {}
