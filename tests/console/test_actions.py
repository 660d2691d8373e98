"""What an operator does in the console: each action is confirmed, checked by the service and recorded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import RunClient, ServeProcess, group
from tests.service.test_server import new_token

OpenPage = Callable[..., Any]
REFUSED = ("status of 401", "status of 403", "status of 409", "status of 404", "status of 410", "status of 422")
"""The browser reports answers that are errors by itself."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServeProcess, dict[str, str]]]:
    """A service with tokens of a reader and an operator."""
    folder = tmp_path_factory.mktemp("guarded")
    tokens = {role: new_token(role, folder / "tokens") for role in ("reader", "operator")}
    server = ServeProcess(folder / "data", "--tokens-file", str(folder / "tokens")).start()
    yield server, tokens
    server.end()


def operator(guarded: tuple[ServeProcess, dict[str, str]], name: str) -> RunClient:
    """Return a client of an operator, with a new run of this name."""
    server, tokens = guarded
    run = RunClient(server.url, name)
    run.http.headers["Authorization"] = f"Bearer {tokens['operator']}"
    assert run.put(batch={"groups_per_batch": 1}).is_success
    return run


def give_token(page: Any, token: str) -> None:
    """Type a token into the dialog that asks for one."""
    page.get_by_role("textbox", name="Token", exact=True).fill(token)
    page.get_by_role("button", name="Use token").click()


def confirm(page: Any, action: str) -> None:
    """Choose an action and confirm it."""
    page.get_by_role("button", name=action, exact=True).click()
    page.locator("dialog button.main").click()


def json_of(page: Any, place: str) -> Any:
    """Turn a form to its JSON; return the text."""
    page.get_by_role("tab", name="JSON").click()
    page.locator(place).wait_for()
    return page.locator(place)


def at_field(page: Any, name: str) -> Any:
    """Return a field of a form with its texts."""
    return page.locator(".field", has=page.get_by_label(name, exact=True))


def test_a_token_opens_the_console_until_the_tab_closes(
    guarded: tuple[ServeProcess, dict[str, str]], open_page: OpenPage
) -> None:
    """The page asks for it, keeps it over a reload, and forgets it on request."""
    server, tokens = guarded
    operator(guarded, "kept").http.close()
    page = open_page(server.url, expected=REFUSED)
    give_token(page, "wrong")
    page.get_by_text("was not in the tokens file").wait_for()
    give_token(page, tokens["reader"])
    page.get_by_role("link", name="kept").wait_for()
    page.reload()
    page.get_by_role("link", name="kept").wait_for()
    page.get_by_role("button", name="Token", exact=True).click()
    page.get_by_role("button", name="Forget token").click()
    page.get_by_text("The service asks for a token").wait_for()


def test_a_reader_is_told_that_an_action_needs_an_operator(
    guarded: tuple[ServeProcess, dict[str, str]], open_page: OpenPage
) -> None:
    """The refusal of the service is shown, and nothing happens."""
    server, tokens = guarded
    run = operator(guarded, "read-only")
    page = open_page(server.url, "/runs/read-only/act", expected=REFUSED)
    give_token(page, tokens["reader"])
    confirm(page, "Pause")
    page.get_by_text("this call needs operator").wait_for()
    assert run.state()["state"] == "running"
    run.http.close()


def test_an_operator_pauses_resumes_finishes_and_deletes_a_run(
    guarded: tuple[ServeProcess, dict[str, str]], open_page: OpenPage
) -> None:
    """Each by its button; the ledger names the token; a deletion needs the name of the run."""
    server, tokens = guarded
    run = operator(guarded, "handled")
    page = open_page(server.url, "/runs/handled/act", expected=REFUSED)
    give_token(page, tokens["operator"])
    for action, state in (("Pause", "paused"), ("Resume", "running"), ("Finish", "finished")):
        confirm(page, action)
        page.locator(f".title .pill.{state}").wait_for()
        assert run.state()["state"] == state
    page.evaluate("location.hash = '#/runs/handled/ledger'")
    page.get_by_text("paused (operator) by a operator").wait_for()
    page.evaluate("location.hash = '#/runs/handled/act'")
    page.get_by_role("button", name="Delete the run").click()
    last = page.locator("dialog button.main")
    page.get_by_label("Name of the run").fill("handle")
    assert last.is_disabled()
    page.get_by_label("Name of the run").fill("handled")
    last.click()
    page.get_by_role("heading", name="Runs").wait_for()
    assert run.http.get(run.path).status_code == 410
    run.http.close()


