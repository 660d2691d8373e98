"""Charts by reason: waits of the trainer and dropped groups, over steps."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import RunClient
from tests.conftest import group as make_group
from tests.console.conftest import OpenPage
from tests.waiting import eventually


def columns_of(page: object, chart: str) -> dict[str, tuple[str, ...]]:
    """Download the CSV of a chart; return its columns."""
    with page.expect_download() as download:  # type: ignore[attr-defined]
        page.get_by_role("button", name=f"{chart} as CSV").click()  # type: ignore[attr-defined]
    head, *rows = Path(download.value.path()).read_text().splitlines()
    return dict(zip(head.replace('"', "").split(","), zip(*(row.split(",") for row in rows), strict=True), strict=True))


def test_waits_and_drops_have_a_line_per_reason(run: RunClient, open_page: OpenPage) -> None:
    """A reason that comes later gets its line while the page is open; the newest step counts before it is acked."""
    run.put(batch={"groups_per_batch": 1}, strategy={"name": "on-policy"})
    epoch = run.attach()
    run.append(make_group("a"), make_group("late"))
    run.train(epoch, range(1))
    page = open_page(str(run.http.base_url), f"/runs/{run.run}")
    page.locator(".charts canvas").first.wait_for()
    assert page.get_by_role("button", name="Waits of the trainer as CSV").count() == 0
    page.locator(".columns").get_by_text("too_stale").wait_for()
    while not run.get("flow").json()["step_waited_s"]:
        run.batch(1, epoch, wait_ms=20)
    run.append(make_group("b", 1))
    run.train(epoch, range(1, 2))
    page.get_by_role("button", name="Waits of the trainer as CSV").wait_for()
    waits = columns_of(page, "Waits of the trainer")
    (reason,) = waits.keys() - {"step"}
    assert waits["step"] == ("0", "1") and float(waits[reason][0]) == 0.0 < float(waits[reason][1])
    eventually(lambda: columns_of(page, "Dropped groups") == {"step": ("0", "1"), "too_stale": ("0", "1")}, 60.0)
    with page.expect_download() as download:
        page.get_by_role("button", name="All as CSV").click()
    head = Path(download.value.path()).read_text().splitlines()[0]
    assert f'"waited {reason}"' in head and '"dropped too_stale"' in head


def test_a_run_says_for_how_long_its_present_reason_holds(run: RunClient, open_page: OpenPage) -> None:
    """On its page and in the list of runs."""
    run.put(batch={"groups_per_batch": 3})
    run.append(make_group("a"))
    flow, overview = run.get("flow").json(), run.http.get("/v1/overview").json()
    assert flow["row"]["waiting_s"] >= 0.0
    flow["row"]["waiting_s"] = 7200.0
    page = open_page(str(run.http.base_url))
    page.route("**/flow", lambda route: route.fulfill(json=flow))
    overview["runs"] = [flow["row"]]
    page.route("**/overview", lambda route: route.fulfill(json=overview))
    page.locator("td.why", has_text="too_few_groups for 2.0 h").wait_for()
    page.evaluate(f"location.hash = '#/runs/{run.run}'")
    page.locator(".state", has_text="too_few_groups for 2.0 h").wait_for()
