"""Sources of prompts, and errors that name the row."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import Invalid, MissingExtra, PromptFault
from replaybuf.generator.environments import ReasoningGym
from replaybuf.generator.prompts import Encoder, Prompt
from replaybuf.generator.prompts.sources import TRIED_ROWS, Endless, Source, open_source
from replaybuf.wire.text.model_tokenizer import Tokenizer
from tests.generator.doubles import write_tokenizer

HERE = "tests.generator.prompt_functions"
ROWS: list[dict[str, Any]] = [
    {"question": "cab", "solution": {"text": "bac"}, "level": 2},
    {"question": "abc", "solution": {"text": "cba"}},
]
COLUMNS = {"prompt": "question", "answer": "solution.text"}


class Letters:
    """Encodes any text: one token per character."""

    vocab_size = 1 << 21
    folder: Path | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Any) -> list[str]:
        return ["".join(map(chr, ids)) for ids in token_ids]

    def render(self, messages: Any) -> str:
        return "".join(message["content"] for message in messages)


_: Encoder = Letters()


def opened(prompts: str | Path, **options: Any) -> list[Prompt]:
    rows = open_source(Source(prompts=str(prompts), name="s", **options), Letters())
    assert isinstance(rows, list)
    return rows


def endless(prompts: str, **options: Any) -> Endless:
    opened = open_source(Source(prompts=prompts, name="s", **options), Letters())
    assert isinstance(opened, Endless)
    return opened


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def write_saved(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a folder like `datasets.Dataset.save_to_disk`."""
    import pyarrow

    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    file = folder / "data-00000-of-00001.arrow"
    with pyarrow.OSFile(str(file), "wb") as stream, pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": file.name}]}))
    return folder


def write_lines(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "parquet folder", "saved dataset"])
def test_every_file_format_gives_the_same_prompts(tmp_path: Path, kind: str) -> None:
    path = {
        "jsonl": lambda: write_lines(tmp_path / "x.jsonl", ROWS),
        "parquet": lambda: write_parquet(tmp_path / "x.parquet", ROWS),
        "parquet folder": lambda: write_parquet(tmp_path / "x" / "data" / "train-0.parquet", ROWS).parents[1],
        "saved dataset": lambda: write_saved(tmp_path / "x", ROWS),
    }[kind]()
    prompts = opened(path, columns=COLUMNS)
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [("cab", "bac"), ("abc", "cba")]
    assert prompts[0].metadata == {"level": 2}, "what is no field of a prompt is metadata"
    expected = [prompt.prompt_id for prompt in opened(write_lines(tmp_path / "y.jsonl", ROWS), columns=COLUMNS)]
    assert [prompt.prompt_id for prompt in prompts] == expected


def test_a_missing_column_is_named_with_the_existing_ones(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"x\.parquet, row 1: has no column 'problem'; it has level, question, solution"):
        opened(write_parquet(tmp_path / "x.parquet", ROWS), columns={"prompt": "problem"})


def test_an_empty_prompt_is_named_with_its_row(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"x\.parquet, row 2: prompt is empty"):
        opened(write_parquet(tmp_path / "x.parquet", [{"prompt": "a"}, {"prompt": ""}]))


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_broken_table_is_named_in_the_error(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"no table at all")
    if name == "x.arrow":
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(Invalid, match=f"prompts file {file}: "):
        opened(file if name == "x.parquet" else tmp_path)


def test_a_folder_of_splits_is_an_error_that_lists_them(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(Invalid, match=r"holds the splits train, test; name one"):
        opened(tmp_path)


def test_a_folder_without_a_dataset_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"holds neither state\.json"):
        opened(tmp_path)


def test_without_pyarrow_the_error_has_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install 'replaybuf\[prompts\]'"):
        opened(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("state.json", "{}", "missing required field `_data_files`"),
        ("state.json", "{", "truncated"),
        ("dataset_dict.json", '{"splits": []}', "length >= 1"),
    ],
)
def test_a_broken_datasets_folder_is_named_in_the_error(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(Invalid, match=f"{name}: .*{message}"):
        opened(tmp_path)


def test_a_blank_text_does_not_become_a_chat(tmp_path: Path) -> None:
    """The template would turn it into a prompt without a question."""
    with pytest.raises(Invalid, match="only white space"):
        source = Source(prompts=str(write_lines(tmp_path / "x.jsonl", [{"prompt": " "}])), name="s", chat=True)
        open_source(source, Tokenizer(write_tokenizer(tmp_path / "model", chat_template="x")))


@pytest.mark.parametrize("options", [{"size": "x"}, {"size": 0}, {"size": 2, "seed": "x"}, {"seed": 1.5}])
def test_a_wrong_size_or_seed_of_reasoning_gym_is_rejected(options: dict[str, Any]) -> None:
    source = Source(prompts="reasoning-gym:chain_sum", options=options)
    with pytest.raises(Invalid, match="must be a whole number"):
        opened = open_source(source, Letters())
        assert isinstance(opened, Endless)
        opened.first_prompts()


def test_chat_turns_a_text_into_messages(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role[0] }}>{{ m.content }} {% endfor %}"
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "model", chat_template=template))
    source = Source(
        prompts=str(write_lines(tmp_path / "x.jsonl", [{"prompt": "cab"}])), name="s", chat=True, system="be"
    )
    (prompt,) = open_source(source, tokenizer)  # type: ignore[misc]
    assert prompt.text == "s>be u>cab "


