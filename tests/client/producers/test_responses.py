"""Turns of OpenAI-compatible servers, in the shapes of vLLM's answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from replaybuf.client.producers import read_turns
from replaybuf.errors import GroupRejected


def chat(**changes: Any) -> dict[str, Any]:
    """An answer of /v1/chat/completions with logprobs and `return_token_ids`."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "ab"},
        "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.0}]},
        "finish_reason": "tool_calls",
        "token_ids": [3, 4],
    }
    return {"object": "chat.completion", "prompt_token_ids": [1, 2], "choices": [choice | changes]}


def test_an_answer_to_a_chat_has_its_turn() -> None:
    (turn,) = read_turns(chat())
    assert (turn.prompt_ids, turn.token_ids, turn.logprobs) == ([1, 2], [3, 4], [-0.5, -1.0])
    assert (turn.finish_reason, turn.text, turn.versions) == ("tool_calls", "ab", None)


def test_an_object_of_the_openai_package_is_read_like_its_json() -> None:
    """It is a pydantic model that keeps the fields that OpenAI lacks."""
    assert read_turns(SimpleNamespace(model_dump=chat)) == read_turns(chat())


def test_several_choices_come_by_index_with_their_versions() -> None:
    """The answers of /v1/completions have the prompt in each choice."""
    choices = [
        {
            "index": number,
            "text": "x",
            "prompt_token_ids": [1],
            "token_ids": [number, 9],
            "logprobs": {"token_logprobs": [-0.5, -0.5]},
            "weight_versions": [{"version": "default", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}],
        }
        for number in (1, 0)
    ]
    turns = read_turns({"choices": choices})
    assert [turn.token_ids[0] for turn in turns] == [0, 1]
    assert turns[0].versions == [(0, 0, 1), (2, 1, 2)]


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"token_ids": None}, "choices[0].token_ids"),
        ({"logprobs": None}, "choices[0].logprobs"),
        ({"logprobs": {}}, "choices[0].logprobs.content"),
    ],
)
def test_an_answer_without_ids_or_logprobs_says_how_to_ask(changes: dict[str, Any], missing: str) -> None:
    with pytest.raises(GroupRejected) as caught:
        read_turns(chat(**changes))
    assert caught.value.detail.startswith(f"the response has no {missing}; send extra_body=")


def test_a_prompt_without_ids_says_how_to_ask() -> None:
    with pytest.raises(GroupRejected, match="the response has no prompt_token_ids; send"):
        read_turns(chat() | {"prompt_token_ids": None})


def test_a_version_label_that_is_no_number_is_named() -> None:
    with pytest.raises(GroupRejected, match=r"choices\[0\].weight_versions: .*'step-7'; needed: labels that are"):
        read_turns(chat(weight_versions=[{"version": "step-7", "start": 0, "end": 2}]))
