"""Prompts of a file, their order by ticket, and errors that name the line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import Invalid
from replaybuf.generator.prompts import Prompt, Prompts
from replaybuf.generator.prompts.sources import read_prompts
from tests.generator.doubles import make_prompt, make_tokenizer, write_tokenizer


def read(folder: Path, *lines: dict[str, Any] | str, **config: Any) -> list[Prompt]:
    """Write lines as a prompts file and read it."""
    from replaybuf.wire.text.model_tokenizer import Tokenizer

    file = folder / "words.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    tokenizer = Tokenizer(write_tokenizer(folder / "model", **config)) if config else make_tokenizer(folder / "model")
    return read_prompts(file, tokenizer)


def make_prompts(count: int, **options: Any) -> Prompts:
    return Prompts([make_prompt(prompt_id=f"p{number}") for number in range(count)], **options)


def ids(prompts: Prompts, indexes: range) -> list[str]:
    return [prompts.at(index).prompt_id for index in indexes]


def test_a_prompt_has_the_fields_of_its_line(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, {"prompt_id": "x", "prompt": "cab", "answer": "bac", "metadata": {"level": 3}})
    assert (prompt.prompt_id, prompt.text, prompt.answer, prompt.metadata) == ("x", "cab", "bac", {"level": 3})
    assert prompt.token_ids.tolist() == [2, 0, 1]


def test_the_default_id_depends_on_the_content_only(tmp_path: Path) -> None:
    a, b = {"prompt": "a", "answer": "x"}, {"prompt": "b"}
    first = [prompt.prompt_id for prompt in read(tmp_path, a, "", b)]
    assert first == [prompt.prompt_id for prompt in read(tmp_path, b, a)][::-1]
    assert first != [prompt.prompt_id for prompt in read(tmp_path, a | {"answer": "y"}, b)]
    assert all(prompt_id.startswith("words/") for prompt_id in first)


def test_duplicate_content_is_rejected_with_both_lines(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"line 3: .* is already used in .*words\.jsonl, line 1"):
        read(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a", "metadata": {"level": 1}})


def test_an_answer_may_be_a_number(tmp_path: Path) -> None:
    assert [p.answer for p in read(tmp_path, {"prompt": "a", "answer": 42})] == ["42"]


def test_token_ids_are_used_unchanged(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, {"prompt_ids": [2, 0, 1]})
    assert (prompt.token_ids.tolist(), prompt.text) == ([2, 0, 1], "cab")


def test_messages_are_rendered(tmp_path: Path) -> None:
    (prompt,) = read(
        tmp_path, {"messages": [{"role": "user", "content": "cab"}]}, chat_template="{{ messages[0].content }}>"
    )
    assert prompt.text == "cab>"


def test_a_template_writes_the_special_tokens_itself(tmp_path: Path) -> None:
    plain, rendered = read(
        tmp_path,
        {"prompt": "cab"},
        {"messages": [{"role": "user", "content": "cab"}]},
        chat_template="{{ messages[0].content }}",
        ends_texts=True,
    )
    assert plain.token_ids.tolist() == [2, 0, 1, 28]
    assert rendered.token_ids.tolist() == [2, 0, 1]


@pytest.mark.parametrize("seed", [-1, 2**64 + 5])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert sorted(ids(make_prompts(4, seed=seed), range(4))) == ["p0", "p1", "p2", "p3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Input data was truncated"),
        ({"answer": "x"}, "has none of prompt, messages, prompt_ids"),
        ({"prompt": "a", "prompt_ids": [1]}, "has prompt and prompt_ids"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": " \n"}, "prompt is only white space"),
        ([], "is of type list; a row must be a dict"),
        ({"messages": []}, "messages is empty"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [1, 99]}, "prompt_ids from 1 to 99; the tokenizer has ids from 0 to 28"),
        ({"prompt_ids": [-1]}, "prompt_ids from -1"),
        ({"prompt": "a", "answr": "b"}, "unknown field `answr`"),
        ({"prompt": 3}, "Expected `str | null`"),
        ({"prompt_id": "first", "prompt": "b"}, "prompt_id 'first' is already used in prompts file"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no chat template"),
        ({"messages": [{"role": "user"}]}, "messages: number 1 (user) has no content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages: number 1 (user) has no content"),
        (
            {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": " "}]},
            "number 2 (user) has no",
        ),
        ({"messages": [{}]}, "messages: number 1 has no role"),
        ({"prompt_id": "", "prompt": "a"}, "prompt_id is empty"),
    ],
)
def test_an_invalid_line_is_named_in_the_error(tmp_path: Path, line: dict[str, Any] | str, message: str) -> None:
    with pytest.raises(Invalid, match=r"words\.jsonl, line 2: ") as caught:
        read(tmp_path, {"prompt_id": "first", "prompt": "a"}, line)
    assert message in caught.value.detail


def test_a_file_without_prompts_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="holds no prompt"):
        read(tmp_path, "")


def test_a_missing_prompts_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"gone\.jsonl: No such file"):
        read_prompts(tmp_path / "gone.jsonl", make_tokenizer(tmp_path))


def test_every_epoch_has_every_prompt_once_in_another_order() -> None:
    prompts = make_prompts(50, seed=1)
    first, second = ids(prompts, range(50)), ids(prompts, range(50, 100))
    assert Counter(first) == Counter(second) == Counter(p.prompt_id for p in prompts)
    assert first != second


def test_the_order_depends_on_seed_and_index_only() -> None:
    far = range(995, 1005)
    assert ids(make_prompts(10, seed=7), far) == ids(make_prompts(10, seed=7), far)
    assert ids(make_prompts(10, seed=7), range(10)) != ids(make_prompts(10, seed=8), range(10))


def test_the_order_is_the_same_in_every_release() -> None:
    """Frozen: generators of different versions may serve one run."""
    assert ids(make_prompts(8, seed=0), range(8)) == ["p0", "p2", "p1", "p5", "p4", "p3", "p6", "p7"]


def test_the_order_of_the_file_can_be_kept() -> None:
    assert ids(make_prompts(3, shuffle=False), range(5)) == ["p0", "p1", "p2", "p0", "p1"]


@given(st.integers(1, 40), st.integers(0, 2**70), st.integers(0, 10**9))
def test_any_index_has_a_prompt(count: int, seed: int, index: int) -> None:
    prompts = make_prompts(count, seed=seed)
    assert prompts.at(index).prompt_id == make_prompts(count, seed=seed).at(index).prompt_id
