"""The pages as a whole: the site builds, links lead somewhere, commands and options exist, tables are current."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_lines import calls, options_of

ROOT = Path(__file__).parents[2]
REPOSITORY = re.compile(r"https://github\.com/replaybuf/replaybuf/(?:blob|raw)/main/")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """List the anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_has_a_target(page: Path) -> None:
    """The file and the heading exist, also behind an absolute link to the repository, as the package index needs it."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        of_repository = REPOSITORY.match(link)
        if re.match(r"[a-z]+:", link) and not of_repository:
            continue
        target, _, anchor = link.removeprefix(of_repository[0] if of_repository else "").partition("#")
        file = (ROOT if of_repository else page.parent) / target if target else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_in_the_pages_exists(page: Path) -> None:
    """The command line knows each command and each option, in shell blocks and in code spans."""
    text = page.read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    scripts = [re.sub(r" +#.*|\\\n", "", block) for block in blocks]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for script in (*scripts, *spans):
        for command, used in calls(script):
            assert options_of(command), command
            assert used <= options_of(command), (command, used - options_of(command))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_blocks_start_replaybuf_from_the_virtual_environment(page: Path) -> None:
    """A reader who copies a line needs no activated environment."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert not re.search(r"^replaybuf ", "".join(blocks), re.MULTILINE)


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    """A page without an entry cannot be found."""
    navigation = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = (ROOT / "docs").rglob("*.md")
    assert sorted(navigation) == sorted(str(path.relative_to(ROOT / "docs")) for path in pages)


def test_the_tables_of_benchmarks_are_those_of_their_results() -> None:
    """`make bench` and `make docs` write them."""
    code = "import tables; print(tables.page(), end='')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == (ROOT / "benchmarks" / "results" / "README.md").read_text()
