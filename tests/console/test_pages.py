"""Every page of the console on a real run: it shows the run, without errors, and readable for everybody."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunClient, ServeProcess, group
from tests.console.conftest import HOSTILE, WIDE, violations, watched_pages
from tests.waiting import eventually

# Address, text that the page shows, selector that is there when the page is complete.
PAGES = [
    ("/", "paused-run", "table.runs td.reward svg"),
    ("/new", "Create a run", ".field"),
    ("/compare?run=sums&run=paused-run", "strategy.options.max_staleness", ".charts canvas"),
    ("/runs/sums", "2 of 4 groups", ".charts canvas"),
    ("/runs/sums/rollouts", "g5-0", "tbody tr"),
    ("/runs/sums/rollouts?step=3&order=reward&desc=false", "g3-0", "tbody tr"),
    ("/runs/sums/groups/g5-0", "Rollout 3", ".rollout"),
    ("/runs/sums/groups/g5-0?show=logprob", "likely", ".rollout span.t0"),
    ("/runs/sums/ledger", "step 5", ".timeline li"),
    ("/runs/sums/steps/5", "Why this batch", "tbody tr"),
    ("/runs/sums/problems", "has no engine", "tbody tr"),
    ("/runs/sums/act", "Preview the change", ".field"),
    ("/runs/sums/rollouts?list=samples", "24 samples shown", ".texts tbody tr"),
    ("/runs/sums/rollouts?list=ends", "Step 0, the first", ".texts tbody tr"),
    ("/runs/paused-run", "No batch yet", ".flow li"),
    ("/nowhere", "This address has no page", ".empty"),
]
ADDRESSES = [address for address, _, _ in PAGES]


@pytest.fixture(scope="module", params=PAGES, ids=ADDRESSES)
def complete_page(request: pytest.FixtureRequest, browser: Any, trained: RunClient) -> Iterator[Any]:
    """One of the pages, opened once for the tests that look at all of them."""
    address, text, selector = request.param
    with watched_pages(browser) as open_page:
        page = open_page(str(trained.http.base_url), address)
        page.wait_for_selector(selector)
        page.get_by_text(text).first.wait_for()
        yield page


def test_a_page_shows_the_run_without_errors(complete_page: Any) -> None:
    """Its text, its last part, and no error of the browser, which the fixture looks for at its end."""
    assert complete_page.title().endswith("replaybuf")
    assert complete_page.locator("#banner").is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_accessible(complete_page: Any, scheme: str) -> None:
    """Axe finds no violation on a desktop and on a phone; the themes differ in nothing but contrast."""
    complete_page.emulate_media(color_scheme=scheme)
    for width in (1280, 390):  # on a phone the rows of tables are cards
        complete_page.set_viewport_size({"width": width, "height": 900})
        assert violations(complete_page, *(("color-contrast",) if scheme == "dark" else ())) == [], width


def test_a_page_fits_every_width(complete_page: Any) -> None:
    """From a phone to 4k, nothing makes the whole page scroll sideways; at 1120 pixels and more no part of it does."""
    page = complete_page
    for width in (3840, 1280, 1120, 768, 390, 360):
        page.set_viewport_size({"width": width, "height": 900})
        # Charts are drawn anew a moment after the window has its size.
        eventually(
            lambda: page.evaluate("document.documentElement.scrollWidth - innerWidth"), 30.0, lambda over: over <= 0
        )
        assert width < 1120 or page.evaluate(WIDE) == []


def violations_in_both_themes(page: Any) -> list[list[Any]]:
    page.emulate_media(color_scheme="light")
    light = violations(page)
    page.emulate_media(color_scheme="dark")
    return [light, violations(page, "color-contrast")]


def test_dialogs_and_the_page_of_an_absent_run_are_accessible(
    trained: RunClient, open_page: Callable[..., Any]
) -> None:
    page = open_page(str(trained.http.base_url), "/runs/nothing", expected=("status of 404",))
    page.locator("main [role=alert]").wait_for()
    assert violations_in_both_themes(page) == [[], []]
    page.get_by_role("button", name="Token", exact=True).click()
    page.get_by_role("textbox", name="Token").wait_for()
    assert violations_in_both_themes(page) == [[], []]
    page.keyboard.press("Escape")
    page.evaluate("location.hash = '#/runs/sums/act'")
    page.get_by_role("button", name="Finish", exact=True).click()
    page.locator("dialog button.danger").wait_for()
    assert violations_in_both_themes(page) == [[], []]


@pytest.mark.parametrize("width", [390, 1120])
def test_the_list_of_runs_needs_no_scrolling(trained: RunClient, open_page: Callable[..., Any], width: int) -> None:
    """On a phone each run is a card, whose figures have their names."""
    page = open_page(str(trained.http.base_url), viewport={"width": width, "height": 900})
    page.get_by_role("link", name="sums").wait_for()
    assert page.evaluate(WIDE) == []
    row = page.locator(".runs tbody tr", has_text="sums")
    step = row.locator("[data-label=Step]")
    named = step.evaluate("(cell) => getComputedStyle(cell, '::before').content")
    assert ("Step" in named or "data-label" in named) == (width == 390)
    assert page.get_by_role("button", name="Trainer seen").is_visible() == (width == 1120)


def test_hostile_names_and_metadata_are_shown_as_text(trained: RunClient, open_page: Callable[..., Any]) -> None:
    """Markup in metadata, in a name of a group and in that of a producer."""
    url = str(trained.http.base_url)
    page = open_page(url, "/runs/sums/groups/g5-0")
    page.get_by_text("Metadata").click()
    assert HOSTILE in page.locator("pre.change").inner_text().replace('\\"', '"')
    listed = open_page(url, "/runs/sums/rollouts")
    listed.get_by_role("link", name="<b>bold</b>").click()
    listed.wait_for_selector(".rollout")
    assert listed.locator("h1").inner_text() == "<b>bold</b>"
    producers = open_page(url, "/runs/sums/problems")
    producers.wait_for_selector("tbody tr")
    for shown in (page, listed, producers):
        assert shown.locator("main img, main script, main b").count() == 0
        assert "taken" not in shown.title()


def test_a_run_shows_where_it_waits_and_its_steps(trained: RunClient, open_page: Callable[..., Any]) -> None:
    """The flow marks the producers; a selection in one chart narrows all of them; the CSV has every step."""
    page = open_page(str(trained.http.base_url), "/runs/sums")
    page.wait_for_selector(".charts canvas")
    assert page.locator(".flow li.here h3").inner_text() == "Producers"
    assert "2 of 4 groups" in page.locator(".state").inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Reward as CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0] == '"step","mean + std","mean − std","mean"'
    assert [line.split(",")[0] for line in lines[1:]] == ["0", "1", "2", "3", "4", "5"]
    with page.expect_download() as report:
        page.get_by_role("button", name="Report").click()
    assert report.value.suggested_filename == "sums.html"
    assert "6 trained steps" in Path(report.value.path()).read_text()
    page.locator(".u-over").first.scroll_into_view_if_needed()
    plot = page.locator(".u-over").first.bounding_box()
    page.mouse.move(plot["x"] + plot["width"] * 0.5, plot["y"] + 20)
    page.mouse.down()
    page.mouse.move(plot["x"] + plot["width"] - 2, plot["y"] + 20, steps=5)
    page.mouse.up()
    page.get_by_text("steps 3 to 4").wait_for()
    page.get_by_role("button", name="Whole run").click()
    page.get_by_text("steps 0 to 5").wait_for()


def test_a_run_without_steps_has_no_empty_chart(trained: RunClient, open_page: Callable[..., Any]) -> None:
    page = open_page(str(trained.http.base_url), "/runs/paused-run")
    page.get_by_text("No batch yet. Charts begin with the first step.").wait_for()
    page.locator(".flow li").first.wait_for()
    assert page.locator(".chart:visible").count() == 0


def test_the_runs_are_searched_and_sorted(trained: RunClient, open_page: Callable[..., Any]) -> None:
    """By a part of the name, and by a column in both directions."""
    page = open_page(str(trained.http.base_url))
    page.wait_for_selector("table.runs tbody tr")
    names = page.locator("table.runs tbody tr td:first-child")
    page.get_by_role("button", name="Run", exact=True).click()  # first come those that stand still, after 30 s
    assert names.all_inner_texts() == ["paused-run", "sums"]
    page.get_by_role("button", name="Step").click()
    assert names.all_inner_texts() == ["paused-run", "sums"]
    page.get_by_role("button", name="Step").click()
    assert names.all_inner_texts() == ["sums", "paused-run"]
    page.get_by_label("Search runs").fill("pause")
    assert names.all_inner_texts() == ["paused-run"]
    page.get_by_label("Search runs").fill("no such run")
    page.get_by_text("No run matches").wait_for()


def test_the_leader_of_a_run_is_shown_where_several_servers_share_them(
    trained: RunClient, open_page: Callable[..., Any]
) -> None:
    """One server alone needs no such column."""
    url = str(trained.http.base_url)
    page = open_page(url)
    lines = page.locator("table.runs tbody tr")
    lines.first.wait_for()
    leader = page.get_by_role("columnheader", name="Led by")
    assert leader.count() == 0
    overview = trained.http.get("/v1/overview").json()
    overview["runs"][0]["leader"] = "http://other:8900"
    page.route("**/v1/overview", lambda route: route.fulfill(json=overview))
    leader.wait_for()
    assert lines.filter(has_text=overview["runs"][0]["run"]).locator("td").last.inner_text() == "other:8900"
    assert lines.filter(has_text=overview["runs"][1]["run"]).locator("td").last.inner_text() == url.partition("//")[2]


def test_the_theme_is_switched_and_kept(trained: RunClient, open_page: Callable[..., Any]) -> None:
    """The choice outlives a reload; without one the page follows the system."""
    page = open_page(str(trained.http.base_url), color_scheme="dark")
    theme = "getComputedStyle(document.documentElement).getPropertyValue('--theme').trim()"
    assert page.evaluate(theme) == "dark"
    page.get_by_role("button", name="Theme").click()
    assert page.evaluate(theme) == "light"
    page.reload()
    assert page.evaluate(theme) == "light"


def test_a_server_that_goes_away_is_reported_and_found_again(
    own_server: Callable[[], ServeProcess], open_page: Callable[..., Any], connect: Callable[[str, str], RunClient]
) -> None:
    """The page keeps what it knew, says since when, and continues with the server that comes back."""
    server = own_server()
    connect(server.url, "here").put(batch={"groups_per_batch": 1})
    page = open_page(server.url, expected=("ERR_CONNECTION", "Failed to load resource"))
    page.get_by_role("link", name="here").wait_for()
    server.port = server.url.rpartition(":")[2]
    server.stop()
    page.get_by_text("The server has not answered since").wait_for()
    assert page.get_by_role("link", name="here").is_visible()
    server.start()
    page.locator("#banner").wait_for(state="hidden")


def test_a_thousand_runs_do_not_hold_the_page(trained: RunClient, open_page: Callable[..., Any]) -> None:
    """It shows the first 200 and finds any of them, also while it is still filling the list."""
    url = str(trained.http.base_url)
    row = trained.http.get("/v1/overview").json()
    sums = next(run for run in row["runs"] if run["run"] == "sums")
    row["runs"] = [sums | {"run": f"run-{number:04}", "rewards": [number % 7, 1.0]} for number in range(1000)]
    page = open_page(url)
    page.route("**/v1/overview", lambda route: route.fulfill(json=row))
    page.get_by_text("1,000 of 1,000 runs").wait_for()
    lines = page.locator("tbody tr")
    lines.nth(199).wait_for()
    assert lines.count() == 200
    page.get_by_label("Search runs").fill("run-0999")
    assert lines.count() == 1
    page.get_by_label("Search runs").fill("")
    page.get_by_role("button", name="Show 800 more").click()
    lines.nth(999).wait_for()
    assert lines.count() == 1000
    page.evaluate(
        """() => {
          const type = (text) => {
            const search = document.querySelector("[type=search]");
            search.value = text;
            search.dispatchEvent(new Event("input"));
          };
          type("run");
          type("run-0999");
        }"""
    )
    page.get_by_text("1 of 1,000 runs").wait_for()
    with page.expect_response("**/v1/overview"):  # by then the first search would have filled the list
        pass
    assert lines.all_inner_texts() == [lines.first.inner_text()]


def test_a_group_is_read_again_only_when_it_has_changed(run: RunClient, open_page: Callable[..., Any]) -> None:
    """The page asks for its metadata; its rollouts may be large."""
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"))
    whole: list[str] = []
    page = open_page(str(run.http.base_url))
    page.on("request", lambda request: whole.append(request.url) if "/groups/a" in request.url else None)
    page.evaluate(f"location.hash = '#/runs/{run.run}/groups/a'")
    page.locator(".title .pill.live").wait_for()
    with page.expect_response(lambda response: "limit=1" in response.url):
        pass
    assert len(whole) == 1
    run.train(run.attach(), range(1))
    page.get_by_role("link", name="trained, step 0").wait_for()
    assert len(whole) in (2, 3)  # it may have looked between batch and ack


def test_a_refresh_without_news_changes_nothing_in_the_page(trained: RunClient, open_page: Callable[..., Any]) -> None:
    """A thousand runs are compared every 2 s: what stays the same is not drawn again, one change is one change."""
    overview = trained.http.get("/v1/overview").json()
    sums = next(run for run in overview["runs"] if run["run"] == "sums")
    overview["runs"] = [sums | {"run": f"run-{number:04}"} for number in range(1000)]
    page = open_page(str(trained.http.base_url))
    page.route("**/v1/overview", lambda route: route.fulfill(json=overview))
    page.get_by_text("1,000 of 1,000 runs").wait_for()
    page.locator("tbody tr").nth(199).wait_for()
    with page.expect_response("**/v1/overview"):
        page.evaluate(
            """() => {
              window.changes = 0;
              const count = (found) => (window.changes += found.length);
              const watch = new MutationObserver(count);
              watch.observe(document.body, { subtree: true, childList: true, characterData: true, attributes: true });
            }"""
        )
    with page.expect_response("**/v1/overview"):
        pass
    assert page.evaluate("window.changes") == 0
    overview["runs"][7]["step"] += 1
    page.wait_for_function("() => window.changes > 0")
    assert page.evaluate("window.changes") <= 2


def test_the_console_is_used_with_the_keyboard_alone(trained: RunClient, open_page: Callable[..., Any]) -> None:
    """Sort, search, open a run, skip to its content, open and leave a dialog; the focus is never lost."""
    page = open_page(str(trained.http.base_url))
    focused = "document.activeElement.innerText || document.activeElement.id"
    page.get_by_role("button", name="Step").focus()
    page.keyboard.press("Enter")
    page.locator("th[aria-sort=ascending] button[data-sort=step]").wait_for()
    with page.expect_response("**/v1/overview"):
        pass
    assert page.evaluate(focused).startswith("Step")
    page.get_by_label("Search runs").focus()
    page.keyboard.type("sums")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")
    page.get_by_role("link", name="sums").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="sums").wait_for()
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("button", name="Token", exact=True).focus()
    page.keyboard.press("Enter")
    page.get_by_role("textbox", name="Token").wait_for()
    assert page.evaluate("document.activeElement.id") == "token-field"
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="hidden")
    assert page.evaluate("document.activeElement.id") == "token"


def test_what_is_read_aloud_changes_only_with_news(trained: RunClient, open_page: Callable[..., Any]) -> None:
    """Each change of a status is read: none holds an age or a speed, which change at every refresh."""
    for address in ("/", "/runs/sums", "/runs/sums/act"):
        page = open_page(str(trained.http.base_url), address)
        page.wait_for_selector({known: selector for known, _, selector in PAGES}[address])
        texts = [text for text in page.locator("[role=status]").all_inner_texts() if text]
        assert all(text.startswith(("2 of 2 runs", "running", "stands still")) for text in texts), texts
        assert not any(word in text for text in texts for word in ("tokens/s", " ago", " for "))


@pytest.mark.parametrize("part", ["", "/rollouts", "/ledger", "/problems", "/act", "/steps/3", "/groups/a"])
def test_a_run_that_does_not_exist_shows_the_reason_and_no_empty_parts(
    trained: RunClient, open_page: Callable[..., Any], part: str
) -> None:
    """No chart, form or table that would look like a run without data; links lead on."""
    page = open_page(str(trained.http.base_url), f"/runs/nothing{part}", expected=("status of 404",))
    shown = page.locator("main [role=alert]", has_text="The run 'nothing' does not exist. Runs here: ")
    shown.wait_for()
    assert trained.run in shown.inner_text() and "PUT" not in shown.inner_text()
    assert page.locator("main .chart, main table, main textarea, main input, main .empty .empty").count() == 0
    assert page.locator("#banner").is_hidden()
    page.get_by_role("link", name="create a run").click()
    page.get_by_role("heading", name="Create a run").wait_for()


def test_a_run_that_is_deleted_while_its_page_is_open_shows_that(run: RunClient, open_page: Callable[..., Any]) -> None:
    """And a run that appears under an open address is shown."""
    page = open_page(str(run.http.base_url), f"/runs/{run.run}", expected=("status of 404", "status of 410"))
    page.locator("main [role=alert]").wait_for()
    run.put(batch={"groups_per_batch": 1}).raise_for_status()
    page.locator(".flow li").first.wait_for()
    run.http.patch(run.path, json={"state": "finished"}).raise_for_status()
    run.http.delete(run.path).raise_for_status()
    page.locator("main [role=alert]", has_text="was deleted").wait_for()
    assert page.locator("main .chart, main .flow").count() == 0


def test_a_reward_of_one_step_has_no_sign_that_it_has_not(run: RunClient, open_page: Callable[..., Any]) -> None:
    """One value makes no line: what stands in its place must not read as a minus."""
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"))
    run.train(run.attach(), range(1))
    page = open_page(str(run.http.base_url))
    page.get_by_label("Search runs").fill(run.run)
    cell = page.locator("tr", has=page.get_by_role("link", name=run.run, exact=True)).locator("td.reward")
    cell.get_by_text(".").wait_for()
    (row,) = (row for row in run.http.get("/v1/overview").json()["runs"] if row["run"] == run.run)
    assert float(cell.inner_text()) == pytest.approx(row["rewards"][-1], abs=1e-3)


ARROWS = """() => [...document.querySelectorAll(".flow li")].map((card, at, cards) => {
  const arrow = getComputedStyle(card, "::after").content.replaceAll('"', "");
  if (at + 1 === cards.length) return [arrow, "none"];
  const [here, next] = [card.getBoundingClientRect(), cards[at + 1].getBoundingClientRect()];
  const down = next.top >= here.bottom;
  return [arrow, !down ? "→" : next.right <= here.left ? "↙" : "↓"];
})"""
"""The arrow behind each card of the flow, and the one that points to the next card."""


@pytest.mark.parametrize("width", [390, 768, 1056, 1280])
def test_arrows_of_the_flow_point_to_the_next_card(
    trained: RunClient, open_page: Callable[..., Any], width: int
) -> None:
    """Also where the cards take several rows."""
    page = open_page(str(trained.http.base_url), "/runs/sums", viewport={"width": width, "height": 900})
    page.locator(".flow li").nth(5).wait_for()
    arrows = page.evaluate(ARROWS)
    assert len(arrows) == 6 and all(drawn == right for drawn, right in arrows), arrows


def test_one_of_a_thing_is_written_in_the_singular(run: RunClient, open_page: Callable[..., Any]) -> None:
    """On every page of a run of one group, one rollout, one rank and one failed prompt."""
    run.put(batch={"groups_per_batch": 1, "tokens_per_batch": None}, tickets={"max_attempts": 1})
    run.append(group("a", rollouts=1))
    run.train(run.attach(), range(1))
    run.append(group("b", rollouts=1))
    ticket = run.post("tickets", producer="p", count=1).json()["tickets"][0]["ticket"]
    run.http.delete(f"{run.path}/tickets/{ticket}", params={"reason": "reward_raised"}).raise_for_status()
    run.http.put(f"{run.path}/producers/p", json={"engines": 0}).raise_for_status()
    page = open_page(str(run.http.base_url))
    for part, text in {
        "": "1 group",
        "/groups/a": "1 rollout",
        "/ledger": "1 rank,",
        "/steps/0": "1 micro-batch of",
        "/problems": "1 prompt failed",
    }.items():
        page.evaluate(f"location.hash = '#/runs/{run.run}{part}'")
        page.locator("main", has_text=re.compile(rf"{text}(?!s)")).wait_for()
        shown = page.locator("main").inner_text()
        assert not re.findall(r"(?<![\w.,:/-])1 (?:live |dead |failed |more )?[a-z-]{2,}s\b", shown), shown


def test_one_click_lists_the_worst_the_longest_and_the_most_mixed_groups(run: RunClient, open_page: Any) -> None:
    run.put(batch={"groups_per_batch": 9})
    rewards = {"even": [0.5, 0.5], "mixed": [0.0, 1.0], "bad": [-1.0, -1.0]}
    for name, scores in rewards.items():
        stored = group(name, rollouts=2, tokens=20 if name == "even" else 8)
        for rollout, reward in zip(stored["rollouts"], scores, strict=True):
            rollout["reward"] = reward
        run.append(stored)
    page = open_page(str(run.http.base_url), f"/runs/{run.run}/rollouts")
    for tab, first in (("Worst", "bad"), ("Longest", "even"), ("Widest spread", "mixed"), ("Newest", "bad")):
        page.get_by_role("link", name=tab, exact=True).click()
        page.locator("nav a[aria-current]", has_text=tab).wait_for()
        page.locator("tbody tr").first.get_by_role("link", name=first, exact=True).wait_for()