def test_a_dialog_about_a_run_closes_when_its_page_is_left(run: RunClient, open_page: OpenPage) -> None:
    """Its button deletes: it is drawn as the other dangerous ones, and does nothing from another page."""
    run.put(batch={"groups_per_batch": 1})
    run.http.patch(run.path, json={"state": "finished"}).raise_for_status()
    page = open_page(str(run.http.base_url), f"/runs/{run.run}/act", expected=REFUSED)
    page.get_by_role("button", name="Delete the run").click()
    last = page.locator("dialog button[type=submit]")
    colour = "node => getComputedStyle(node).backgroundColor"
    page.evaluate("document.body.append(Object.assign(document.createElement('i'), {className: 'bad'}))")
    assert last.evaluate(colour) == page.locator("i.bad").evaluate("node => getComputedStyle(node).color")
    page.evaluate("location.hash = '#/'")
    page.get_by_role("heading", name="Runs", exact=True).wait_for()
    page.locator("dialog").wait_for(state="hidden")
    assert run.state()["state"] == "finished"


def test_a_change_is_previewed_before_it_is_made(run: RunClient, open_page: OpenPage) -> None:
    """Only what differs is shown and sent; cancelling changes nothing."""
    run.put(batch={"groups_per_batch": 1})
    page = open_page(str(run.http.base_url), f"/runs/{run.run}/act")
    editor = json_of(page, "#change")
    editor.fill(editor.input_value().replace('"max_staleness": 1', '"max_staleness": 7'))
    page.get_by_role("button", name="Preview the change").click()
    page.get_by_role("dialog").get_by_text("strategy.options.max_staleness: 1 → 7").wait_for()
    page.get_by_role("button", name="Cancel").click()
    assert run.state()["strategy"]["options"]["max_staleness"] == 1
    editor.fill(editor.input_value().replace('"max_staleness": 1', '"max_staleness": 7'))
    page.get_by_role("button", name="Preview the change").click()
    page.locator("dialog button.main").click()
    page.get_by_text("Change the run: done.").wait_for()
    assert run.state()["strategy"]["options"]["max_staleness"] == 7


@pytest.mark.parametrize(("text", "answer"), [("{", "is not JSON"), ('{"strategy": {"name": "x"}}', "x")])
def test_a_change_that_is_wrong_is_refused_with_the_reason(
    run: RunClient, open_page: OpenPage, text: str, answer: str
) -> None:
    """Text that is not JSON, and a strategy that is not installed."""
    run.put(batch={"groups_per_batch": 1})
    page = open_page(str(run.http.base_url), f"/runs/{run.run}/act", expected=REFUSED)
    json_of(page, "#change").fill(text)
    page.get_by_role("button", name="Preview the change").click()
    page.locator("main p.bad", has_text=answer).wait_for()
    assert run.state()["strategy"]["name"] == "one-step-off-policy"


def test_two_operators_at_once_get_one_clear_answer_each(run: RunClient, open_page: OpenPage) -> None:
    """One finished the run while the other was asked to confirm a pause: it does not happen, and the page says why."""
    run.put(batch={"groups_per_batch": 1})
    page = open_page(str(run.http.base_url), f"/runs/{run.run}/act", expected=REFUSED)
    page.get_by_role("button", name="Pause", exact=True).click()
    run.http.patch(run.path, json={"state": "finished"}).raise_for_status()
    page.locator("dialog button.main").click()
    page.locator("main p.bad", has_text="state: running → finished (operator)").wait_for()
    page.locator(".title .pill.finished").wait_for()
    assert run.state()["state"] == "finished"


