"""Two trainers in one folder: one that another fenced deletes and replaces nothing of its successor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from trainings import Policy, PolicyTrainer, Settings, as_arguments, fill, model_of

from replaybuf.client import Client
from replaybuf.errors import Fenced
from replaybuf_hf import RunOptions, newest_checkpoint
from replaybuf_hf.lightning import ReplaybufCallback, ReplaybufDataModule
from tests.conftest import RunClient

STEP = 4
"""Step whose checkpoint the fenced trainer writes."""


class Successor:
    """Takes the run at a moment of the old trainer; `files` are what is in the folder then, its own among them."""

    def __init__(self, run: RunClient, folder: Path, moment: str, names: list[str]) -> None:
        self._run = run
        self._folder = folder
        self._moment = moment
        self._names = names
        self.files: dict[Path, bytes] = {}

    def at(self, moment: str, step: int) -> None:
        """Attach, and write checkpoints, if this is the moment."""
        if (moment, step) != (self._moment, STEP):
            return
        with Client(str(self._run.http.base_url), self._run.run) as client:
            client.attach()
        for name in self._names:
            path = self._folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"of the successor")
            self.files[path] = path.read_bytes()

    def check(self) -> None:
        """Check that the files are as the successor wrote them."""
        assert self.files and {path: path.read_bytes() for path in self.files if path.exists()} == self.files


def settings_of(run: RunClient, folder: Path) -> Settings:
    return {"folder": str(folder), "options": {"url": str(run.http.base_url), "run": run.run}, "ranks": 1}


@pytest.mark.parametrize("moment", ["before the save", "during the save"])
def test_a_fenced_trainer_of_transformers_leaves_the_checkpoints(run: RunClient, tmp_path: Path, moment: str) -> None:
    """Neither its own save nor its limit of checkpoints touches them, and nothing half-written becomes complete."""
    fill(run)
    names = [
        f"checkpoint-{step}/model.safetensors" for step in (1, 3, *([STEP] if moment == "before the save" else []))
    ]
    successor = Successor(run, tmp_path, moment, names)

    class Overtaken(PolicyTrainer):
        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log(logs, *args, **kwargs)
            successor.at("before the save", self.state.global_step)

        def _save_scaler(self, output_dir: str) -> None:
            super()._save_scaler(output_dir)
            successor.at("during the save", self.state.global_step)

    settings = settings_of(run, tmp_path)
    trainer = Overtaken(
        model=model_of(settings), args=as_arguments(settings), replaybuf=RunOptions(**settings["options"])
    )
    with pytest.raises(Fenced):
        trainer.train()
    successor.check()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("moment", ["before the save", "during the save"])
def test_a_fenced_trainer_of_lightning_leaves_the_checkpoints(
    run: RunClient, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(run)
    names = ["step=1.ckpt", *([f"step={STEP}.ckpt"] if moment == "before the save" else [])]
    successor = Successor(run, tmp_path, moment, names)

    class Moments(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            successor.at("before the save", trainer.global_step)

        def on_save_checkpoint(self, trainer: Any, *args: Any) -> None:
            successor.at("during the save", trainer.global_step)

    settings = settings_of(run, tmp_path)
    saves = ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=3, monitor="step", mode="max"
    )
    publish: Callable[..., None] = lambda *_: None  # noqa: E731
    trainer = LightningTrainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ReplaybufCallback(publish), Moments(), saves],
        max_steps=STEP + 1,
    )
    with pytest.raises(Fenced):
        trainer.fit(Policy(settings), datamodule=ReplaybufDataModule(RunOptions(**settings["options"])))
    successor.check()
