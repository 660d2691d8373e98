"""Model folders that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from replaybuf_trainer.folders import numbered_folders, whole_folder
from replaybuf_trainer.models.loading import load_model
from tests.trainer.served import WORD, oracle


class Failed(Exception):
    """What the tests raise in the middle of writing."""


def test_a_saved_model_is_a_complete_hugging_face_folder(models: Path) -> None:
    """transformers alone loads model and tokenizer from it, and both do what ours do."""
    folder = models / "a"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "tokenizer_config.json" in names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert tokenizer.encode("culla>") == WORD
    assert tokenizer.decode([*WORD, 2], skip_special_tokens=True) == "culla>"
    assert oracle(model, WORD, [3, 4]) == pytest.approx(oracle(load_model(folder), WORD, [3, 4]), abs=1e-6)


def test_a_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    """The path does not exist until all files are written."""
    folder = tmp_path / "v000001"
    with whole_folder(folder) as scratch:
        (scratch / "file").write_text("half")
        assert not folder.exists()
        assert scratch.parent == tmp_path
        assert not scratch.name.startswith("v")
    assert (folder / "file").read_text() == "half"
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]


def test_two_writers_of_one_process_id_do_not_mix_their_files(tmp_path: Path) -> None:
    """As in two containers. The one that ends last replaces the folder of the other."""
    folder = tmp_path / "v000001"
    with whole_folder(folder) as first:
        (first / "first").touch()
        with whole_folder(folder) as second:
            (second / "second").touch()
        assert [path.name for path in folder.iterdir()] == ["second"]
    assert [path.name for path in folder.iterdir()] == ["first"]


def test_a_failed_write_keeps_the_old_folder(tmp_path: Path) -> None:
    """Nothing half-written stays, the older content does."""
    folder = tmp_path / "v000001"
    for content in ("first", "second"):
        try:
            with whole_folder(folder) as scratch:
                (scratch / "file").write_text(content)
                if content == "second":
                    raise Failed
        except Failed:
            pass
    assert (folder / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]


def test_a_folder_is_on_disk_before_it_is_at_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and scratch folder are synced before the rename, the parent after it."""
    synced: list[str] = []
    descriptors: dict[int, str] = {}
    really_open, really_sync = os.open, os.fsync

    def remember(path: Any, *arguments: Any, **keywords: Any) -> int:
        descriptor = really_open(path, *arguments, **keywords)
        descriptors[descriptor] = str(path)
        return descriptor

    def record(descriptor: int) -> None:
        state = "moved" if (tmp_path / "v1").exists() else "hidden"
        synced.append(f"{state} {Path(descriptors[descriptor]).name}")
        really_sync(descriptor)

    monkeypatch.setattr(os, "open", remember)
    monkeypatch.setattr(os, "fsync", record)
    with whole_folder(tmp_path / "v1") as scratch:
        (scratch / "file").write_text("x")
        name = scratch.name
    assert synced == ["hidden file", f"hidden {name}", f"moved {tmp_path.name}"]


def test_numbered_folders_are_in_the_order_of_their_numbers_and_other_names_are_left_out(tmp_path: Path) -> None:
    for name in ("v1000000", "v999999", "v000010", "v000011.old", "venv", "v11", "other"):
        (tmp_path / name).mkdir()
    assert [(number, path.name) for number, path in numbered_folders(tmp_path, "v").items()] == [
        (10, "v000010"),
        (999_999, "v999999"),
        (1_000_000, "v1000000"),
    ]
