"""The built site, also in a real Chromium: pages and code fit the window, on a phone and on a desktop."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

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
CUT_CODE = """
() => [...document.querySelectorAll(".md-content pre > code")]
  .filter((code) => code.scrollWidth > code.clientWidth + 1 && (innerWidth > 1000 || !code.closest(".language-text")))
  .map((code) => `CODE ${code.textContent.trim().slice(0, 60)}`)
"""
"""Code that a reader has to scroll sideways. On a phone only drawings may do so: they have no language."""
OPEN_ALL = "() => document.querySelectorAll('details').forEach((part) => (part.open = true))"
HIGHEST = 9000
"""Pixels of a page before a reader opens its parts."""

pytestmark = pytest.mark.skipif(
    find_spec("mkdocs") is None, reason="needs the extra `docs`: pip install -c constraints.txt '.[docs]'"
)


WIDTHS = (390, 1280)
PUBLIC_MODULES = (
    "replaybuf",
    "replaybuf.client",
    "replaybuf.client.producers",
    "replaybuf.strategy",
    "replaybuf.admission",
    "replaybuf.environment",
    "replaybuf.testing",
)


class Site(NamedTuple):
    """The built site, and how mkdocs ended."""

    folder: Path
    built: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Build the site once: it takes half a minute."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    return Site(folder, built)


def test_the_site_builds_without_a_warning(site: Site) -> None:
    """mkdocs runs in strict mode."""
    assert site.built.returncode == 0, site.built.stderr


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_the_python_pages_describe_every_public_name(site: Site, module: str) -> None:
    """A name that a module exports has a heading; so have the calls of the client."""
    pages = "".join(page.read_text() for page in (site.folder / "python").rglob("index.html"))
    headings = {heading.rpartition(".")[2] for heading in re.findall(r'id="(replaybuf[\w.]*)"', pages)}
    assert {*importlib.import_module(module).__all__} - {"__version__"} <= headings
    assert "put_run" in headings


def test_pages_fit_the_window_are_not_too_high_to_be_read_and_ask_no_other_host(browser: Any, site: Site) -> None:
    """Tables scroll inside their own box; code fits a desktop and wraps on a phone; long lists and tables are folded.

    Parts that open fit the width, too.
    """
    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    files = sorted(site.folder.rglob("*.html"))
    assert files
    wide, high = {}, {}
    for file in files:
        name = str(file.relative_to(site.folder))
        page.set_viewport_size({"width": WIDTHS[-1], "height": 900})
        page.goto(file.as_uri())
        height = page.evaluate("document.documentElement.scrollHeight")
        if height > HIGHEST and file.name == "index.html":
            high[name] = height
        page.evaluate(OPEN_ALL)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            window, content = page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
            elements = page.evaluate(WIDE_ELEMENTS) + page.evaluate(CUT_CODE)
            if content > window or elements:
                wide[name, width] = (content, elements)
    page.close()
    assert (wide, high) == ({}, {})
    assert {url.partition(":")[0] for url in asked} <= {"file", "data", "blob"}, asked


def test_each_decision_has_its_number_and_opens_by_a_link(browser: Any, site: Site) -> None:
    """Code and pages cite decisions by number; a number that is not taken moves no other."""
    numbers = re.findall(r"^(\d+)\. ", (ROOT / "docs" / "decisions.md").read_text(), re.MULTILINE)
    page = browser.new_page()
    page.goto((site.folder / "decisions" / "index.html").as_uri() + f"#{numbers[-1]}")
    titles = page.locator("details.decision > summary").all_inner_texts()
    assert [title.partition(".")[0] for title in titles] == numbers
    page.locator("details.decision[open]", has_text=titles[-1]).wait_for()
    page.close()
