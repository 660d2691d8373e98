"""Does the model learn? Held-out results, rewards and the metrics of the trainer stand first on the page of a run."""

from __future__ import annotations

from typing import Any

from tests.conftest import RunClient, group
from tests.console.conftest import HOSTILE, OpenPage
from tests.console.test_reason_charts import columns_of
from tests.service.test_evaluations import post, result

Metrics = dict[str, float | None]
STRATEGY = {"name": "one-step-off-policy", "options": {"max_staleness": 9}}


def train(run: RunClient, epoch: int, step: int, metrics: Metrics | None = None, groups: int = 2) -> None:
    """Store the groups of a step and train it."""
    run.append(*(group(f"{step}-{number}", step) for number in range(groups)))
    assert run.ready_batch(step, epoch).status_code == 200
    assert run.ack(step, epoch, metrics=metrics or {}).status_code == 200
    assert run.publish(step + 1, epoch).status_code == 200


def start(
    run: RunClient, open_page: OpenPage, steps: int, metrics: dict[str, float] | None = None, path: str = ""
) -> tuple[Any, int]:
    """Train some steps of a run and open its page; return the page and the epoch."""
    run.put(batch={"groups_per_batch": 2}, strategy=STRATEGY)
    epoch = run.attach()
    for step in range(steps):
        train(run, epoch, step, {name: value * (step + 1) for name, value in (metrics or {}).items()})
    return open_page(str(run.http.base_url), path or f"/runs/{run.run}"), epoch


def titles(page: Any) -> list[str]:
    """Titles of the charts that are shown, in their order."""
    headings: list[str] = page.locator(".chart:visible h3").all_inner_texts()
    return headings


def test_the_page_opens_with_learning_and_each_section_folds(run: RunClient, open_page: OpenPage) -> None:
    page, _ = start(run, open_page, 3, {"zeta": 1.0, "loss": 0.5, "kl": 0.25})
    page.get_by_role("heading", name="loss", exact=True).wait_for()
    assert page.locator(".section > summary h2").all_inner_texts() == ["Learning", "Flow", "Speed", "Data"]
    learning = page.locator(".section", has=page.get_by_role("heading", name="Learning"))
    assert learning.locator("h3").all_inner_texts() == ["Reward", "Reward of groups", "loss", "kl", "zeta"]
    page.get_by_text("Learning", exact=True).click()
    page.get_by_role("heading", name="loss", exact=True).wait_for(state="hidden")
    assert "Staleness at use" in titles(page)


def test_a_metric_has_its_value_in_each_step(run: RunClient, open_page: OpenPage) -> None:
    """A step without one has no value; a name that comes later gets its chart while the page is open."""
    page, epoch = start(run, open_page, 2, {"loss": 0.5})
    page.get_by_role("heading", name="loss", exact=True).wait_for()
    train(run, epoch, 2, {"entropy": 1.5, "loss": None})
    page.get_by_role("heading", name="entropy", exact=True).wait_for()
    assert columns_of(page, "loss")["value"] == ("0.5", "1", "")
    assert columns_of(page, "entropy")["value"] == ("", "", "1.5")


def test_held_out_results_are_shown_by_version_also_before_the_first_batch(run: RunClient, open_page: OpenPage) -> None:
    """The newest result of a version counts; a set has its own chart."""
    run.put(batch={"groups_per_batch": 1})
    assert post(run, result(0, name=HOSTILE)).status_code == post(run, result(0)).status_code == 200
    page = open_page(str(run.http.base_url), f"/runs/{run.run}")
    page.get_by_role("heading", name="Held-out: held-out").wait_for()
    page.get_by_text("No batch yet. Charts begin with the first step.").wait_for()
    run.reach_version(2)
    for body in (result(2, reward_mean=0.75, standard_error=0.25), result(0, reward_mean=0.25)):
        assert post(run, body).status_code == 200
    page.reload()
    page.get_by_role("heading", name="Held-out: held-out").wait_for()
    shown = columns_of(page, "Held-out: held-out")
    assert (shown["version"], shown["mean"]) == (("0", "2"), ("0.25", "0.75"))
    assert (shown["mean + error"], shown["mean − error"]) == (("", "1"), ("", "0.5"))
    assert page.title() != "taken" and titles(page)[0].startswith("Held-out: <img")


