"""Activation checkpointing and compilation change memory and speed, not gradients or names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replaybuf.errors import Invalid
from replaybuf_trainer.models.layers import checkpoint_activations, compile_layers, decoder_layers
from replaybuf_trainer.models.packed_forward import packed_forward
from replaybuf_trainer.models.policy import load_trained_model
from replaybuf_trainer.option_groups import ModelOptions
from replaybuf_trainer.options import TrainOptions
from tests.trainer.batches import packed, rollouts, trained_rows
from tests.trainer.models.families import tiny, write_tiny


def capture_layers(model: Any) -> None:
    """Compile without inductor, which needs minutes on a CPU: the captured graphs run as they are."""
    compile_layers(model, "eager")


def checkpoint_every_second(model: Any) -> None:
    checkpoint_activations(model, 2)


def value(model: Any, rows: list[list[int]]) -> torch.Tensor:
    """A sum over the logprobs of all loss tokens."""
    logprobs = packed_forward(model, trained_rows(packed(rollouts(6, seed=0), rows))).logprobs
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it, and pytest shows it again
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", [checkpoint_activations]),
        ("opt", [checkpoint_activations]),
        ("qwen3", [checkpoint_every_second]),
        ("qwen3", [capture_layers, checkpoint_activations]),
    ],
    ids=["checkpointed", "with dropout", "every second", "compiled and checkpointed"],
)
def test_gradients_and_names_stay_the_same(family: str, changes: list[Callable[[Any], None]]) -> None:
    """For rows of several lengths. OPT has dropout between its layers, which must stay off."""
    plain, changed = (tiny(family, num_hidden_layers=2) for _ in range(2))
    for change in changes:
        change(changed)
    assert list(changed.state_dict()) == list(plain.state_dict())
    for rows in ([[4, 0, 2], [1], [5, 3]], [[4, 1], [5, 3, 0, 2]]):
        gradients = [torch.autograd.grad(value(model, rows), list(model.parameters())) for model in (changed, plain)]
        for gradient, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


def test_checkpointing_keeps_the_input_of_each_layer_only() -> None:
    """Counted in bytes that the forward pass saves for the backward pass: every second layer keeps what it kept."""
    sizes = []
    for interval in (None, 1, 2):
        model = tiny("qwen3", num_hidden_layers=4)
        if interval:
            checkpoint_activations(model, interval)
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value(model, [[4, 0, 2], [1], [5, 3]])
        sizes.append(sum(size for place, size in saved.items() if place not in weights))
    assert sizes[1] < sizes[0] / 5
    assert sizes[1] < sizes[2] < sizes[0]


@pytest.mark.parametrize(
    ("option", "wrapped"),
    [(0, []), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (5, [0]), (9, [0])],
)
def test_the_option_counts_layers_from_the_first(option: int, wrapped: list[int], tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "qwen3", num_hidden_layers=5)
    how = ModelOptions(activation_checkpointing=option)
    model = load_trained_model(folder, TrainOptions(run="r", model=folder, model_options=how))
    assert [index for index, layer in enumerate(decoder_layers(model)) if "forward" in vars(layer)] == wrapped


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Invalid, match=r"compile needs a C\+\+ compiler on the CPU: no-such-compiler is not"):
        compile_layers(tiny("qwen3"))


def test_a_model_without_marked_layers_is_rejected() -> None:
    with pytest.raises(Invalid, match="the layers of Linear are not known"):
        checkpoint_activations(torch.nn.Linear(1, 1))
