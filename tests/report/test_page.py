"""The report of a run: what was learned first, no empty part, and text of users as text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from replaybuf.client import Client
from replaybuf.report import render
from tests.cli.test_runs import Terminal as Terminal
from tests.cli.test_runs import terminal as terminal
from tests.conftest import RunClient, ServeProcess, group
from tests.console.conftest import HOSTILE
from tests.console.test_learning import train
from tests.service.test_evaluations import post, result


class Page(HTMLParser):
    """Headings and tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.headings: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("h2", "h3"):
            self.headings.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("h2", "h3"):
            self.headings[-1] += data


def rendered(run: RunClient, service: ServeProcess) -> str:
    with Client(service.url, run.run) as client:
        return render(client.get_run(), client.get_history(), client.list_evaluations())


def test_a_report_shows_what_was_learned_and_leaves_out_what_is_not_there(
    terminal: Terminal, run: RunClient, tmp_path: Path
) -> None:
    """Held-out results, rewards and metrics come first; a value that never moved is a line of text."""
    run.put(batch={"groups_per_batch": 2})
    epoch = run.attach()
    for step in range(3):
        train(run, epoch, step, {"accuracy": step, "loss": 1.0 - step / 4, "flat": 7.0, "none": None})
    for version in (0, 2):
        assert post(run, result(version, reward_mean=version / 4, standard_error=0.1)).status_code == 200
    path = tmp_path / "report.html"
    assert terminal("report", run.run, "--to", path) == f"{path}: report of {run.run}, 3 steps\n"
    text = path.read_text()
    page = Page(text)
    assert page.headings[:3] == ["Learning", "Held-out: held-out", "loss"]
    assert page.headings.index("loss") < page.headings.index("accuracy"), "what people look for comes first"
    assert "Dropped groups" not in text and "none" not in page.headings and "flat" not in page.headings
    assert re.search(r">flat</th><td[^>]*>value 7<", text)
    assert f"{run.run}: running, 3 trained steps, mean reward 0.5 in the first step, 0.5 in the last step" in text


def test_a_run_without_a_step_has_a_report_without_charts(run: RunClient, service: ServeProcess) -> None:
    run.put(batch={"groups_per_batch": 2})
    text = rendered(run, service)
    assert f"{run.run}: running, no step yet" in text and "svg" not in Page(text).tags
    assert Page(text).headings == ["Groups", "Configuration"]


def test_names_of_users_are_text(run: RunClient, service: ServeProcess) -> None:
    """Of held-out sets and of metrics."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    name = "<script>x</script>&\"'"
    for step in range(2):
        train(run, epoch, step, {name: float(step)}, groups=1)
    for version in range(2):
        assert post(run, result(version, name=HOSTILE, reward_mean=version / 2)).status_code == 200
    page = Page(rendered(run, service))
    assert "script" not in page.tags and "img" not in page.tags
    assert name in page.headings and f"Held-out: {HOSTILE}" in page.headings


@pytest.mark.parametrize("to", ["missing/report.html", "."])
def test_a_report_that_cannot_be_written_names_the_file(
    terminal: Terminal, run: RunClient, tmp_path: Path, to: str
) -> None:
    run.put(batch={"groups_per_batch": 1})
    assert f"{tmp_path / to} cannot be written: " in terminal.refused("report", run.run, "--to", tmp_path / to)


def test_a_report_says_what_it_is_about_in_json(terminal: Terminal, run: RunClient, tmp_path: Path) -> None:
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"))
    path = tmp_path / "r.html"
    assert terminal.json("report", run.run, "--to", path) == {"run": run.run, "path": str(path), "steps": 0}
