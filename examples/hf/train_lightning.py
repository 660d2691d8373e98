"""Train with Lightning on the groups of `replaybuf generate`; start it again and it resumes.

python examples/hf/train_lightning.py --model models/policy --devices 2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from replaybuf import Client
from replaybuf_hf import RunOptions, clipped_policy_loss, token_logprobs
from replaybuf_hf.lightning import ReplaybufCallback, ReplaybufDataModule, backward


class Policy(LightningModule):
    """A causal language model; each training step is one batch of the run."""

    def __init__(self, model: str, learning_rate: float) -> None:
        super().__init__()
        self.automatic_optimization = False  # a step has several micro-batches
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype="float32").train()
        self.learning_rate = learning_rate

    def row_loss(self, row: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of one packed row, summed over its loss tokens."""
        return clipped_policy_loss(token_logprobs(self.model, row), row)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Take one optimizer step."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = backward(self, batch, self.row_loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        self.log("loss", loss, prog_bar=True, on_epoch=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main() -> None:
    """Create the run, unless it exists, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8900")
    parser.add_argument("--run", default="lightning")
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", default="lightning-out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    with Client(options.url, options.run) as client:
        client.put_run({"batch": {"groups_per_batch": 16, "seq_len": 2048}, "max_steps": options.steps}, if_absent=True)
    folder = Path(options.output).resolve()

    def publish(trainer: Trainer, module: Policy, version: int) -> str:
        weights = folder / "weights" / str(version)
        if trainer.is_global_zero:  # your engines load it from weights_uri; FSDP needs all ranks here
            module.model.save_pretrained(weights)
            AutoTokenizer.from_pretrained(options.model).save_pretrained(weights)
        return weights.as_uri()

    saves = ModelCheckpoint(folder, every_n_train_steps=options.save_steps, save_top_k=2, monitor="step", mode="max")
    trainer = Trainer(
        max_steps=options.steps,
        accelerator="cpu" if options.cpu else "auto",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        callbacks=[saves, ReplaybufCallback(publish)],
        logger=False,
    )
    written = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    trainer.fit(
        Policy(options.model, options.learning_rate),
        datamodule=ReplaybufDataModule(RunOptions(url=options.url, run=options.run)),
        ckpt_path=str(written[-1]) if written else None,
    )


if __name__ == "__main__":
    main()
