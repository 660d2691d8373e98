"""Runs side by side in the console: chosen in the list, what differs, one line per run in each chart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunClient, ServeProcess
from tests.console.conftest import HOSTILE, play

Connect = Callable[[str, str], RunClient]
OpenPage = Callable[..., Any]


@pytest.fixture
def server(own_server: Callable[[], ServeProcess], connect: Connect) -> ServeProcess:
    """A service with two runs of 5 and 3 steps, of which one had its staleness bound changed."""
    server = own_server()
    for name, steps in (("first", 5), ("second", 3)):
        run = connect(server.url, name)
        play(run, steps, seed=steps)
        assert run.http.patch(run.path, json={"state": "paused"}).is_success
    changed = {"strategy": {"name": "one-step-off-policy", "options": {"max_staleness": 7}}}
    assert run.http.patch(run.path, json=changed).is_success
    return server


COLOURED = """name => {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const wanted = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const chart = [...document.querySelectorAll("section.chart")].find((one) => one.innerText.includes("Rollout length"));
  const canvas = chart.querySelector("canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 3] > 200 && wanted.every((value, part) => Math.abs(data[at + part] - value) < 24)) return true;
  }
  return false;
}"""
"""Whether the chart of rollout lengths has a pixel in a colour of lines."""


def cells(page: Any, table: str, name: str) -> list[str]:
    """Texts of the row of a table that begins with `name`."""
    rows = page.get_by_role("region", name=table).locator("tbody tr")
    texts: list[str] = rows.filter(has=page.get_by_role("cell", name=name, exact=True)).locator("td").all_inner_texts()
    return texts


def test_runs_chosen_in_the_list_are_shown_side_by_side(server: ServeProcess, open_page: OpenPage) -> None:
    """What was chosen stays chosen while the list is sorted and refreshed."""
    page = open_page(server.url)
    page.get_by_role("link", name="Compare these").wait_for()
    page.get_by_label("Compare second").check()
    page.get_by_text("choose 2 to 6 runs").wait_for()
    page.get_by_role("button", name="Run").click()
    page.get_by_role("button", name="Run").click()
    assert page.get_by_label("Compare second").is_checked() and not page.get_by_label("Compare first").is_checked()
    page.get_by_label("Compare first").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    page.get_by_role("heading", name="Runs side by side").wait_for()
    page.locator(".charts canvas").first.wait_for()
    assert page.evaluate("location.hash") == "#/compare?run=second&run=first"
    assert cells(page, "Settings that differ", "strategy.options.max_staleness")[1:] == ["7", "2"]
    assert cells(page, "Settings that differ", "batch.groups_per_batch") == []
    assert cells(page, "Newest steps", "step")[1:] == ["3", "5"]


def test_figures_and_lines_are_those_of_the_histories(
    server: ServeProcess, open_page: OpenPage, connect: Connect
) -> None:
    """The table has the means of the newest steps; a chart has one line per run, over all steps of both."""
    page = open_page(server.url, "/compare?run=first&run=second")
    chart = page.locator("section.chart", has_text="Rollout length, mean")
    chart.locator("canvas").wait_for()
    means = []
    for run in ("first", "second"):
        columns = connect(server.url, run).get("history").json()["columns"]
        means.append(f"{sum(columns['reward_mean']) / len(columns['reward_mean']):.3f}")
    assert cells(page, "Newest steps", "reward")[1:] == means
    with page.expect_download() as saved:
        chart.get_by_role("button", name="CSV").click()
    lines = Path(saved.value.path()).read_text().splitlines()
    assert lines[0] == '"step","first","second"'
    assert [line.split(",")[0] for line in lines[1:]] == ["0", "1", "2", "3", "4"]
    assert lines[-1].endswith(",") and not lines[1].endswith(",")
    page.get_by_label("Axis").select_option("hours")
    chart.locator(".u-legend", has_text="hours").wait_for()


def drag(page: Any, low: float, high: float) -> None:
    """Drag over the first chart between two shares of its width."""
    plot = page.locator(".chart .u-over").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * low, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * high, box["y"] + 40, steps=4)
    page.mouse.up()


def test_a_range_is_that_of_every_run(server: ServeProcess, open_page: OpenPage) -> None:
    """Dragged over a chart; a run without a step in it is left out; the whole runs are one click away."""
    page = open_page(server.url, "/compare?run=first&run=second")
    page.locator(".charts canvas").first.wait_for()
    steps = page.locator("tr", has_text="steps in the means below").locator("td")
    drag(page, 0.2, 0.9)
    steps.get_by_text("2", exact=True).wait_for()
    assert steps.all_inner_texts()[1:] == ["3", "2"]
    page.get_by_role("button", name="Whole runs").click()
    steps.get_by_text("5", exact=True).wait_for()
    assert steps.all_inner_texts()[1:] == ["5", "3"]
    drag(page, 0.7, 0.9)
    steps.get_by_text("1", exact=True).wait_for()
    assert steps.all_inner_texts()[1:] == ["1"]


def test_a_run_of_one_step_is_seen_beside_a_longer_one(
    server: ServeProcess, open_page: OpenPage, connect: Connect
) -> None:
    """A line needs two values: a single one is a point, in the colour of its run."""
    play(connect(server.url, "single"), 1)
    page = open_page(server.url, "/compare?run=first&run=single")
    chart = page.locator("section.chart", has_text="Rollout length, mean")
    chart.locator("canvas").wait_for()
    page.wait_for_function(COLOURED, arg="--line-2")


def test_a_run_that_is_not_there_is_named(server: ServeProcess, open_page: OpenPage) -> None:
    """The others are shown; a name is text, and so is one of an address that nothing made."""
    page = open_page(
        server.url, f"/compare?run=first&run=gone&run={HOSTILE}", expected=("status of 404", "status of 422")
    )
    page.get_by_text("There is no run gone that you may see.").wait_for()
    page.locator(".charts canvas").first.wait_for()
    assert "taken" not in page.title()
    page.evaluate("location.hash = '#/compare'")
    page.get_by_text("Choose two or more").wait_for()
