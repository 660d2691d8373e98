"""Bad input in the console: hostile texts, huge texts, wrong clocks, cut addresses, tokens that end or are limited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from replaybuf.service.http.guard.token_file import new_token, revoke_token
from tests.conftest import RunClient, ServeProcess, group
from tests.console.conftest import HOSTILE, play
from tests.console.test_actions import REFUSED, give_token
from tests.generator.qwen import write_qwen

OpenPage = Callable[..., Any]
TRICKS = f"{HOSTILE}\u202egnp.exe\u2066\x00\x1b[31m\x7f\u0085 end </pre></textarea>{{{{7*7}}}}"
"""Markup, characters that turn the direction of text, controls of a terminal, ends of elements, a template."""
SHOWN = TRICKS.translate({code: f"⟨{code:04X}⟩" for code in (0x202E, 0x2066, 0, 0x1B, 0x7F, 0x85)})
GROW_TEXTS = """() => {
  const ask = window.fetch;
  window.fetch = async (...given) => {
    const answer = await ask(...given);
    if (!given[0].includes('/groups/trick')) return answer;
    const group = await answer.json();
    for (const one of group.rollouts) {
      const texts = {prompt_text: 'p'.repeat(1e7), completion_text: '<c>'.repeat(4e6), finish_reason: 'f'.repeat(1e5)};
      Object.assign(one, texts);
      one.rewards = Object.fromEntries(Array.from({length: 1000}, (_, place) => [`${place} ${'x'.repeat(1000)}`, 1]));
    }
    return new Response(JSON.stringify(group));
  };
}"""
YEAR_S = 366 * 86_400.0


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunClient]:
    """A run whose every free text is hostile: completions, metadata, finish reasons, feedback, failed prompts."""
    folder = tmp_path_factory.mktemp("hostile")
    model = write_qwen(folder / "model")
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TRICKS).ids
    server = ServeProcess(folder / "data", "--tokenizer", str(model)).start()
    run = RunClient(server.url, "hostile")
    run.put(batch={"groups_per_batch": 1}, tickets={"max_attempts": 1})
    rollout = {
        "prompt_ids": ids,
        "completion_ids": ids,
        "inference_logprobs": [-0.5] * len(ids),
        "reward": 1.0,
        "rewards": {HOSTILE: 1.0},
        "finish_reason": HOSTILE,
    }
    many = [rollout | {"reward": float(number)} for number in range(3)]
    stored = run.append(group("trick") | {"rollouts": many, "prompt_id": HOSTILE, "metadata": {TRICKS: TRICKS}})
    assert stored[0]["status"] == "stored", stored
    epoch = run.attach()
    assert run.batch(0, epoch).status_code == 200
    assert run.ack(0, epoch, feedback={TRICKS: TRICKS}).status_code == 200
    producer = f"gen-{HOSTILE}"
    ticket = run.post("tickets", producer=producer, count=1).json()["tickets"][0]["ticket"]
    run.http.delete(f"{run.path}/tickets/{ticket}", params={"reason": HOSTILE})
    failure = {"reason": HOSTILE, "traceback": f"Traceback\n{HOSTILE}</pre></details>"}
    beat = run.http.put(
        f"{run.path}/producers/{producer}", json={"engines": 0, "held_back_by": HOSTILE, "failure": failure}
    )
    assert beat.is_success, beat.text
    yield run
    run.http.close()
    server.end()


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("/runs/hostile", "hostile"),
        ("/runs/hostile/rollouts", "trick"),
        (f"/runs/hostile/rollouts?source={'%3Cimg%20src=x%3E'}&order=reward", "No group matches"),
        ("/runs/hostile/groups/trick", SHOWN),
        ("/runs/hostile/groups/trick?show=logprob", "likely"),
        ("/runs/hostile/groups/trick?show=version", "A new colour"),
        ("/runs/hostile/groups/trick?show=%3Cscript%3E", "Rollout 3"),
        ("/runs/hostile/ledger", "⟨202E⟩"),
        ("/runs/hostile/steps/0", "trick"),
        ("/runs/hostile/problems", "onerror"),
        ("/runs/%3Cimg%20src=x%20onerror=alert(1)%3E", "img"),
        ("/runs/hostile/groups/%E2%80%AEgpj", "has no group"),
    ],
)
def test_hostile_texts_stay_texts_on_every_page(
    hostile: RunClient, open_page: OpenPage, address: str, text: str
) -> None:
    """No element is made of them, and characters that would hide or turn other text are written as their number."""
    page = open_page(str(hostile.http.base_url), address, expected=REFUSED)
    page.wait_for_function("text => document.body.innerText.includes(text)", arg=text)
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert page.locator("main img, main script, main b, #banner img, #crumbs img").count() == 0
    assert "taken" not in page.title()
    assert not set(page.locator("body").inner_text()) & set("\u202e\u2066\x00\x1b\x7f\u0085")


def test_texts_of_ten_megabytes_are_shortened(hostile: RunClient, open_page: OpenPage) -> None:
    """Prompt, completion, finish reason and scores: the page shows the start of each and stays small."""
    page = open_page(str(hostile.http.base_url))
    page.evaluate(GROW_TEXTS)
    page.evaluate("location.hash = '#/runs/hostile/groups/trick'")
    page.get_by_text("more characters").first.wait_for()
    page.get_by_label("Show").select_option("mask")
    page.get_by_text("struck out").wait_for()
    assert page.evaluate("document.querySelector('main').innerText.length") < 200_000


def test_an_address_that_is_cut_has_no_page(service: ServeProcess, open_page: OpenPage) -> None:
    """A copied address may lose its end."""
    page = open_page(service.url, "/runs/%E2%80")
    page.get_by_text("This address has no page").wait_for()
    page.get_by_role("link", name="All runs").click()
    page.get_by_role("heading", name="Runs").wait_for()


@pytest.mark.parametrize(("ahead_s", "text"), [(YEAR_S, "366 d ahead of"), (-7200.0, "2.0 h behind")])
def test_ages_follow_the_clock_of_the_server(run: RunClient, open_page: OpenPage, ahead_s: float, text: str) -> None:
    """A browser with a wrong clock shows the same ages and times, and says that its clock is wrong."""
    epoch = play(run, 2)
    run.batch(2, epoch)
    now_s = run.get("flow").json()["now_s"]
    page = open_page(str(run.http.base_url))
    page.get_by_role("link", name=run.run, exact=True).wait_for()
    page.clock.set_fixed_time(now_s + ahead_s)
    page.evaluate(f"location.hash = '#/runs/{run.run}'")
    page.get_by_text(f"clock is {text} the server's").wait_for()
    shown = page.locator(".flow li", has_text="Trainer").last.inner_text()
    assert " d ago" not in shown and " h ago" not in shown
    page.evaluate(f"location.hash = '#/runs/{run.run}/ledger'")
    page.locator(".timeline time").first.wait_for()
    local = page.evaluate("at => new Date(at).toLocaleString('sv').slice(0, 10)", 1000 * now_s)
    assert page.locator(".timeline time").first.inner_text()[:10] == local


def test_a_clock_that_agrees_is_not_mentioned(run: RunClient, open_page: OpenPage) -> None:
    """The rule for the note is a minute."""
    run.put(batch={"groups_per_batch": 1})
    page = open_page(str(run.http.base_url), f"/runs/{run.run}")
    page.locator(".state strong").wait_for()
    assert page.locator("#clock").inner_text() == ""


def test_a_token_that_ends_while_the_page_is_open_is_asked_for_again(
    tmp_path: Path, own_server: Callable[..., ServeProcess], open_page: OpenPage
) -> None:
    """Revoked: the page keeps what it shows, says why it asks, and goes on with another token."""
    tokens = tmp_path / "tokens"
    old, new = (new_token("reader", name, tokens) for name in ("old", "new"))
    operator = new_token("operator", "ops", tokens)
    server = own_server("--tokens-file", str(tokens))
    headers = {"Authorization": f"Bearer {operator}"}
    url = f"{server.url}/v1/runs/kept"
    assert httpx.put(url, json={"batch": {"groups_per_batch": 1}}, headers=headers).is_success
    page = open_page(server.url, "/runs/kept", expected=REFUSED)
    give_token(page, old)
    page.locator(".state strong").wait_for()
    revoke_token("old", tokens)
    server.signal(1)
    page.get_by_text("was not in the tokens file").wait_for()
    assert page.locator(".state strong").is_visible()
    give_token(page, new)
    page.locator("dialog").wait_for(state="hidden")
    page.locator(".title .pill.running").wait_for()


def test_a_token_of_other_runs_and_one_with_a_limit_get_the_reason(
    tmp_path: Path, own_server: Callable[..., ServeProcess], open_page: OpenPage
) -> None:
    """The page says what the token may not do; with few calls per second it is slow and complete."""
    tokens = tmp_path / "tokens"
    mine = new_token("reader", "mine", tokens, runs=["mine"])
    slow = new_token("reader", "slow", tokens, max_calls_per_s=1.0)
    operator = new_token("operator", "ops", tokens)
    server = own_server("--tokens-file", str(tokens))
    for run in ("mine", "theirs"):
        headers = {"Authorization": f"Bearer {operator}"}
        config = {"batch": {"groups_per_batch": 1}}
        assert httpx.put(f"{server.url}/v1/runs/{run}", json=config, headers=headers).is_success
    page = open_page(server.url, expected=(*REFUSED, "status of 429"))
    give_token(page, mine)
    page.get_by_role("link", name="mine").wait_for()
    assert page.get_by_role("link", name="theirs").count() == 0
    page.evaluate("location.hash = '#/runs/theirs'")
    page.locator("main", has_text="mine").wait_for()
    limited = open_page(server.url, "/runs/mine", expected=REFUSED)
    give_token(limited, slow)
    limited.locator(".state strong").wait_for()
    limited.get_by_text("No batch yet").first.wait_for()
    limited.locator("#banner").wait_for(state="hidden")
