"""Model FLOPs utilisation: operations of a batch against a count by torch, and the peak of a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from replaybuf.wire.batch import Batch
from replaybuf_trainer.models.cost import model_cost
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.reading import TensorBatch
from replaybuf_trainer.report import flops
from replaybuf_trainer.report.figures import peak_memory_bytes, step_figures
from replaybuf_trainer.report.flops import peak_of, training_flops
from replaybuf_trainer.report.stopwatch import Phase
from tests.trainer.batches import packed, rollouts

CPU = torch.device("cpu")


def test_the_operations_are_those_that_torch_counts(models: Path) -> None:
    """For rollouts one by one, without padding. torch also counts what the causal mask hides."""
    model = load_model(models / "a")
    model.set_attn_implementation("eager")  # torch counts no attention of sdpa on the CPU
    cost = model_cost(model)
    batch = packed(rollouts(4, seed=0), [[0, 1], [], [2, 3]], pad_to_multiple_of=64)
    lengths = [len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts(4, seed=0)]
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
    seconds: dict[Phase, float] = {"wait": 3.0, "forward": 0.5, "backward": 0.5}
    figures = step_figures(batch, seconds, Ranks(), cost, needed, CPU)
    assert (figures["mfu"], figures["train_mfu"]) == (pytest.approx(0.25), pytest.approx(1.0))
    assert (figures["rollouts"], figures["samples_per_s"]) == (4, 1.0)
    twice = step_figures(batch, seconds, Ranks(), cost, needed, CPU, epochs=2)
    assert twice["mfu"] == pytest.approx(0.5) and twice["tokens"] == figures["tokens"]


def test_padding_is_counted_over_all_ranks(models: Path) -> None:
    """12 tokens and 4 of padding here; the other rank has as many of each."""

    class TwoRanks(Ranks):
        size = 2

        def gather(self, values: torch.Tensor) -> torch.Tensor:
            return torch.cat([values, values])

    batch = packed(rollouts(2, seed=3), [[0], [1]], pad_to_multiple_of=8)
    padding = sum(len(row["input_ids"]) for row in batch.micro_batches) - batch.meta.tokens
    assert padding > 0
    meta = msgspec.structs.replace(batch.meta, padding=padding, batch_tokens=2 * batch.meta.tokens)
    whole = TensorBatch(Batch(meta, batch.host.micro_batches), batch.micro_batches)
    figures = step_figures(whole, {"forward": 1.0}, TwoRanks(), model_cost(load_model(models / "a")), 1e9, CPU)
    assert figures["padding_share"] == pytest.approx(padding / (padding + batch.meta.tokens))


def test_peak_memory_holds_what_was_freed_since() -> None:
    """In a process of its own, on the CPU: 256 MiB that were written to and freed again."""
    script = (
        "import torch; from replaybuf_trainer.report.figures import peak_memory_bytes as peak;"
        "cpu = torch.device('cpu');"
        "before = peak(cpu); torch.ones(2**26); print(peak(cpu) - before)"
    )
    grown = int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
    assert 2**28 <= grown < 2**30


def test_peak_memory_of_a_gpu_is_that_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def peak(device: torch.device) -> int:
        calls.append(f"peak {device}")
        return 5

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(f"reset {device}"))
    assert peak_memory_bytes(torch.device("cuda:1")) == 5
    assert calls == ["peak cuda:1", "reset cuda:1"]


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