def test_a_function_returns_rows() -> None:
    prompts = opened(f"{HERE}:finite", options={"count": 2})
    assert [(prompt.text, prompt.metadata) for prompt in prompts] == [("a", {"level": 0}), ("ab", {"level": 1})]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "raised RuntimeError('the network is away')"),
        ("nothing", "returned NoneType; it must return an iterable"),
        ("absent", "does not import: AttributeError"),
        ("breaking", "row 2, raised RuntimeError('the connection was reset')"),
        ("unwritable", "row 1: metadata does not encode: Encoding objects of type object"),
    ],
)
def test_a_function_without_rows_is_rejected(name: str, message: str) -> None:
    with pytest.raises(Invalid) as caught:
        opened(f"{HERE}:{name}")
    assert message in caught.value.detail


def test_a_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    (tmp_path / "my_prompts_here.py").write_text("def rows():\n    return [{'prompt': 'abc'}]\n")
    assert [prompt.text for prompt in opened("my_prompts_here:rows")] == ["abc"]


def test_an_endless_iterator_returns_the_same_row_for_a_number() -> None:
    numbers = [5, 2, 5000, 4999, 3, 5001]
    assert [endless(f"{HERE}:endless", endless=True).at(n).prompt_id for n in numbers] == [f"e{n}" for n in numbers]
    source = endless(f"{HERE}:endless", endless=True)
    assert [source.at(number).prompt_id for number in numbers] == [f"e{number}" for number in numbers]


def test_tickets_beyond_the_end_of_an_endless_source_fail() -> None:
    source = endless(f"{HERE}:finite", endless=True)
    assert source.at(2).text == "abc"
    with pytest.raises(PromptFault, match="ended after 3 rows") as caught:
        source.at(3)
    assert caught.value.reason == "prompt_invalid"
    with pytest.raises(Invalid, match="ended after 3 rows"):
        source.first_prompts()


@pytest.mark.parametrize(("number", "reason"), [(20, "prompt_raised"), (21, "prompt_invalid")])
def test_a_wrong_row_of_an_endless_source_costs_one_ticket(number: int, reason: str) -> None:
    source = endless(f"{HERE}:numbered", endless=True)
    assert len(source.first_prompts()) == TRIED_ROWS
    with pytest.raises(PromptFault) as caught:
        source.at(number)
    assert caught.value.reason == reason
    assert source.at(22).prompt_id == "n22"


def test_a_file_cannot_be_endless(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="is finite"):
        opened(tmp_path / "x.jsonl", endless=True)


def test_reasoning_gym_makes_tasks_that_its_environment_scores() -> None:
    pytest.importorskip("reasoning_gym")
    source = endless("reasoning-gym:spell_backward", options={"seed": 7, "max_word_len": 4})
    again = endless("reasoning-gym:spell_backward", options={"seed": 7, "max_word_len": 4})
    for number in (0, 999, 1000, 123_456):
        prompt = source.at(number)
        assert prompt.text == again.at(number).text
        ReasoningGym().check(prompt)
        assert ReasoningGym().score(prompt, prompt.answer or "").reward == 1.0
    other = endless("reasoning-gym:spell_backward", options={"seed": 8_000, "max_word_len": 4})
    assert [source.at(n).text for n in range(5)] != [other.at(n).text for n in range(5)]


def test_reasoning_gym_with_a_size_is_finite() -> None:
    pytest.importorskip("reasoning_gym")
    assert len(opened("reasoning-gym:chain_sum", options={"size": 5})) == 5


def test_an_unknown_reasoning_gym_dataset_is_rejected() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(Invalid, match="cannot create reasoning-gym dataset 'no_such'"):
        endless("reasoning-gym:no_such").first_prompts()
