"""Run, model and tokenizer must fit together before training starts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import Invalid
from replaybuf.wire.answer.run_status import BatchFacts, RunFacts
from replaybuf_trainer.models.fit import attention_bytes, check_fit, tokenizer_size
from replaybuf_trainer.option_groups import ModelOptions
from replaybuf_trainer.options import TrainOptions
from tests.trainer.models.families import tiny


def check(folder: Path, facts: RunFacts | None = None, family: str = "qwen3", attention: Any = "sdpa") -> None:
    options = TrainOptions(run="r", model=folder, model_options=ModelOptions(attention=attention))
    check_fit(tiny(family, attention), options, facts or RunFacts())


def write_tokenizer(folder: Path, vocabulary: object, added: list[int]) -> None:
    made = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": number} for number in added]}
    (folder / "tokenizer.json").write_text(json.dumps(made))


@pytest.mark.parametrize(("option", "layers"), [(0, 5), (1, 1), (2, 3), (4, 4), (5, 5)])
def test_checkpointed_layers_keep_no_attention_weights(option: int, layers: int, tmp_path: Path) -> None:
    """Five layers: those that are not checkpointed, and one that the backward pass computes again."""
    how = ModelOptions(activation_checkpointing=option)
    options = TrainOptions(run="r", model=tmp_path, model_options=how, rows_per_forward=1)
    model = tiny("qwen3", "eager", num_hidden_layers=5)
    assert attention_bytes(model, options, 10) == 100 * 4 * 4 * (layers + 2)  # float32, four heads


def test_the_size_of_a_tokenizer_is_its_highest_id_and_one(models: Path, tmp_path: Path) -> None:
    """Of vocabularies by name and by place, with tokens that were added later."""
    assert tokenizer_size(models / "a") == 98
    assert tokenizer_size(tmp_path) == 0
    write_tokenizer(tmp_path, {"a": 3, "b": 0}, [9])
    assert tokenizer_size(tmp_path) == 10
    write_tokenizer(tmp_path, [["a", -1.0], ["b", -2.0]], [])
    assert tokenizer_size(tmp_path) == 2


def test_a_tokenizer_with_more_tokens_than_the_model_is_rejected(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"a": 0}, [98])
    with pytest.raises(Invalid, match=r"has token ids up to 98; the model has 98 tokens; resize"):
        check(tmp_path)


def test_a_run_with_fewer_tokens_than_the_tokenizer_is_noticed(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Models have spare rows, so the run may also have more tokens than the tokenizer."""
    check(models / "a", RunFacts(vocab_size=98))
    assert not caplog.messages
    check(models / "a", RunFacts(vocab_size=97))
    assert "run r has vocab_size 97; the tokenizer has 98 tokens" in caplog.text


@pytest.mark.parametrize(
    ("attention", "seq_len", "warned"),
    [
        ("sdpa", 4096, None),
        ("sdpa", 8192, "attention sdpa needs about 3.0 GiB for 8 rows of 8192 tokens; use attention flash"),
        ("eager", 4096, "attention eager needs about 8.0 GiB"),
    ],
)
def test_large_masks_are_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, attention: str, seq_len: int, warned: str | None
) -> None:
    caplog.set_level(logging.WARNING)
    check(tmp_path, RunFacts(batch=BatchFacts(seq_len=seq_len)), attention=attention)
    assert warned in caplog.text if warned else not caplog.messages