def test_sentences_say_whether_it_learns_and_whether_that_is_more_than_chance(
    run: RunClient, open_page: OpenPage
) -> None:
    """The first and the newest result of a held-out set, and the rewards of the first and the newest steps."""
    page, _ = start(run, open_page, 4)
    page.get_by_text("Mean reward: 0.500 in the first 2 steps, 0.500 in the newest 2 steps.").wait_for()
    for body in (result(0, reward_mean=0.25, standard_error=0.03), result(3, reward_mean=0.75, standard_error=0.04)):
        assert post(run, body).status_code == 200
    page.get_by_text("0.250 ± 0.030 at version 0, 0.750 ± 0.040 at version 3 (0.500 higher, more than two").wait_for()
    assert post(run, result(4, reward_mean=0.2, standard_error=0.03)).status_code == 200
    page.get_by_text("0.200 ± 0.030 at version 4 (0.050 lower, within two standard errors).").wait_for()


def test_a_chart_of_one_value_is_a_line_of_text(run: RunClient, open_page: OpenPage) -> None:
    """It becomes a chart with the first other value."""
    page, epoch = start(run, open_page, 2)
    chart = page.locator(".chart", has=page.get_by_role("heading", name="Groups per batch"))
    chart.get_by_text("groups 2", exact=True).wait_for()
    assert chart.locator("canvas").count() == 0
    assert run.http.patch(run.path, json={"batch": {"groups_per_batch": 1}}).is_success
    train(run, epoch, 2, groups=1)
    chart.locator("canvas").wait_for()
    assert chart.locator(".constant").is_hidden()


def test_lines_can_be_smoothed_and_the_raw_ones_stay(run: RunClient, open_page: OpenPage) -> None:
    """The file has the raw values; a logarithmic axis is refused where a value is not above 0, without an error."""
    page, _ = start(run, open_page, 4, {"loss": 0.5, "below": -1.0})
    chart = page.locator(".chart", has=page.get_by_role("heading", name="loss", exact=True))
    chart.locator("canvas").wait_for()
    page.get_by_label("Smoothing").select_option("10")
    chart.locator(".u-legend", has_text="value, smoothed").wait_for()
    assert columns_of(page, "loss").keys() == {"step", "value"}
    page.get_by_label("Scale").select_option("log")
    page.get_by_label("Axis").select_option("time")
    chart.locator(".u-legend", has_text="time").wait_for()
    assert columns_of(page, "loss")["value"] == ("0.5", "1", "1.5", "2")


def test_many_metrics_are_folded_behind_those_that_people_look_for(run: RunClient, open_page: OpenPage) -> None:
    page, _ = start(run, open_page, 2, {f"m{number:02}": 1.0 for number in range(20)} | {"loss": 1.0})
    page.get_by_text("12 more metrics").wait_for()
    shown = titles(page)
    assert shown[2:4] == ["loss", "m00"] and "m19" not in shown
    page.get_by_text("12 more metrics").click()
    page.get_by_role("heading", name="m19").wait_for()


def test_runs_are_compared_by_held_out_results_and_metrics(run: RunClient, open_page: OpenPage) -> None:
    """One line per run that has them."""
    page, _ = start(run, open_page, 2, {"loss": 0.5}, f"/compare?run={run.run}&run={run.run}")
    assert post(run, result(0)).status_code == 200
    page.get_by_role("heading", name="Metric: loss").wait_for()
    assert columns_of(page, "Metric: loss")[run.run] == ("0.5", "1")
    page.get_by_role("heading", name="Held-out: held-out").wait_for()
    assert columns_of(page, "Held-out: held-out")[run.run] == ("0.5",)
    newest = page.get_by_role("region", name="Newest steps").locator("tr", has_text="held-out held-out")
    newest.get_by_text("at version 0").wait_for()


def test_two_runs_differ_by_more_than_chance_or_not(run: RunClient, open_page: OpenPage) -> None:
    other = RunClient(str(run.http.base_url), f"{run.run}-b")
    for each, mean in ((run, 0.25), (other, 0.75)):
        page, _ = start(each, open_page, 1)
        assert post(each, result(0, reward_mean=mean, standard_error=0.03)).status_code == 200
    other.http.close()
    page.evaluate(f"location.hash = '#/compare?run={run.run}&run={other.run}'")
    page.get_by_text("0.500 higher, more than two standard errors").wait_for()
