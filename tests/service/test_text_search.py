"""Search by text in stored groups: what it finds, how much one call looks at, and why it may have no text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replaybuf.cli.main import main
from replaybuf.kernel.state.group_query import GroupQuery
from replaybuf.service.http.call import text_search
from replaybuf.service.http.call.browse import list_groups
from replaybuf.service.http.call.text_search import (
    PIECE_COST,
    TOKENS_AT_ONCE,
    TURN_TOKENS,
    TextPiece,
    Turn,
    search_turn,
    text_pieces,
)
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.group import Group
from replaybuf.wire.text.model_tokenizer import Tokenizer
from tests.builders import group as built_group
from tests.builders import rollout
from tests.conftest import RunClient, ServeProcess, group
from tests.generator.qwen import write_qwen
from tests.led_run import append, on_a_run
from tests.waiting import eventually


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


@pytest.fixture(scope="module")
def with_texts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A service with a tokenizer."""
    server = ServeProcess(tmp_path_factory.mktemp("texts") / "data", "--tokenizer", str(model)).start()
    yield server
    server.end()


@pytest.fixture
def texts(with_texts: ServeProcess, request: pytest.FixtureRequest) -> Iterator[RunClient]:
    """A run of this test."""
    run = RunClient(with_texts.url, request.node.name.replace("_", "-")[:60])
    assert run.put(batch={"groups_per_batch": 1, "tokens_per_batch": None, "seq_len": 8192}).is_success
    yield run
    run.http.close()


def said(tokenizer: Tokenizer, name: str, *completions: str, version: int = 0, reward: float = 0.0) -> dict[str, Any]:
    """Build a group whose rollouts say these texts; the first has the reward."""
    made = group(name, version, rollouts=len(completions))
    for place, text in enumerate(completions):
        ids = tokenizer.encode(text)
        fields = {"prompt_ids": tokenizer.encode("What is 6 x 7?"), "completion_ids": ids}
        made["rollouts"][place] |= fields | {"inference_logprobs": [-0.5] * len(ids), "reward": reward * (place == 0)}
    return made


def test_a_live_group_is_found_by_letters_of_a_rollout_in_any_case(texts: RunClient, tokenizer: Tokenizer) -> None:
    """The answer names the rollout and the letters around, and the preview is this rollout; the newest comes first."""
    texts.append(said(tokenizer, "old", "it is 41", "I guess FORTY-TWO."), said(tokenizer, "other", "no idea"))
    texts.append(said(tokenizer, "new", "forty-two"))
    page = texts.get("groups", contains="Forty-Two", desc="true", preview="true").json()
    assert [entry["group_id"] for entry in page["groups"]] == ["new", "old"] and page["next"] is None
    old = page["groups"][1]
    match = {"place": 1, "part": "completion", "before": "I guess ", "text": "FORTY-TWO", "behind": "."}
    assert old["match"] == match
    assert old["preview"]["place"] == 1
    assert page["searched"]["groups"] == 3 and page["searched"]["bytes"] > 100
    (first, *_) = texts.get("groups", contains="6 X 7").json()["groups"]
    assert (first["match"]["part"], first["match"]["behind"]) == ("prompt", "?")
    assert texts.get("groups", contains="forty-three").json()["groups"] == []
    assert "searched" not in texts.get("groups").json()


def test_other_conditions_hold_too_and_their_order_stays(texts: RunClient, tokenizer: Tokenizer) -> None:
    texts.append(
        *(said(tokenizer, name, "yes", reward=reward) for name, reward in (("a", 0.5), ("b", 1.0), ("c", 0.0)))
    )
    page = texts.get("groups", contains="yes", order="reward", desc="true", min_reward=0.1, limit=1).json()
    assert [entry["group_id"] for entry in page["groups"]] == ["b"] and page["searched"]["groups"] == 1
    page = texts.get("groups", contains="yes", order="reward", desc="true", min_reward=0.1, after=page["next"]).json()
    assert [entry["group_id"] for entry in page["groups"]] == ["a"] and page["next"] is None


def test_one_call_looks_at_a_bounded_number_of_groups_and_the_next_reads_on(
    texts: RunClient, tokenizer: Tokenizer
) -> None:
    texts.append(said(tokenizer, "needle", "here it is"))
    texts.append(*(said(tokenizer, f"g{number}", "hay") for number in range(text_search.SEARCHED_GROUPS)))
    page = texts.get("groups", contains="here", desc="true").json()
    assert page["groups"] == [] and page["searched"]["groups"] == text_search.SEARCHED_GROUPS
    page = texts.get("groups", contains="here", desc="true", after=page["next"]).json()
    assert [entry["group_id"] for entry in page["groups"]] == ["needle"] and page["searched"]["groups"] == 1


