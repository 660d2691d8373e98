"""Trainings by both frameworks, in processes that a test may kill: two gloo ranks on a CPU."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import Trainer, TrainingArguments

from replaybuf_hf import ReplaybufTrainerMixin, RunOptions, clipped_policy_loss, newest_checkpoint, token_logprobs
from replaybuf_hf.lightning import ReplaybufCallback, ReplaybufDataModule, backward
from replaybuf_trainer.models.tiny import new_model
from tests.conftest import RunClient
from tests.ports import free_port
from tests.trainer.scripted import fill_numbers
from tests.waiting import patience

STEPS = 6
LINES = "lines.jsonl"
TIMEOUT_S = 120.0
Settings = dict[str, Any]
"""`folder`, `options` of the run, `arguments` of the framework's trainer, `resume`, `dropout`, `ranks`, and faults."""

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["replaybuf_hf.lightning", "replaybuf_trainer.models.tiny"])


def fill(run: RunClient, groups: int = 2 * STEPS, **config: Any) -> None:
    """Create a run of `STEPS` steps of two groups, packed into several rows per rank, and store groups."""
    filled = {
        "batch": {"groups_per_batch": 2, "seq_len": 40},
        "strategy": {"name": "one-step-off-policy", "options": {"max_staleness": 100}},
        "max_steps": STEPS,
    }
    response = run.put(**filled | config)
    assert response.status_code == 201, response.text
    fill_numbers(run, range(groups))


class Training:
    """One start of a training: its ranks as processes. `errors` has what they raised, after `wait`."""

    def __init__(self, train: Callable[[Settings], None], settings: Settings) -> None:
        self.folder = Path(settings["folder"])
        self.folder.mkdir(exist_ok=True)
        for stale in self.folder.glob("error-*"):  # a rank that was killed second
            stale.unlink()
        ranks, port = settings.get("ranks", 2), free_port()
        self.processes = [
            processes.Process(target=run_rank, args=(train, settings, rank, ranks, port)) for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def wait(self) -> dict[int, str]:
        """Wait for the ranks; return the error of each that failed. If one failed, the others are killed."""
        for process in self.processes:
            process.join(TIMEOUT_S * patience())
        assert not self.kill(), "the training did not end"
        errors = {}
        for rank, process in enumerate(self.processes):
            path = self.folder / f"error-{rank}"
            if path.exists() or process.exitcode:
                errors[rank] = path.read_text() if path.exists() else f"exit code {process.exitcode}"
        return errors

    def kill(self, first: int = 0) -> bool:
        """Kill all ranks with SIGKILL, `first` before the others; return whether any was alive."""
        alive = any(process.is_alive() for process in self.processes)
        for process in [self.processes[first], *self.processes]:
            process.kill()
            process.join()
        return alive


def run_rank(train: Callable[[Settings], None], settings: Settings, rank: int, ranks: int, port: int) -> None:
    """Train as one rank, as torchrun starts it; write an error to a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "GROUP_RANK": "0"}
    if ranks == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
            del os.environ[name]
    faulthandler.enable()
    torch.set_num_threads(1)
    try:
        train(settings)
    except Exception as error:
        (Path(settings["folder"]) / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        raise SystemExit(1) from error


def curve(folder: Path) -> dict[int, dict[str, float]]:
    """The figures of each step, from its last line."""
    lines = [json.loads(line) for line in (folder / LINES).read_text().splitlines()]
    return {line["step"]: line for line in lines}


def write_line(folder: Path, line: dict[str, Any]) -> None:
    """Append the figures of a step in one write."""
    with (folder / LINES).open("a") as out:
        out.write(json.dumps(line) + "\n")


def write_version(folder: Path, version: int, model: torch.nn.Module) -> None:
    """Append a version that is published, and a digest of its weights."""
    tensors = [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]
    with (folder / "published.jsonl").open("a") as out:
        out.write(json.dumps([version, hashlib.sha256(b"".join(tensors)).hexdigest()]) + "\n")


def published(folder: Path) -> list[tuple[int, str]]:
    """The versions that were published, in order, with the digest of their weights."""
    return [tuple(json.loads(line)) for line in (folder / "published.jsonl").read_text().splitlines()]


def model_of(settings: Settings) -> Any:
    model = new_model(0)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = settings.get("dropout", 0.0)
    return model


# ---------------------------------------------------------------------- transformers


class Silent(ReplaybufTrainerMixin, Trainer):
    """Publishes nothing. Writes the figures of each step."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)
        if "loss" in logs and self.is_world_process_zero():
            figures = {name: logs[name] for name in ("loss", "grad_norm", "learning_rate", "reward", "epoch")}
            write_line(Path(self.args.output_dir), {"step": self.state.global_step, **figures})


class PolicyTrainer(Silent):
    def publish_weights(self, version: int) -> str | None:
        if self.is_world_process_zero():
            write_version(Path(self.args.output_dir), version, self.accelerator.unwrap_model(self.model))
        return None


class Evaluated(PolicyTrainer):
    """Writes down the losses of evaluations, and those of the model itself."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        with torch.no_grad():
            own = [self.model(**{name: ids[None] for name, ids in row.items()}).loss for row in self.eval_dataset]
        line = {"step": self.state.global_step, "loss": metrics["eval_loss"], "own": float(sum(own)) / len(own)}
        with Path(self.args.output_dir, "evaluations.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")
        return metrics


class Prepared(PolicyTrainer):
    """Gives the loader to accelerate."""

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(super().get_train_dataloader())


class Interrupted(PolicyTrainer):
    """Dies in the save of a checkpoint, after it wrote the model."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        raise InterruptedError


class Paired(PolicyTrainer):
    """Has two ranks for each part of a batch, as tensor parallelism on GPUs has."""

    def get_tp_size(self) -> int:
        return 2


def as_arguments(settings: Settings) -> TrainingArguments:
    """Return the arguments of a training on a CPU."""
    arguments = {"max_steps": STEPS, "save_total_limit": 2, "learning_rate": 1e-3, "logging_steps": 1}
    arguments["save_steps"] = settings.get("save_every", 2)
    arguments |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True} | settings.get("arguments", {})
    return TrainingArguments(settings["folder"], **arguments)


