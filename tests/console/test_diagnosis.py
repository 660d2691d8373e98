"""What a person finds in the console: a run that stands still and its cause, what a change did, the step of a point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import ClockedServe, RunClient
from tests.conftest import group as make_group
from tests.console.conftest import play
from tests.waiting import eventually

OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def stalled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunClient]:
    """A run whose producers are gone and one whose trainer is gone, both for an hour; one that is new."""
    folder = tmp_path_factory.mktemp("stalled")
    server = ClockedServe(folder / "data", folder / "clock").start()
    hungry, full, fresh = (RunClient(server.url, name) for name in ("hungry", "full", "a-new-run"))
    play(hungry, 3)
    play(full, 3)
    full.append(*(make_group(f"more-{number}", 3) for number in range(4)))
    server.put_forward(3600.0)
    fresh.put(batch={"groups_per_batch": 1})
    hungry.batch(3, hungry.attach(3))  # its trainer is alive and waits
    yield hungry
    for client in (hungry, full, fresh):
        client.http.close()
    server.end()


def test_runs_that_stand_still_come_first_with_their_cause(stalled: RunClient, open_page: OpenPage) -> None:
    """A person sees them without sorting, and can show these only."""
    page = open_page(str(stalled.http.base_url))
    page.get_by_text("2 stand still").wait_for()
    names = page.locator("table.runs tbody tr td:first-child")
    assert names.all_inner_texts() == ["full", "hungry", "a-new-run"]
    page.get_by_label("State").select_option("stands_still")
    assert names.all_inner_texts() == ["full", "hungry"]
    assert "The trainer is gone: no call for 60 min." in page.locator("tbody tr").first.inner_text()


@pytest.mark.parametrize(
    ("run", "cause", "place"),
    [
        ("full", "The trainer is gone: no call for 60 min.", "Trainer"),
        ("hungry", "The producers are gone: no call for 60 min.", "Producers"),
    ],
)
def test_the_page_of_a_run_names_who_is_gone_and_what_to_do(
    stalled: RunClient, open_page: OpenPage, run: str, cause: str, place: str
) -> None:
    """In the first line, and at its place in the flow."""
    page = open_page(str(stalled.http.base_url), f"/runs/{run}")
    page.locator(".state.stopped strong", has_text=cause).wait_for()
    assert "start" in page.locator(".state").inner_text()
    assert page.locator(".flow li.here.stopped h3").inner_text() == place
    assert page.locator(".title .pill").inner_text() == "stands still"


def test_a_dead_engine_is_the_first_cause(clocked: ClockedServe, open_page: OpenPage) -> None:
    """The trainer ended because it could not load its weights: the page names both, and what the producer lacks."""
    run = RunClient(clocked.url, "no-engine")
    play(run, 3)
    clocked.put_forward(900.0)
    run.http.put(f"{run.path}/producers/gen-1", json={"engines": 0, "held_back_by": "engine_away"})
    page = open_page(clocked.url, "/runs/no-engine")
    page.locator(".state.stopped strong", has_text="No engine takes the requests of the producer.").wait_for()
    page.locator(".state", has_text="The trainer is gone").wait_for()
    page.get_by_text("gen-1: no engine takes its requests").wait_for()
    run.http.close()


def test_a_finished_run_waits_nowhere_and_misses_nobody(run: RunClient, open_page: OpenPage) -> None:
    """Its producers have left because nothing is to be done: that is no problem, also not in the list of runs."""
    run.put(batch={"groups_per_batch": 1}, tickets={"heartbeat_s": 0.1})
    run.http.put(f"{run.path}/producers/gen-1", json={"engines": 1}).raise_for_status()
    run.http.patch(run.path, json={"state": "finished"}).raise_for_status()
    eventually(lambda: run.get("flow").json()["row"]["producers_gone"], 60.0)
    page = open_page(str(run.http.base_url), f"/runs/{run.run}")
    page.locator(".state strong", has_text="The run is finished.").wait_for()
    page.locator(".flow li").first.wait_for()
    assert (page.locator(".flow li.here").count(), page.locator("main .bad").count()) == (0, 0)
    page = open_page(str(run.http.base_url))
    page.get_by_label("Search runs").fill(run.run)  # finished runs come last, and 200 are shown
    row = page.locator("table.runs tbody tr").filter(has=page.get_by_role("link", name=run.run, exact=True))
    row.wait_for()
    assert row.locator(".bad").count() == 0


def test_a_change_is_marked_and_compared_with_the_steps_before(run: RunClient, open_page: OpenPage) -> None:
    """Means over the steps before and after; the entry of the ledger is one click away."""
    epoch = play(run, 4)
    run.http.patch(run.path, json={"strategy": {"options": {"max_staleness": 5}}}).raise_for_status()
    for step in range(4, 7):
        run.append(*(make_group(f"h{step}-{number}", step) for number in range(4)))
        run.train(epoch, range(step, step + 1))
    page = open_page(str(run.http.base_url), f"/runs/{run.run}")
    change = page.locator(".changes li")
    change.get_by_text("strategy.options.max_staleness: 2 → 5").wait_for()
    heads = change.locator("thead th").all_inner_texts()
    assert heads == ["mean of", "4 steps before", "3 steps after"]
    assert change.locator("tbody tr", has_text="reward").count() == 1
    change.get_by_role("link", name="step 4").click()
    page.locator(".timeline strong", has_text="config").first.wait_for()


def test_a_click_on_a_chart_opens_the_step(run: RunClient, open_page: OpenPage) -> None:
    """And the card of the batches links to the last step and its worst rewards."""
    play(run, 5)
    page = open_page(str(run.http.base_url), f"/runs/{run.run}")
    page.get_by_role("link", name="its worst rewards").wait_for()
    over = page.locator(".u-over").first
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    over.hover(position={"x": box["width"] - 2, "y": 20})
    over.click(position={"x": box["width"] - 2, "y": 20})
    page.get_by_role("heading", name="step 4").wait_for()
    page.go_back()
    page.get_by_role("link", name="its worst rewards").click()
    step = page.get_by_label("Step", exact=True)  # of the next page: the charts of this one have it in their labels
    step.wait_for(state="attached")
    page.locator("tbody tr").first.wait_for()
    assert step.input_value() == "4"
    cells = page.locator("tbody tr td:nth-child(4)").all_inner_texts()
    rewards = [float(cell.partition("group ")[2].split(" ")[0].replace("−", "-")) for cell in cells]
    assert len(rewards) == 4 and rewards == sorted(rewards)


def test_a_usual_wait_is_no_alarm(run: RunClient, open_page: OpenPage) -> None:
    """Every run waits between two batches."""
    run.batch(3, play(run, 3))
    flow = run.get("flow").json()
    flow["row"] |= {"idle_s": 1.5, "stands_still": False}  # however slow this machine is
    page = open_page(str(run.http.base_url))
    page.route("**/flow", lambda route: route.fulfill(json=flow))
    page.evaluate(f"location.hash = '#/runs/{run.run}'")
    page.locator(".state strong", has_text="The run works.").wait_for()
    assert page.locator(".state.waits, .state.stopped").count() == 0


def test_the_traceback_of_a_failed_producer_is_shown_and_stays_open(run: RunClient, open_page: OpenPage) -> None:
    """Under Problems, and its last line where the run says what it waits for."""
    run.batch(1, play(run, 1))
    failure = {"reason": "reward_raised", "prompt_index": 7, "traceback": "Traceback\n  File x\nValueError: boom"}
    run.http.put(f"{run.path}/producers/gen-1", json={"engines": 1, "failure": failure}).raise_for_status()
    page = open_page(str(run.http.base_url), f"/runs/{run.run}")
    page.locator(".state", has_text="producer gen-1 fails").get_by_text("ValueError: boom").wait_for()
    page.evaluate(f"location.hash = '#/runs/{run.run}/problems'")
    shown = page.locator("details.failure")
    shown.locator("summary", has_text="gen-1: reward_raised at prompt 7").click()
    assert shown.locator("pre").inner_text() == failure["traceback"]
    newer = failure | {"traceback": "ValueError: again"}
    run.http.put(f"{run.path}/producers/gen-1", json={"engines": 1, "failure": newer}).raise_for_status()
    shown.locator("pre", has_text="ValueError: again").wait_for()
    assert shown.locator("pre").is_visible()


def test_the_prompts_of_each_source_and_lost_long_rollouts_are_shown(run: RunClient, open_page: OpenPage) -> None:
    """The source that loses most prompts first, and a warning once the trained rollouts are shorter."""
    run.put(batch={"groups_per_batch": 2})
    epoch = run.attach()
    for number, source in enumerate(("sums", "sums", "code", "code")):
        run.append(make_group(f"g{number}", prompt_index=number, metadata={"source": source}))
    run.train(epoch, range(1))
    page = open_page(str(run.http.base_url), f"/runs/{run.run}")
    table = page.get_by_role("table", name="Prompts by source")
    table.wait_for()
    assert table.locator("tbody tr").all_inner_texts() == ["code\t2\t0\t0\t0 %", "sums\t2\t2\t0\t100 %"]
    page.get_by_text("A trained group was used 1.00 times. Producers stored 2.00 groups per use.").wait_for()
    flow = run.get("flow").json()
    flow["coverage"]["lengths"] = {"used": 310.2, "stored": 420.0, "biased": True}
    page.route("**/flow", lambda route: route.fulfill(json=flow))
    page.get_by_text("Long rollouts get lost: trained groups have 310 tokens per rollout, stored ones 420.").wait_for()
