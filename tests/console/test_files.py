"""Files of the console: the chart library is that of the lock file, scripts stay small, texts become text nodes."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

CONSOLE = Path(__file__).parents[2] / "replaybuf" / "console"
VENDOR = CONSOLE / "vendor"
MODULES = Path(__file__).with_name("node_modules")
OWN = sorted(path for path in CONSOLE.rglob("*.js") if VENDOR not in path.parents)
ORIGINS = {
    "uPlot.iife.min.js": "dist/uPlot.iife.min.js",
    "uPlot.min.css": "dist/uPlot.min.css",
    "uPlot.LICENSE.txt": "LICENSE",
}


def test_the_chart_library_has_the_recorded_digests() -> None:
    """Nobody edits it here: `make vendor` writes files and digests."""
    lines = [line.split() for line in (VENDOR / "SHA256SUMS").read_text().splitlines()]
    recorded = {name: digest for digest, name in lines}
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    del digests["SHA256SUMS"]
    assert digests == recorded
    assert recorded.keys() == ORIGINS.keys()


def test_the_chart_library_is_the_package_of_the_lock_file() -> None:
    """npm checked the package against the lock file when it installed it."""
    if not MODULES.is_dir():
        pytest.skip("no npm packages: run make browser")
    for name, origin in ORIGINS.items():
        assert (VENDOR / name).read_bytes() == (MODULES / "uplot" / origin).read_bytes(), name
    locked = json.loads((MODULES.parent / "package-lock.json").read_text())["packages"]["node_modules/uplot"]
    assert f"(v{locked['version']})" in (VENDOR / "uPlot.iife.min.js").read_text()[:400]


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_script_is_short_and_makes_no_markup_of_texts(path: Path) -> None:
    """At most 300 lines, and none of the calls that parse markup or run text."""
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
