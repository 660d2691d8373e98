"""Logprobs of packed rows equal those of each rollout in a forward pass of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from replaybuf.errors import Invalid
from replaybuf.generator.stage.stages import Rollout
from replaybuf.plugins import entry_points as plugins
from replaybuf.wire.group import Float32s
from replaybuf_trainer.models import logprobs as logprobs_module
from replaybuf_trainer.models.logprobs import PackedLogprobs


def rollout(random: np.random.Generator, prompt: int, completion: int) -> Rollout:
    ids = random.integers(0, 98, prompt + completion, np.int32)
    return Rollout(ids[:prompt], ids[prompt:], np.ones(completion, np.bool_))


def alone(folder: Path, rollout: Rollout) -> Float32s:
    """Compute by a plain forward pass."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
    with torch.no_grad():
        every = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
    values: Float32s = every.gather(1, ids[1:, None]).squeeze(1).numpy()
    return values[len(rollout.prompt_ids) - 1 :]


@pytest.mark.parametrize("row_tokens", [4096, 16], ids=["one row", "many rows"])
def test_packed_rows_give_the_logprobs_of_single_rollouts(
    models: Path, monkeypatch: pytest.MonkeyPatch, row_tokens: int
) -> None:
    monkeypatch.setattr(logprobs_module, "ROW_TOKENS", row_tokens)
    random = np.random.default_rng(0)
    rollouts = [rollout(random, *lengths) for lengths in ((1, 1), (5, 9), (2, 3), (7, 1), (1, 12), (20, 11))]
    logprobs = PackedLogprobs(models / "a").logprobs(rollouts)
    for values, single_rollout in zip(logprobs, rollouts, strict=True):
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, alone(models / "a", single_rollout), atol=1e-5)


def test_the_longest_rollout_is_that_of_the_models_positions(models: Path) -> None:
    assert PackedLogprobs(models / "a").max_tokens == 256


def test_it_is_found_by_entry_point(models: Path) -> None:
    loaded = plugins.load(plugins.LOGPROBS, "torch")(models / "a")
    assert isinstance(loaded, PackedLogprobs)


def test_a_folder_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"has no config\.json"):
        PackedLogprobs(tmp_path)
