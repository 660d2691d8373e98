"""Filters of prompts at load: what they drop, what they count, and stable prompt indexes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import Invalid
from replaybuf.generator.prompts import Prompt
from replaybuf.generator.prompts.curriculum import Supply
from replaybuf.generator.prompts.filters import PromptFilterOptions
from tests.generator.doubles import make_tokenizer


def write(folder: Path, *rows: dict[str, Any], name: str = "words") -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def load(folder: Path, file: Path, **options: Any) -> Supply:
    return Supply(str(file), make_tokenizer(folder / "model"), PromptFilterOptions(**options))


def texts(supply: Supply) -> list[str]:
    return [prompt.text for prompt in supply.loaded]


def rated(text: str, pass_rate: object) -> dict[str, Any]:
    return {"prompt": text, "metadata": {"stats": {"pass_rate": pass_rate}}}


def test_prompts_outside_the_bounds_of_length_are_dropped(tmp_path: Path) -> None:
    file = write(tmp_path, *({"prompt": text} for text in ("a", "ab", "abc", "abcd")))
    supply = load(tmp_path, file, min_tokens=2, max_tokens=3)
    assert (texts(supply), supply.dropped) == (["ab", "abc"], {"too_short": 1, "too_long": 1})


def test_the_difficulty_is_a_number_in_the_metadata_and_both_bounds_belong_to_the_window(tmp_path: Path) -> None:
    rows = [rated("a", 0), rated("b", 0.1), rated("c", 0.9), rated("d", 1), rated("e", None), {"prompt": "f"}]
    supply = load(
        tmp_path, write(tmp_path, *rows), difficulty_field="stats.pass_rate", min_difficulty=0.1, max_difficulty=0.9
    )
    assert texts(supply) == ["b", "c"]
    assert supply.dropped == {"difficulty_low": 1, "difficulty_high": 1, "difficulty_missing": 2}


@pytest.mark.parametrize("value", ["0.5", True, [1]])
def test_a_difficulty_that_is_not_a_number_names_its_row(tmp_path: Path, value: object) -> None:
    file = write(tmp_path, rated("a", 0.5), rated("b", value))
    with pytest.raises(Invalid, match=r"words\.jsonl, line 2: metadata\.stats\.pass_rate is .* must be a number"):
        load(tmp_path, file, difficulty_field="stats.pass_rate", max_difficulty=1.0)


def test_the_first_of_the_prompts_with_the_same_text_stays(tmp_path: Path) -> None:
    """White space does not count, nor does the form of the row; the answer is that of the first."""
    rows: list[dict[str, Any]] = [
        {"prompt": "ab c", "answer": "1"},
        {"prompt": "  ab\n\tc ", "answer": "2"},
        {"prompt": "abc"},
        {"prompt_ids": [0, 1, 2]},
        {"prompt": "ab c", "answer": "1"},
    ]
    supply = load(tmp_path, write(tmp_path, *rows), drop_duplicates=True)
    assert [(prompt.text, prompt.answer) for prompt in supply.loaded] == [("ab c", "1"), ("abc", None)]
    assert supply.dropped == {"duplicate": 3}


def test_a_dropped_prompt_does_not_make_its_copy_a_duplicate(tmp_path: Path) -> None:
    file = write(tmp_path, rated("a", 1.0), rated("a ", 0.5))
    supply = load(tmp_path, file, difficulty_field="stats.pass_rate", max_difficulty=0.9, drop_duplicates=True)
    assert (texts(supply), supply.dropped) == (["a "], {"difficulty_high": 1})


def test_duplicates_of_an_earlier_source_are_dropped_and_options_hold_for_all_sources(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "ab"}, {"prompt": "abcd"}, name="one")
    write(tmp_path, {"prompt": "ab "}, {"prompt": "c"}, name="two")
    file = tmp_path / "curriculum.toml"
    file.write_text("".join(f'[[sources]]\nname = "{name}"\nprompts = "{name}.jsonl"\n' for name in ("one", "two")))
    supply = load(tmp_path, file, max_tokens=3, drop_duplicates=True)
    assert (texts(supply), supply.dropped) == (["ab", "c"], {"too_long": 1, "duplicate": 1})


def test_another_load_maps_every_prompt_index_to_the_same_prompt(tmp_path: Path) -> None:
    """Also where the file gets further rows that are dropped: a resumed run neither skips nor repeats a prompt."""
    rows = [{"prompt": "abcd"[: 1 + number % 4] * (1 + number // 4)} for number in range(40)]
    options = {"min_tokens": 3, "max_tokens": 20, "drop_duplicates": True}

    def order(file: Path) -> list[str]:
        prompts = load(tmp_path, file, **options).ordered(seed=7, shuffle=True, check=take)
        return [prompts.at(index).prompt_id for index in range(60)]

    first = order(write(tmp_path, *rows))
    assert first == order(write(tmp_path, {"prompt": "a"}, *rows, {"prompt": "d" * 21}))
    kept = len(set(first))
    assert sorted(set(first[:kept])) == sorted(set(first)) and kept < len(rows)


def take(prompt: Prompt) -> None:
    """Accept any prompt."""


def test_filters_that_leave_no_prompt_of_a_source_are_refused_with_the_options_to_change(tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "abcd"}, {"prompt": "abcdd"}, {"prompt": "a"})
    with pytest.raises(Invalid, match=r"1 too_short, 2 too_long.*min_tokens, max_tokens of --prompt-filter") as info:
        load(tmp_path, file, min_tokens=2, max_tokens=3)
    assert info.value.name == "prompts"


def test_filters_are_refused_for_prompts_that_never_end(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"never end.*finite"):
        Supply("reasoning-gym:chain_sum", make_tokenizer(tmp_path / "model"), PromptFilterOptions(max_tokens=9))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"difficulty_field": "x", "min_difficulty": 0.5, "max_difficulty": 0.4}, "min_difficulty"),
        ({"min_difficulty": 0.5}, "difficulty_field"),
        ({"difficulty_field": "x"}, "min_difficulty or max_difficulty"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(Invalid) as info:
        PromptFilterOptions(**options)
    assert info.value.name == name


def test_what_was_dropped_is_logged_by_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load(tmp_path, write(tmp_path, {"prompt": "a"}, {"prompt": "abc"}), max_tokens=2)
    assert "too_long=1" in caplog.text
