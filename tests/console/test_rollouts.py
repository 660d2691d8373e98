"""Rollouts as text: the table of groups and of samples, search, and the page of a freed group."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.conftest import RunClient, ServeProcess, group
from tests.console.conftest import HOSTILE, WIDE, OpenPage, violations
from tests.generator.qwen import write_qwen
from tests.waiting import eventually

TRICK = f"{HOSTILE}\u202egnp.exe"
ANSWERS = ["I add 17 and 25. The answer is 42.", "17 plus 25 is 41, I think.", TRICK, "x" * 20_000]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunClient]:
    """A run with texts: 3 trained steps of 2 groups, the first 2 freed by a checkpoint; one group is live."""
    folder = tmp_path_factory.mktemp("texts")
    model = write_qwen(folder / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    server = ServeProcess(folder / "data", "--tokenizer", str(model)).start()
    run = RunClient(server.url, "texts")
    batch = {"groups_per_batch": 2, "tokens_per_batch": None, "seq_len": 65_536}
    assert run.put(batch=batch, history={"samples_per_step": 3}).is_success

    def rollout(text: str, reward: float, number: int) -> dict[str, Any]:
        ids = tokenizer.encode(text).ids
        prompt = tokenizer.encode(f"You are a calculator.\nWhat is 17 + {number}?").ids
        scored = {"reward": reward, "rewards": {"correct": reward, HOSTILE: 0.5}}
        return scored | {"prompt_ids": prompt, "completion_ids": ids, "inference_logprobs": [-0.5] * len(ids)}

    def store(name: str, version: int, number: int) -> None:
        rewards = [1.0, 0.0, -1.0, -0.5]
        made = [rollout(text, reward, number) for text, reward in zip(ANSWERS, rewards, strict=True)]
        stored = run.append(
            group(name, version) | {"rollouts": made, "metadata": {"answer": str(17 + number), "source": "sums"}}
        )
        assert stored[0]["status"] == "stored", stored

    epoch = run.attach()
    for step in range(3):
        for number in range(2):
            store(f"g{step}-{number}", step, 10 * step + number)
        run.train(epoch, range(step, step + 1))
    assert run.post("checkpoints", epoch=epoch, step=2, keep=1).status_code == 200
    store("live", 3, 25)
    eventually(lambda: run.get("groups/g1-0").json()["rollouts"] is None, within_s=30.0)
    eventually(lambda: run.get("samples").json()["steps"] == 3, within_s=30.0)
    yield run
    run.http.close()
    server.end()


def rows_of(page: Any) -> list[str]:
    """Wait for the table and return the text of its rows."""
    page.wait_for_selector(".texts tbody tr")
    texts: list[str] = page.locator(".texts tbody tr").all_inner_texts()
    return texts


def test_the_table_shows_what_was_asked_said_and_scored(written: RunClient, open_page: OpenPage) -> None:
    """Of live groups from their bytes, of freed ones from samples; the tab chooses the rollout."""
    page = open_page(str(written.http.base_url), "/runs/texts/rollouts?order=reward&desc=false")
    first = rows_of(page)[0]
    assert "What is 17 + " in first and "-1.000" in first and "right answer: " in first
    assert page.locator(".texts .score.bad").count() > 0
    page.get_by_role("link", name="Best", exact=True).click()
    page.locator(".texts .score.good").first.wait_for()
    assert "I add 17 and 25." in rows_of(page)[0]
    page.get_by_role("link", name="Newest", exact=True).click()
    page.get_by_text("17 + 10?").first.wait_for()
    freed = next(row for row in rows_of(page) if row.startswith("g1-0"))
    assert "retired" in freed and ("Freed" in freed or "right answer: 27" in freed)


def test_a_text_is_searched_in_stored_groups_then_in_samples(written: RunClient, open_page: OpenPage) -> None:
    """The page says how far the search went, and marks the text in the rollout that has it."""
    page = open_page(str(written.http.base_url), "/runs/texts/rollouts")
    rows_of(page)
    page.get_by_text("Search and filters").click()
    page.get_by_label("Text", exact=True).fill("THE ANSWER IS")
    page.get_by_role("button", name="Show").click()
    page.get_by_text("Looked at all 3 groups that have bytes").wait_for()
    assert [row.split()[0] for row in rows_of(page)] == ["live", "g2-1", "g2-0"]
    assert page.locator("mark").all_inner_texts() == ["The answer is"] * 3
    page.get_by_role("link", name="their samples").click()
    page.get_by_text("steps have samples, 3 of each").wait_for()
    rows = rows_of(page)
    assert rows and all("The answer is 42." in row for row in rows)
    page.get_by_label("Text", exact=True).fill("no such words")
    page.get_by_role("button", name="Show").click()
    page.get_by_text('No sample has the text "no such words"').wait_for()
    page.get_by_text("history.samples_per_step").wait_for()


def test_what_a_model_said_at_first_and_says_now_is_on_one_page(written: RunClient, open_page: OpenPage) -> None:
    """Two clicks from the list of runs."""
    page = open_page(str(written.http.base_url))
    page.get_by_role("link", name="texts").click()
    page.get_by_role("link", name="What it said at first and now").click()
    page.get_by_role("heading", name="Step 2, the newest").wait_for()
    assert page.locator(".texts h2").all_inner_texts() == ["Step 0, the first", "Step 2, the newest"]
    assert page.locator(".texts tbody tr").count() == 6


def test_a_search_without_a_tokenizer_says_why_there_is_no_text(trained: RunClient, open_page: OpenPage) -> None:
    allowed = ("status of 422",)
    page = open_page(str(trained.http.base_url), "/runs/sums/rollouts?text=yes", allowed)
    page.get_by_text("serve --tokenizer FOLDER").wait_for()


def test_an_id_is_found_by_its_start_and_a_wrong_one_is_said_so(written: RunClient, open_page: OpenPage) -> None:
    page = open_page(str(written.http.base_url), "/runs/texts/rollouts?id_prefix=g2")
    assert sorted(row.split()[0] for row in rows_of(page)) == ["g2-0", "g2-1"]
    page.get_by_label("Id", exact=True).fill(HOSTILE[:40])
    page.get_by_role("button", name="Show").click()
    page.get_by_text("No group and no prompt has an id that starts with").wait_for()
    assert page.locator("main img").count() == 0


@pytest.mark.parametrize(("label", "value"), [("Step", "-1"), ("Step", "1.5"), ("Staleness from", "-1")])
def test_a_filter_out_of_bounds_is_not_sent(trained: RunClient, open_page: OpenPage, label: str, value: str) -> None:
    """The browser says so at the field."""
    page = open_page(str(trained.http.base_url), "/runs/sums/rollouts")
    page.get_by_text("Search and filters").click()
    field = page.get_by_label(label, exact=True)
    field.fill(value)
    page.get_by_role("button", name="Show").click()
    assert not field.evaluate("(input) => input.validity.valid") and "?" not in page.evaluate("location.hash")
    field.fill("1")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url(re.compile("[?&](step|min_staleness)=1"))


def test_a_freed_group_shows_its_sample_and_says_how_to_keep_more(written: RunClient, open_page: OpenPage) -> None:
    best = next(sample for sample in written.get("samples", step=0).json()["samples"] if sample["why"] == "best")
    page = open_page(str(written.http.base_url), f"/runs/texts/groups/{best['group_id']}")
    page.locator(".rollout").first.wait_for()
    shown = page.locator("main").inner_text()
    assert "I add 17 and 25. The answer is 42." in shown and "Right answer: " in shown
    for way in ("history.samples_per_step", "A cursor keeps whole groups", "replaybuf export texts"):
        assert way in shown
    page.evaluate("location.hash = '#/runs/texts/rollouts?step=0&order=reward&desc=false'")
    page.get_by_text("The groups of step 0 are freed; these samples stay.").wait_for()
    assert "-1.000" in rows_of(page)[0]


def test_the_rollouts_of_a_group_begin_with_the_worst(written: RunClient, open_page: OpenPage) -> None:
    page = open_page(str(written.http.base_url), "/runs/texts/groups/live")
    page.locator(".rollout").first.wait_for()
    assert page.locator(".rollout .score").all_inner_texts() == ["-1.000", "-0.500", "0.000", "1.000"]
    assert page.locator(".rollout h3").all_inner_texts() == ["Rollout 3", "Rollout 4", "Rollout 2", "Rollout 1"]
    assert "Right answer: 42" in page.locator("main").inner_text()


def test_the_number_of_samples_is_chosen_where_a_run_is_created(written: RunClient, open_page: OpenPage) -> None:
    page = open_page(str(written.http.base_url), "/new")
    page.get_by_text("Samples", exact=True).click()
    page.get_by_label("samples_per_step").fill("65")
    page.get_by_text("This must be 0 to 64.").wait_for()


@pytest.mark.parametrize("address", ["rollouts", "rollouts?list=samples", "groups/live", "groups/g0-0"])
def test_texts_fit_the_page_are_accessible_and_harmless(written: RunClient, open_page: OpenPage, address: str) -> None:
    """No element scrolls sideways at 1280 pixels, a text of 20,000 letters is cut, and markup stays text."""
    page = open_page(str(written.http.base_url), f"/runs/texts/{address}")
    page.wait_for_selector(".texts tbody tr, .rollout, .empty")
    assert page.evaluate(WIDE) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert page.locator("main img, main script").count() == 0 and "taken" not in page.title()
    assert "\u202e" not in page.locator("body").inner_text()
    assert violations(page) == []


def test_many_samples_are_shown_in_part_until_a_person_asks_for_all(written: RunClient, open_page: OpenPage) -> None:
    """400 rows are 70,000 pixels on a phone."""
    answer = written.get("samples", limit=100).json()
    answer["samples"] = answer["samples"][:1] * 60
    page = open_page(str(written.http.base_url), "/runs/texts")
    page.route("**/samples?*", lambda route: route.fulfill(json=answer))
    page.evaluate("location.hash = '#/runs/texts/rollouts?list=samples'")
    page.get_by_text("50 samples shown").wait_for()
    page.get_by_role("button", name="Show 10 more").click()
    page.get_by_text("60 samples shown").wait_for()
    assert len(rows_of(page)) == 60