def test_the_command_shows_the_text_around_and_how_far_it_looked(
    with_texts: ServeProcess,
    texts: RunClient,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REPLAYBUF_URL", with_texts.url)
    monkeypatch.setenv("COLUMNS", "200")
    texts.append(*(said(tokenizer, name, f"it is \x1b[31m{name}!") for name in ("seven", "eight", "other seven")))

    def listed(*options: str) -> str:
        main(["groups", "list", texts.run, "--contains", "SEVEN", *options])
        return capsys.readouterr().out

    everything = listed()
    assert "seven!" in everything and "eight" not in everything and "\x1b" not in everything
    assert "looked at all 3 groups (" in everything and "2 with this text" in everything and "--after" not in everything
    page = listed("--limit", "1")
    assert "stopped early: looked at 1 group (" in page and "more: --after 3" in page
    assert [entry["match"]["text"] for entry in json.loads(listed("--json"))["groups"]] == ["seven", "seven"]


def test_one_call_looks_at_a_bounded_number_of_bytes(
    server: EmbeddedServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with the group that reaches the bound, and looks at one group at least."""

    async def work(store: Store, run: Run) -> None:
        run.samples.tokenizer = tokenizer
        await append(run, "a", "b", "c", "d")
        query = GroupQuery(contains="letters that no group has")
        whole = (await list_groups(run, query, None, 100)).searched
        assert whole and whole.groups == 4
        for bound, groups in ((1, 1), (whole.bytes // 2, 2), (whole.bytes // 2 + 1, 3)):
            monkeypatch.setattr(text_search, "SEARCHED_BYTES", bound)
            page = await list_groups(run, query, None, 100)
            assert page.searched and (page.searched.groups, page.next) == (groups, groups)
        assert (await list_groups(run, query, 3, 100)).next is None

    on_a_run(server, work)


def test_a_freed_group_is_found_among_the_samples_alone(texts: RunClient, tokenizer: Tokenizer) -> None:
    texts.append(said(tokenizer, "freed", "forty-two"))
    epoch = texts.attach()
    texts.train(epoch, range(1))
    assert texts.post("checkpoints", epoch=epoch, step=1, keep=1).status_code == 200
    eventually(lambda: texts.get("groups/freed").json()["rollouts"] is None, within_s=60.0)
    assert texts.get("groups", contains="forty").json()["searched"] == {"groups": 0, "bytes": 0}
    assert texts.get("samples", contains="forty").json()["samples"][0]["group_id"] == "freed"
    reply = texts.get("groups", contains="forty", state="retired")
    assert (reply.status_code, reply.json()["name"]) == (422, "contains")


def test_a_service_without_a_tokenizer_says_that_it_has_no_text(run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"))
    reply = run.get("groups", contains="x")
    assert (reply.status_code, reply.json()["name"]) == (422, "contains"), reply.text
    assert "--tokenizer" in reply.json()["detail"]


def spoken(tokenizer: Tokenizer, text: str) -> Group:
    """Return a group of one rollout that says this."""
    ids = tokenizer.encode(text)
    return built_group(rollout(completion_ids=ids, inference_logprobs=[-0.5] * len(ids)))


@pytest.mark.parametrize("before", [0, 1, 1534, 1535, 1536, 2046, 2047, 2048, 9000])
def test_a_text_is_found_wherever_a_long_completion_is_cut(tokenizer: Tokenizer, before: int) -> None:
    """Also letters of several tokens, and those whose fold is longer."""
    pieces = text_pieces(spoken(tokenizer, "." * before + "Große Straße!" + "," * 2000))
    match = search_turn(pieces, "grosse strasse", tokenizer).match
    assert match is not None and match.text == "Große Straße" and match.behind.startswith("!,")
    assert set(match.before) <= {"."}


@pytest.mark.parametrize(("rollouts", "tokens"), [(4, 32_768), (2_000, 1)])
def test_a_turn_is_bounded_by_tokens_and_not_by_the_group(tokenizer: Tokenizer, rollouts: int, tokens: int) -> None:
    """Also where a group has many short rollouts, whose calls cost more than their tokens. A match ends the search."""
    hay, needle = [tokenizer.encode(text)[0] for text in (".", "!")]
    ids = [[hay] * tokens] * (rollouts - 1) + [[needle] * tokens]
    pieces = text_pieces(
        built_group(*(rollout(completion_ids=rollout_ids, inference_logprobs=[-0.5] * tokens) for rollout_ids in ids))
    )
    costs: list[int] = []

    def counted() -> Iterator[TextPiece]:
        for piece in pieces:
            costs[-1] += len(piece.token_ids) + PIECE_COST
            yield piece

    counting, turn = counted(), Turn(ended=False)
    while not turn.ended:
        costs.append(0)
        turn = search_turn(counting, "!", tokenizer)
    assert turn.match is not None and turn.match.place == rollouts - 1
    assert len(costs) > 2 and max(costs) < TURN_TOKENS + TOKENS_AT_ONCE + PIECE_COST
