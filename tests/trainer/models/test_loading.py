"""Model folders: what loads, what is rejected before training, and the cost of a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replaybuf.errors import Invalid
from replaybuf_trainer.engine.served_models import load_engine_model
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.models.policy import load_policy
from replaybuf_trainer.option_groups import ModelOptions
from replaybuf_trainer.options import TrainOptions
from tests.trainer.models.families import tiny, write_tiny


def test_a_folder_of_another_family_has_the_weights_it_was_saved_with(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    expected = tiny("llama").state_dict()
    loaded = load_model(tmp_path, "eager").state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b'{"model_type": "unheard_of"}', "model_type 'unheard_of' does not load"),
        (b"{}", "model_type None does not load"),
        (b"x", "does not decode"),
        (b'{"model_type": "vit"}', "model_type 'vit' does not load"),
        (b'{"model_type": "unheard_of", "auto_map": {"AutoModelForCausalLM": "code.Model"}}', "does not load"),
    ],
    ids=["unknown", "none", "broken", "no language model", "own code"],
)
def test_a_folder_that_is_not_a_language_model_is_rejected(tmp_path: Path, config: bytes, message: str) -> None:
    """Code in the folder never runs."""
    (tmp_path / "config.json").write_bytes(config)
    (tmp_path / "code.py").write_text("raise SystemExit")
    with pytest.raises(Invalid, match=message):
        load_model(tmp_path)


def test_a_folder_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"has no config\.json"):
        load_model(tmp_path)


def test_missing_weights_are_rejected(tmp_path: Path) -> None:
    """Otherwise they would be random."""
    write_tiny(tmp_path, "qwen2")
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.layers.1.mlp.down_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(Invalid, match=r"lacks 1 weight of Qwen2ForCausalLM, such as model\.layers\.1\.mlp\.down"):
        load_model(tmp_path)


def test_the_engine_serves_qwen3_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(Invalid, match="model_type 'llama'; the small engine serves 'qwen3' only"):
        load_engine_model(tmp_path)


FLASH = ModelOptions(attention="flash")


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("opt", {}, "OPTForCausalLM, attention sdpa.* mixes the rollouts .*This trainer cannot train it"),
        ("gemma2", {}, "Gemma2ForCausalLM does not support .*scaled_dot_product_attention"),
        ("qwen3", {"model_options": FLASH, "dtype": "bfloat16"}, "attention flash needs a CUDA GPU; use sdpa"),
        ("qwen3", {"model_options": FLASH}, "attention flash needs --dtype bfloat16"),
    ],
)
def test_a_model_that_the_trainer_cannot_train_is_rejected(
    tmp_path: Path, family: str, options: dict[str, Any], message: str
) -> None:
    """Before training, in one error."""
    write_tiny(tmp_path, family)
    with pytest.raises(Invalid, match=message):
        load_policy(tmp_path, TrainOptions(run="r", model=tmp_path, **options))
