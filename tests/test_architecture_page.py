"""The tour of the code names what is there, in the floors that the linter holds, and keeps to its hour."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LONGEST_CORE_LINES = 5_400
"""What is meant to be read in an hour."""


def lines_of(path: Path) -> int:
    """Count the lines of a file."""
    return len(path.read_text().splitlines())


def test_every_name_in_the_tour_stands_in_the_file_it_links_to() -> None:
    """Functions, classes and constants between code marks, in the text of a link to a source file."""
    links = re.findall(r"\[((?:`[\w.]+`(?:, )?)+)\]\(\.\./([^)]+\.(?:py|lua))\)", PAGE)
    assert len(links) > 60
    for names, path in links:
        known = set(re.findall(r"\w+", (ROOT / path).read_text())) | {Path(path).stem}
        for name in re.findall(r"[\w.]+", names):
            assert set(name.split(".")) <= known, (name, path)


def test_every_function_of_the_library_is_told_with_what_it_guards() -> None:
    library = (ROOT / "replaybuf" / "store" / "library.lua").read_text()
    section = PAGE.partition("## What is atomic where")[2].partition("\n\n## ")[0].partition("Three numbers")[0]
    assert set(re.findall(r"`(rb_\w+)`", section)) == set(re.findall(r"function_name = '(rb_\w+)'", library))


def test_floors_are_those_that_the_linter_holds() -> None:
    """Same modules, same order, the same ones side by side."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    table = PAGE.partition("## Floors and rooms")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| [\w, ]*\| (`.*`) \|$", table, re.MULTILINE)
    assert [re.findall(r"`(\w+)`", row) for row in rows] == [re.findall(r"\w+", layer) for layer in layers]


def test_every_module_of_the_core_is_in_the_tour() -> None:
    """Packages of the edge are named as folders."""
    core = ROOT / "replaybuf"
    modules = {path for folder in (core, core / "service", core / "store") for path in folder.glob("*.py")}
    linked = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\((\.\./[^)#]+)\)", PAGE)}
    assert {path for path in modules if path.name != "__init__.py"} - linked == set()


def test_what_decides_is_as_long_as_the_tour_says_and_stays_readable() -> None:
    """Each file within a tenth of the lines told, their sum within a fiftieth and below the bound."""
    told = dict(re.findall(r"^\| \d+ \| \[[^\]]+\]\(\.\./([^)]+)\) \| ([\d,]+) \|", PAGE, re.MULTILINE))
    counted = {path: lines_of(ROOT / path) for path in told}
    assert len(told) > 20
    for path, lines in told.items():
        assert abs(int(lines) - counted[path]) <= max(10, counted[path] // 10), (path, counted[path])
    (total,) = re.findall(r"Together \*\*([\d,]+) lines\*\*", PAGE)
    assert abs(int(total.replace(",", "")) - sum(counted.values())) <= sum(counted.values()) // 50
    assert sum(counted.values()) < LONGEST_CORE_LINES
