"""Model FLOPs utilisation: operations of a batch against a count by torch, and the peak of a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from replaybuf_trainer.models.cost import model_cost
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.report import flops
from replaybuf_trainer.report.figures import step_figures
from replaybuf_trainer.report.flops import peak_of, training_flops
from tests.trainer.batches import packed, rollouts

CPU = torch.device("cpu")


def test_the_operations_are_those_that_torch_counts(models: Path) -> None:
    """For rollouts one by one, without padding. torch also counts what the causal mask hides."""
    model = load_model(models / "a")
    model.set_attn_implementation("eager")  # torch counts no attention of sdpa on the CPU
    cost = model_cost(model)
    batch = packed(rollouts(4, seed=0), [[0, 1], [], [2, 3]], pad_to_multiple_of=64)
    lengths = [len(one.prompt_ids) + len(one.completion_ids) for one in rollouts(4, seed=0)]
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            model(input_ids=torch.ones(1, length, dtype=torch.int64), use_cache=False).logits.sum().backward()
    hidden = 3 * sum(cost.quadratic * length**2 for length in lengths)
    assert training_flops(batch.host.micro_batches, cost) + hidden == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_utilisation_is_operations_by_time_and_peak(models: Path) -> None:
    """`mfu` counts the whole step, `train_mfu` only forward, backward and optimizer."""
    cost = model_cost(load_model(models / "a"))
    batch = packed(rollouts(4, seed=0), [[0, 1], [2, 3]])
    needed = training_flops(batch.host.micro_batches, cost)
    figures = step_figures(batch, {"wait": 3.0, "forward": 0.5, "backward": 0.5}, Ranks(), cost, needed)
    assert (figures["mfu"], figures["train_mfu"]) == (pytest.approx(0.25), pytest.approx(1.0))
    assert (figures["rollouts"], figures["samples_per_s"]) == (4, 1.0)


def test_without_a_known_device_the_peak_is_measured() -> None:
    peak = peak_of(CPU, torch.float32)
    assert peak.source == "measured" and peak.flops_per_s > 1e8


@pytest.mark.parametrize(
    ("name", "flops_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(name: str, flops_per_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """For half precision only: the table has no other types."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(flops, "measured_flops_per_s", lambda *_: 1.0)
    assert peak_of(torch.device("cuda"), torch.bfloat16) == (flops_per_s, "datasheet")
    assert peak_of(torch.device("cuda"), torch.float32) == (1.0, "measured")
