"""Seconds per step beside the framework's own loader of the same batches from memory: alternating runs, medians.

PYTHONPATH=. .venv-adapters/hf/bin/python adapters/hf/tests/step_time.py http://127.0.0.1:8900
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from lightning.pytorch import Trainer as LightningTrainer
from torch.utils.data import DataLoader, IterableDataset
from trainings import Policy, PolicyTrainer, as_arguments, fill, model_of
from transformers import Trainer

from replaybuf.client import Client
from replaybuf_hf import RunOptions, clipped_policy_loss, token_logprobs
from replaybuf_hf.lightning import ReplaybufCallback, ReplaybufDataModule
from replaybuf_trainer.reading import TensorBatch, TensorReader
from tests.conftest import RunClient

STEPS, ROUNDS = 12, 5


class FromMemory(IterableDataset[Any]):
    def __init__(self, batches: list[TensorBatch]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class OwnLoader(Trainer):
    """The same steps without a run; accelerate prepares the loader."""

    def get_train_dataloader(self) -> Any:
        loader = DataLoader(self.train_dataset, batch_size=None, collate_fn=lambda batch: {"batch": batch})
        return self.accelerator.prepare(loader)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        batch, total = inputs["batch"], torch.zeros(())
        for row in batch.micro_batches:
            total = total + super().training_step(model, row, batch.meta.batch_loss_tokens)
        return total

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **_: Any) -> torch.Tensor:
        return clipped_policy_loss(token_logprobs(model, inputs), inputs) / num_items_in_batch

    def floating_point_ops(self, inputs: Any) -> int:
        return 0


def make_run(url: str, name: str) -> RunClient:
    run = RunClient(url, name)
    fill(run, 2 * STEPS, max_steps=STEPS)
    return run


def batches_of(url: str) -> list[TensorBatch]:
    """Train a run without a model; return its batches."""
    run = make_run(url, f"memory-{time.time_ns()}")
    with Client(url, run.run) as client:
        attached = client.attach()
        with TensorReader(client, attached.epoch, attached.step) as reader:
            batches = []
            for batch in reader:
                batches.append(batch)
                reader.ack()
    return batches


def time_hf(url: str, batches: list[TensorBatch] | None) -> float:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"folder": folder, "arguments": {"max_steps": STEPS, "save_strategy": "no", "logging_steps": STEPS}}
        args, model = as_arguments(settings), model_of(settings)
        if batches is not None:
            args.accelerator_config.dispatch_batches = False
            trainer: Any = OwnLoader(model=model, args=args, train_dataset=FromMemory(batches))
        else:
            run = make_run(url, f"hf-{time.time_ns()}")
            trainer = PolicyTrainer(model=model, args=args, replaybuf=RunOptions(url=url, run=run.run))
        return float(trainer.train().metrics["train_runtime"]) / STEPS


def time_lightning(url: str, batches: list[TensorBatch] | None) -> float:
    with tempfile.TemporaryDirectory() as folder:
        module, shown = Policy({"folder": folder}), {"enable_progress_bar": False, "enable_model_summary": False}
        silent = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "devices": 1} | shown
        callbacks = [] if batches is not None else [ReplaybufCallback(lambda *_: None)]
        trainer = LightningTrainer(max_steps=STEPS, callbacks=callbacks, **silent)
        if batches is not None:
            arguments: dict[str, Any] = {"train_dataloaders": DataLoader(FromMemory(batches), batch_size=None)}
        else:
            options = RunOptions(url=url, run=make_run(url, f"lightning-{time.time_ns()}").run)
            arguments = {"datamodule": ReplaybufDataModule(options)}
        began_s = time.perf_counter()
        trainer.fit(module, **arguments)
        return (time.perf_counter() - began_s) / STEPS


def main(url: str) -> None:
    torch.set_num_threads(1)
    batches = batches_of(url)
    for name, measure in (("Trainer", time_hf), ("Lightning", time_lightning)):
        measure(url, batches)  # warm up
        pairs = [(measure(url, None), measure(url, batches)) for _ in range(ROUNDS)]
        ours, own = ([1000 * pair[side] for pair in pairs] for side in (0, 1))
        ratio = statistics.median(run_ms / loader_ms for run_ms, loader_ms in pairs)
        print(
            f"{name}: run {statistics.median(ours):.1f} ms ({min(ours):.1f} to {max(ours):.1f}), own loader "
            f"{statistics.median(own):.1f} ms ({min(own):.1f} to {max(own):.1f}), median ratio {ratio:.2f}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main(sys.argv[1])