def test_values_that_somebody_else_changed_are_not_taken_back(run: RunClient, open_page: OpenPage) -> None:
    """The strategy is sent as a whole: older values of the editor would undo the change of the other operator."""
    run.put(batch={"groups_per_batch": 1}, strategy={"name": "replay", "options": {"max_uses": 2}})
    page = open_page(str(run.http.base_url), f"/runs/{run.run}/act", expected=REFUSED)
    editor = json_of(page, "#change")
    other = {"strategy": {"name": "replay", "options": {"max_uses": 2, "max_staleness": 9}}}
    run.http.patch(run.path, json=other).raise_for_status()
    page.get_by_text("The run was changed after you read these values").wait_for()
    assert "max_staleness" in page.locator("main p.warn").inner_text()
    editor.fill(editor.input_value().replace('"max_uses": 2', '"max_uses": 3'))
    page.get_by_role("button", name="Preview the change").click()
    page.locator("main p.bad", has_text="Changed meanwhile: strategy.options.max_staleness").wait_for()
    assert run.state()["strategy"]["options"]["max_uses"] == 2
    page.get_by_role("button", name="Read again").click()
    page.wait_for_function("() => document.querySelector('#change').value.includes('\"max_staleness\": 9')")
    editor.fill(editor.input_value().replace('"max_uses": 2', '"max_uses": 3'))
    page.get_by_role("button", name="Preview the change").click()
    page.locator("dialog button.main").click()
    page.get_by_text("Change the run: done.").wait_for()
    options = run.state()["strategy"]["options"]
    assert (options["max_uses"], options["max_staleness"]) == (3, 9)


def test_a_run_is_created_in_the_console(service: ServeProcess, open_page: OpenPage, tmp_path: Path) -> None:
    """From a starting configuration; a configuration that would starve is refused with the reason."""
    page = open_page(service.url, "/new", expected=REFUSED)
    page.get_by_label("Name of the run").fill("made-here")
    json_of(page, "#config").fill('{"batch": {"groups_per_batch": 0}}')
    page.get_by_role("button", name="Create the run").click()
    page.get_by_text("groups_per_batch").last.wait_for()
    page.locator("#config").fill('{"batch": {"groups_per_batch": 2}}')
    page.get_by_role("button", name="Create the run").click()
    page.get_by_role("heading", name="made-here").wait_for()
    assert httpx.get(f"{service.url}/v1/runs/made-here").json()["config"]["batch"]["groups_per_batch"] == 2


def test_a_run_is_created_from_fields(service: ServeProcess, open_page: OpenPage) -> None:
    """A value out of bounds is refused at its field before anything is sent; only values that differ are sent."""
    page = open_page(service.url, "/new")
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request) if request.method == "PUT" else None)
    page.get_by_label("Name of the run").fill("from-fields")
    groups = page.get_by_label("groups_per_batch", exact=True)
    groups.fill("16385")
    page.get_by_text("This must be 1 to 16,384.").wait_for()
    page.get_by_role("button", name="Create the run").click()
    page.get_by_text("Correct batch.groups_per_batch first.").wait_for()
    assert groups.get_attribute("aria-invalid") == "true"
    assert sent == []
    groups.fill("2")
    page.get_by_label("Name", exact=True).select_option("replay")
    page.get_by_text("Most batches of one group").wait_for()
    page.get_by_label("max_uses", exact=True).fill("3")
    page.get_by_label("samples_per_insert", exact=True).fill("")
    page.get_by_label("tokens_per_batch", exact=True).fill('{"per_rank": 4096}')
    page.get_by_role("button", name="Create the run").click()
    page.get_by_role("heading", name="from-fields").wait_for()
    assert sent[0].post_data_json == {
        "strategy": {"name": "replay", "options": {"max_uses": 3}},
        "batch": {"groups_per_batch": 2, "seq_len": 4096, "tokens_per_batch": {"per_rank": 4096}},
        "group_size": 8,
        "steps_per_publish": 1,
    }


