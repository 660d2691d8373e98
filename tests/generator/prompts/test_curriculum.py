"""Curricula: weights depend on the prompt index only, and later stages may change while running."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import Invalid
from replaybuf.generator.prompts import Prompt, PromptOrder
from replaybuf.generator.prompts.curriculum import BLOCK, Schedule, Stage, Supply
from tests.generator.doubles import make_tokenizer

SOURCES = """
[[sources]]
name = "a"
prompts = "a.jsonl"
[[sources]]
name = "b"
prompts = "b.jsonl"
"""
NAMES = ("a", "b", "c")
WEIGHTS = (
    st.lists(st.integers(0, 100), min_size=3, max_size=3).filter(any).map(lambda w: dict(zip(NAMES, w, strict=True)))
)


def stages(*weights: dict[str, float], starts: tuple[int, ...] | None = None) -> list[Stage]:
    starts = starts or tuple(range(0, 777 * len(weights), 777))
    return [Stage(from_prompt_index=start, weights=w) for start, w in zip(starts, weights, strict=True)]


def write(folder: Path, *more: str) -> Path:
    """Write a curriculum of two sources with three prompts each."""
    for name in "ab":
        (folder / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{name * n}"}}\n' for n in (1, 2, 3)))
    file = folder / "mix.toml"
    staged = folder / "staged"
    staged.write_text(SOURCES + "".join(more))
    staged.replace(file)
    return file


def stage(start: int, **weights: float) -> str:
    shares = ", ".join(f"{name} = {weight}" for name, weight in weights.items())
    return f"[[stages]]\nfrom_prompt_index = {start}\nweights = {{ {shares} }}\n"


def take(prompt: Prompt) -> None:
    """Accept any prompt."""


def ordered(folder: Path, file: Path) -> PromptOrder:
    return Supply(str(file), make_tokenizer(folder / "model")).ordered(seed=1, shuffle=True, check=take)


def sources(order: PromptOrder, indexes: range) -> Counter[str]:
    return Counter(order.at(index).recorded["source"] for index in indexes)


@given(st.lists(WEIGHTS, min_size=1, max_size=3), st.integers(0, 2**64), st.integers(0, 4000))
def test_places_of_a_source_count_up_without_gap(weights: list[dict[str, float]], seed: int, start: int) -> None:
    schedule = Schedule(stages(*weights), NAMES, seed=seed)
    seen: dict[str, int] = {}
    for index in range(start, start + 50):
        _, name, place = schedule.choose(index)
        assert place == seen.get(name, place)
        seen[name] = place + 1
    first = [schedule.choose(index) for index in range(30)]
    counts: Counter[str] = Counter()
    for _, name, place in first:
        assert place == counts[name]
        counts[name] += 1


@given(WEIGHTS, st.integers(0, 50))
def test_every_block_holds_the_shares_exactly(weights: dict[str, float], block: int) -> None:
    schedule = Schedule(stages(weights), NAMES, seed=3)
    counts = Counter(schedule.choose(index)[1] for index in range(block * BLOCK, (block + 1) * BLOCK))
    total = sum(weights.values())
    assert all(abs(counts[name] - BLOCK * weight / total) < 1 for name, weight in weights.items())


def test_the_choice_is_the_same_in_every_release() -> None:
    """Frozen: generators of different versions may serve one run."""
    schedule = Schedule(stages({"a": 2, "b": 1}), ("a", "b"), seed=0)
    assert "".join(schedule.choose(index)[1] for index in range(12)) == "babaaaaaaaba"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 0}, "one above 0"),
        ({"a": -1, "b": 2}, "numbers >= 0"),
        ({"d": 1}, "for a, b, c"),
        ({"a": float("nan")}, "numbers >= 0"),
        ({"a": 1, "b": 1e-6}, r"weight 1e-06 of 'b' is a share below 1/1000"),
    ],
)
def test_invalid_weights_are_rejected(weights: dict[str, float], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        Schedule(stages(weights), NAMES, seed=0)


@pytest.mark.parametrize("starts", [(5, 9), (0, 0), (0, -3)])
def test_stages_start_at_0_and_rise(starts: tuple[int, ...]) -> None:
    with pytest.raises(Invalid, match="must start at 0 and rise"):
        Schedule(stages({"a": 1}, {"a": 2}, starts=starts), NAMES, seed=0)


def test_without_stages_all_sources_have_the_same_weight(tmp_path: Path) -> None:
    order = ordered(tmp_path, write(tmp_path))
    assert sources(order, range(1000)) == {"a": 500, "b": 500}
    recorded = order.at(0).recorded
    assert recorded["curriculum"] == {"from_prompt_index": 0, "weights": {"a": 1.0, "b": 1.0}}


def test_a_source_uses_each_prompt_once_per_epoch(tmp_path: Path) -> None:
    order = ordered(tmp_path, write(tmp_path, stage(0, a=9, b=1)))
    texts = [prompt.text for prompt in map(order.at, range(200)) if prompt.recorded["source"] == "b"]
    assert all(sorted(texts[n : n + 3]) == ["b", "bb", "bbb"] for n in range(0, len(texts) - 2, 3))


def test_weights_change_while_running_and_generators_agree(tmp_path: Path) -> None:
    order, slow = (ordered(tmp_path, write(tmp_path, stage(0, a=1))) for _ in range(2))
    assert sources(order, range(100)) == {"a": 100}
    write(tmp_path, stage(0, a=1), stage(150, b=1))
    assert sources(order, range(100, 200)) == {"a": 50, "b": 50}
    assert order.at(199).recorded["curriculum"] == {"from_prompt_index": 150, "weights": {"b": 1.0}}
    late = ordered(tmp_path, tmp_path / "mix.toml")
    for index in (199, 150, 149, 0, 77):
        assert order.at(index).prompt_id == slow.at(index).prompt_id == late.at(index).prompt_id


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ([stage(0, b=1)], "it changes a stage of index 9 or before"),
        ([stage(0, a=1), stage(5, b=1)], "it changes a stage"),
        (["[[sources]]\nname = 'c'\nprompts = 'a.jsonl'\n"], "sources differ"),
        (["{"], "mix.toml: "),
    ],
)
def test_a_change_of_earlier_stages_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: list[str], message: str
) -> None:
    order = ordered(tmp_path, write(tmp_path, stage(0, a=1)))
    sources(order, range(10))
    write(tmp_path, *changed)
    assert sources(order, range(10, 30)) == {"a": 20}
    assert [message in record.message for record in caplog.records] == [True], "said once"


def test_a_missing_file_changes_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, stage(0, a=1))
    order = ordered(tmp_path, file)
    file.unlink()
    assert sources(order, range(5)) == {"a": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sources = []", "names of the sources are []"),
        ("[[sources]]\nprompts = 'a.jsonl'\n", "each source needs a name of its own"),
        ("[[sources]]\nname = 'a'\nprompt = 'a.jsonl'\n", "prompt"),
        ("{", "mix.toml: "),
        (SOURCES + stage(3, a=1), "must start at 0"),
    ],
)
def test_an_invalid_curriculum_is_named_in_the_error(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mix.toml"
    file.write_text(text)
    with pytest.raises(Invalid, match=r"curriculum .*mix\.toml: ") as caught:
        Supply(str(file), make_tokenizer(tmp_path / "model"))
    assert message in caught.value.detail


def test_one_prompt_id_in_two_sources_is_rejected(tmp_path: Path) -> None:
    file = write(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"prompt_id": "x", "prompt": "abc"}\n')
    with pytest.raises(Invalid, match=r"b\.jsonl, line 1: prompt_id .x. is already used in .*a\.jsonl, line 1"):
        Supply(str(file), make_tokenizer(tmp_path / "model"))