def train_hf(settings: Settings) -> None:
    """Train with the Trainer of transformers."""
    model, folder, args = model_of(settings), Path(settings["folder"]), as_arguments(settings)
    kind = globals()[settings.get("kind", "PolicyTrainer")]
    run = RunOptions(**settings["options"])
    trainer = kind(model=model, args=args, replaybuf=run, eval_dataset=settings.get("eval_dataset"))
    resume = settings.get("resume", "last")
    trainer.train(resume_from_checkpoint=newest_checkpoint(folder) if resume == "last" else resume)
    if trainer.is_world_process_zero():
        torch.save(model.state_dict(), folder / "weights.pt")


# ---------------------------------------------------------------------- Lightning


class Policy(LightningModule):
    """A policy whose training step loops over micro-batches."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.automatic_optimization = settings.get("automatic", False)
        self.model = model_of(settings)
        self.folder, self.twice = Path(settings["folder"]), settings.get("twice", False)

    def row_loss(self, row: Any) -> torch.Tensor:
        return clipped_policy_loss(token_logprobs(self.model, row), row)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        loss = backward(self, batch, self.row_loss)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        for _ in range(1 + self.twice):
            optimizer.step()
        scheduler.step()
        everywhere = float(self.trainer.strategy.reduce(loss, reduce_op="mean"))
        self.log("loss", everywhere)
        if self.trainer.is_global_zero:
            rate = scheduler.get_last_lr()[0]
            write_line(
                self.folder, {"step": batch.meta.step + 1, "loss": everywhere, "grad_norm": float(norm), "rate": rate}
            )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)]


def publish(trainer: LightningTrainer, module: LightningModule, version: int) -> None:
    """Write down what is published."""
    if trainer.is_global_zero:
        write_version(Path(module.folder), version, module.model)


def last_file(folder: Path) -> str | None:
    """Return the newest checkpoint of Lightning, which are complete: it renames them into place."""
    checkpoints = {int(path.stem.rpartition("=")[2]): path for path in folder.glob("*.ckpt")}
    return str(checkpoints[max(checkpoints)]) if checkpoints else None


def train_lightning(settings: Settings) -> None:
    """Train with Lightning."""
    folder, module = Path(settings["folder"]), Policy(settings)
    every = settings.get("save_every", 2)
    saves = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=every, save_top_k=2, monitor="step", mode="max"
    )
    callbacks: list[Callback] = [saves]
    if not settings.get("without_callback"):
        callbacks.append(ReplaybufCallback(None if settings.get("silent") else publish))
    ranks = settings.get("ranks", 2)
    arguments = {"max_steps": STEPS, "strategy": "ddp" if ranks > 1 else "auto", "devices": ranks}
    trainer = LightningTrainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **arguments | settings.get("arguments", {}),
    )
    resume = settings.get("resume", "last")
    module_of_run = ReplaybufDataModule(RunOptions(**settings["options"]))
    trainer.fit(module, datamodule=module_of_run, ckpt_path=last_file(folder) if resume == "last" else resume)
    if trainer.is_global_zero:
        torch.save(module.model.state_dict(), folder / "weights.pt")