def test_filters_adapters_and_a_spill_folder_are_rows_and_fields(
    service: ServeProcess, open_page: OpenPage, tmp_path: Path
) -> None:
    """A wrong value in a row is refused before anything is sent; a row that is removed is not sent."""
    page = open_page(service.url, "/new")
    page.get_by_label("Name of the run").fill("with-rows")
    page.get_by_text("Filters", exact=True).click()
    for name in ("reward-window", "zero-variance", "overlong"):
        page.get_by_label("Add to filters").select_option(name)
        page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_role("group", name="zero-variance").get_by_role("button", name="Remove").click()
    page.get_by_role("group", name="reward-window").get_by_label("low", exact=True).fill("0.1")
    longest = page.get_by_role("group", name="overlong").get_by_label("max_tokens", exact=True)
    longest.fill("1")
    page.get_by_role("button", name="Create the run").click()
    page.get_by_text("Correct filters.2.options.max_tokens first.").wait_for()
    longest.fill("300")
    page.get_by_text("Spill", exact=True).click()
    page.get_by_label("url", exact=True).fill(f"file://{tmp_path}/spill")
    page.get_by_text("Limits", exact=True).click()
    page.get_by_label("max_bytes_in_memory", exact=True).fill("100000000")
    page.get_by_role("button", name="Create the run").click()
    page.get_by_role("heading", name="with-rows").wait_for()
    config = httpx.get(f"{service.url}/v1/runs/with-rows").json()["config"]
    assert [entry["name"] for entry in config["filters"]] == ["reward-window", "overlong"]
    assert config["filters"][1]["options"]["max_tokens"] == 300
    assert config["spill"] == {"url": f"file://{tmp_path}/spill"}
    page = open_page(service.url, "/new")
    page.get_by_label("Name of the run").fill("with-adapters")
    page.get_by_text("LoRA adapters", exact=True).click()
    for number, name in enumerate(("red", "blue")):
        page.get_by_role("button", name="Add an adapter").click()
        row = page.get_by_role("group", name=f"adapter {number + 1}")
        row.get_by_label("name", exact=True).fill(name)
        row.get_by_label("groups_per_batch", exact=True).fill(str(number + 1))
    page.locator("#field-batch\\.groups_per_batch").fill("")
    page.get_by_role("button", name="Create the run").click()
    page.get_by_role("heading", name="with-adapters").wait_for()
    adapters = httpx.get(f"{service.url}/v1/runs/with-adapters").json()["config"]["adapters"]
    assert {name: adapter["groups_per_batch"] for name, adapter in adapters.items()} == {"red": 1, "blue": 2}


def test_a_live_run_gets_a_filter_from_the_form(run: RunClient, open_page: OpenPage) -> None:
    """Its effect is shown first; the filters that the run has are rows already."""
    run.put(batch={"groups_per_batch": 1}, filters=[{"name": "zero-variance", "options": {}}])
    page = open_page(str(run.http.base_url), f"/runs/{run.run}/act", expected=REFUSED)
    page.get_by_role("group", name="zero-variance").wait_for()
    page.get_by_label("Add to filters").select_option("overlong")
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_role("group", name="overlong").get_by_label("max_tokens", exact=True).fill("64")
    page.get_by_label("Effect of the change").get_by_text("overlong").wait_for()
    assert [member["name"] for member in run.state()["config"]["filters"]] == ["zero-variance"]


def test_a_problem_that_only_the_service_sees_is_shown_at_the_field(service: ServeProcess, open_page: OpenPage) -> None:
    """A multiple that does not divide seq_len; the other values stay."""
    page = open_page(service.url, "/new", expected=REFUSED)
    page.get_by_label("Name of the run").fill("at-the-field")
    page.get_by_label("pad_to_multiple_of", exact=True).fill("3")
    page.get_by_role("button", name="Create the run").click()
    at_field(page, "pad_to_multiple_of").get_by_text("must divide").wait_for()
    assert page.get_by_label("group_size", exact=True).input_value() == "8"


