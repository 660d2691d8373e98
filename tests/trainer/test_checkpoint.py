"""Checkpoints: a checkpoint is complete or absent, and training continues from it bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from replaybuf.errors import Invalid
from replaybuf_trainer.checkpoint import (
    TrainerState,
    latest_checkpoint,
    load_optimizer,
    read_state,
    save_checkpoint,
)
from replaybuf_trainer.losses import BatchTotals, Tally, load_objective
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.models.packed_forward import packed_forward
from tests.trainer.batches import packed, rollouts, trained_rows


def adam(model: Any) -> torch.optim.Optimizer:
    """The trainer's kind of optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    """Take one optimizer step per number, on a batch drawn from it."""
    for step in steps:
        batch = packed(rollouts(4, seed=step), [[0, 1], [2, 3]])
        tokens = packed_forward(model, trained_rows(batch))
        totals = BatchTotals(batch.meta.batch_loss_tokens, batch.meta.batch_rollouts)
        torch.autograd.backward(load_objective("grpo").value(tokens, totals, Tally()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def save(folder: Path, model: Any, optimizer: torch.optim.Optimizer, models: Path, step: int, keep: int = 2) -> Path:
    """Write a checkpoint of a run `r` that publishes after every step."""
    return save_checkpoint(folder, model, optimizer, models / "a", TrainerState("r", step, step), keep)


def test_training_continues_from_a_checkpoint_bit_for_bit(models: Path, tmp_path: Path) -> None:
    """Four steps at once, and two, a checkpoint and two more, end in the same weights."""
    whole = load_model(models / "a")
    train(whole, adam(whole), range(4))
    first = load_model(models / "a")
    optimizer = adam(first)
    train(first, optimizer, range(2))
    checkpoint = save(tmp_path, first, optimizer, models, 2)
    resumed = load_model(checkpoint / "model")
    optimizer = adam(resumed)
    load_optimizer(checkpoint, resumed, optimizer)
    train(resumed, optimizer, range(2, 4))
    for (name, one), (_, other) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_random_numbers_continue_from_a_checkpoint(models: Path, tmp_path: Path) -> None:
    """As dropout draws them; a checkpoint without a random state changes nothing."""
    model = load_model(models / "a")
    optimizer = adam(model)
    torch.manual_seed(7)
    checkpoint = save(tmp_path, model, optimizer, models, 1)
    expected = torch.rand(3)
    load_optimizer(checkpoint, model, optimizer)
    assert torch.equal(torch.rand(3), expected)
    save_file({}, checkpoint / "optimizer.safetensors")
    torch.manual_seed(7)
    load_optimizer(checkpoint, model, optimizer)
    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_holds_no_pickle(models: Path, tmp_path: Path) -> None:
    """Weights and moments are safetensors, the rest is JSON."""
    model = load_model(models / "a")
    optimizer = adam(model)
    train(model, optimizer, [0])
    checkpoint = save(tmp_path, model, optimizer, models, 1)
    kinds = {path.suffix for path in checkpoint.rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json"}
    assert read_state(checkpoint) == TrainerState("r", 1, 1)


def test_the_newest_checkpoint_is_picked_by_its_number(tmp_path: Path) -> None:
    """Not by its name or age; folders that are no checkpoints do not count."""
    for name in ("step-1000000", "step-000999", ".step-2000000.17", "step-9", "steps", "step-3000000.old"):
        (tmp_path / name).mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1000000"


def test_without_a_checkpoint_none_is_picked(tmp_path: Path) -> None:
    """An empty folder, and one that does not exist."""
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_a_checkpoint_that_was_not_finished_is_never_picked(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer dies after the weights: the one before stays the newest."""
    model = load_model(models / "a")
    optimizer = adam(model)
    kept = save(tmp_path, model, optimizer, models, 1)

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("replaybuf_trainer.checkpoint.save_file", die)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, model, optimizer, models, 2)
    assert latest_checkpoint(tmp_path) == kept


def test_only_the_newest_checkpoints_are_kept(models: Path, tmp_path: Path) -> None:
    """The number to keep is an argument."""
    model = load_model(models / "a")
    optimizer = adam(model)
    for step in (5, 10, 15):
        save(tmp_path, model, optimizer, models, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000015"]


@pytest.mark.parametrize("content", [None, b"{", b'{"step": 3}', b'{"run": "\xff"}'])
def test_the_error_for_a_broken_state_names_its_folder(tmp_path: Path, content: bytes | None) -> None:
    """Missing, cut short, of another shape or not UTF-8."""
    if content is not None:
        (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(Invalid, match=str(tmp_path)):
        read_state(tmp_path)
