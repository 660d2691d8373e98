"""Liger kernels need a GPU, so stand-in modules take the place of the package here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from replaybuf.errors import Invalid, MissingExtra
from replaybuf_trainer.models import liger
from replaybuf_trainer.models.liger import liger_kernels
from replaybuf_trainer.models.policy import load_trained_model
from replaybuf_trainer.option_groups import ModelOptions
from replaybuf_trainer.options import TrainOptions
from tests.trainer.models.families import write_tiny

GPU = torch.device("cuda")


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Put stand-ins of the package in its place, which run on a CPU; return the arguments of each call."""
    calls: list[dict[str, Any]] = []
    package, kernels, patches = (
        ModuleType(f"liger_kernel{name}") for name in ("", ".transformers", ".transformers.monkey_patch")
    )
    vars(kernels)["_apply_liger_kernel_to_instance"] = lambda **arguments: calls.append(arguments)
    vars(patches)["MODEL_TYPE_TO_APPLY_LIGER_FN"] = {"qwen3": None}
    for module in (package, kernels, patches):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(liger, "DEVICES", ("cpu",))
    return calls


def options(folder: Path, *, enabled: bool = True) -> TrainOptions:
    return TrainOptions(run="r", model=folder, model_options=ModelOptions(liger=enabled))


def test_the_kernels_come_into_the_loaded_model_without_their_loss(
    applied: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder = write_tiny(tmp_path, "qwen3")
    model = load_trained_model(folder, options(folder))
    assert applied == [{"model": model, "cross_entropy": False, "fused_linear_cross_entropy": False}]
    load_trained_model(folder, options(folder, enabled=False))
    assert len(applied) == 1


def test_a_model_without_kernels_is_rejected(applied: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "gpt2")
    with pytest.raises(Invalid, match="no kernels for model_type 'gpt2'"):
        load_trained_model(folder, options(folder))
    assert not applied


def test_a_missing_package_is_named_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(MissingExtra, match=r"pip install 'replaybuf\[liger\]'"):
        liger_kernels(GPU)


def test_a_cpu_is_rejected_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="liger needs a CUDA GPU"):
        load_trained_model(tmp_path / "no-model", options(tmp_path))