def test_the_effect_of_a_change_is_shown_while_it_is_typed(run: RunClient, open_page: OpenPage) -> None:
    """Nothing is changed before it is confirmed. Form and JSON have the same values."""
    run.put(batch={"groups_per_batch": 1})
    page = open_page(str(run.http.base_url), f"/runs/{run.run}/act", expected=REFUSED)
    page.get_by_label("max_staleness", exact=True).fill("5")
    page.get_by_text("strategy.options.max_staleness: 1 → 5").wait_for()
    page.get_by_label("max_bytes_live", exact=True).fill("7")
    at_field(page, "max_bytes_live").get_by_text("could never enter").wait_for()
    page.get_by_label("max_bytes_live", exact=True).fill("")
    assert '"max_staleness": 5' in json_of(page, "#change").input_value()
    assert run.state()["strategy"]["options"]["max_staleness"] == 1
    page.get_by_role("tab", name="Form").click()
    assert page.get_by_label("max_staleness", exact=True).input_value() == "5"


def test_a_completion_of_ten_megabytes_is_shortened(run: RunClient, open_page: OpenPage) -> None:
    """Two million token ids: the page shows the start and how much is left out."""
    run.put(batch={"groups_per_batch": 1, "seq_len": 1 << 22, "tokens_per_batch": None})
    length = 1_000_000
    rollout = {"prompt_ids": [1], "completion_ids": [7] * length, "inference_logprobs": [-0.5] * length, "reward": 1.0}
    run.append(group("long") | {"rollouts": [rollout]})
    page = open_page(str(run.http.base_url), f"/runs/{run.run}/groups/long?show=logprob")
    page.get_by_text("more tokens").wait_for()
    assert page.locator(".rollout span[title]").count() == 2000
    page.get_by_label("Show").select_option("text")
    page.locator(".rollout span[title]").first.wait_for(state="detached")
    page.get_by_text("more tokens").wait_for()
    assert len(page.locator("main").inner_text()) < 60_000


def test_an_operator_goes_on_without_what_redis_lost(
    own_server: Callable[..., ServeProcess], tmp_path: Path, open_page: OpenPage
) -> None:
    """The page says what is missing; the button needs the name of the run, as a deletion does."""
    server = own_server()
    with closing(RunClient(server.url, "cut").http) as http:
        http.put("/v1/runs/cut", json={"batch": {"groups_per_batch": 1}}).raise_for_status()
        http.post("/v1/runs/cut/groups", json={"groups": [group("kept")]}).raise_for_status()
    server.stop()
    files = server.data_dir / "appendonlydir"
    shutil.copytree(files, tmp_path / "before")
    server.start()
    with closing(RunClient(server.url, "cut").http) as http:
        http.post("/v1/runs/cut/groups", json={"groups": [group("lost"), group("lost too")]}).raise_for_status()
    server.stop()
    shutil.rmtree(files)
    shutil.copytree(tmp_path / "before", files)
    server.start()
    page = open_page(server.url, "/runs/cut/act", expected=("status of 500",))
    page.get_by_text("missing: groups 2 to 3").first.wait_for()
    assert page.get_by_role("button", name="Delete the run").is_disabled()
    page.get_by_role("button", name="Go on without it").click()
    page.get_by_text("0 ledger entries and 2 groups of cut are gone for good").wait_for()
    page.get_by_label("Name of the run").fill("cut")
    page.locator("dialog button.main").click()
    page.get_by_text("The run goes on without 0 ledger entries and 2 groups.").wait_for()
    page.locator(".title .pill.running").wait_for()
    assert httpx.get(f"{server.url}/v1/runs/cut").json()["groups"]["stored"] == 1
