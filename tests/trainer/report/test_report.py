"""The report of a whole training: all sinks and tables at once, beside the same weights as without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow.parquet as pq
import pytest
import torch

from replaybuf.client.client import Client
from replaybuf.errors import Invalid
from replaybuf.option_types import ListenAddress
from replaybuf_trainer.feeds.service import ServiceFeed
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.option_groups import ReaderOptions, TablesOptions
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.report.sinks.json_lines import JsonLines
from replaybuf_trainer.trainer import Trainer
from tests.metric_push.receiver import Receiver
from tests.trainer.scripted import STEPS, ScriptedService


def trained(folder: Path, model: Path, **fields: Any) -> ScriptedService:
    """Train the scripted batches with folders below `folder`; return the service."""
    filled: dict[str, Any] = {
        "run": "r",
        "model": model,
        "checkpoint_dir": folder / "checkpoints",
        "weights_dir": folder / "weights",
        "metrics_file": folder / "train.jsonl",
        "reader_options": ReaderOptions(poll_s=0.01, prefetch=False),
        "service_timeout_s": 5.0,
    }
    options = TrainOptions(**filled | fields)
    service = ScriptedService(options.checkpoint_dir)
    assert Trainer(options, ServiceFeed(options, cast(Client, service))).train() == STEPS
    return service


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters of the last checkpoint."""
    trained: dict[str, torch.Tensor] = load_model(folder / "checkpoints" / f"step-{STEPS:06d}" / "model").state_dict()
    return trained


def test_all_sinks_and_tables_work_beside_a_training_and_do_not_change_it(
    tmp_path: Path, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "plain", models / "a")
    full = tmp_path / "full"
    with caplog.at_level("INFO"), Receiver().up() as receiver:
        trained(
            full,
            models / "a",
            metrics_address=ListenAddress("127.0.0.1", 0),
            push_metrics=f"http://{receiver.address}",
            tensorboard=full / "tb",
            tables=2,
            tables_options=TablesOptions(dir=str(full / "tables"), keep=3),
        )
    plain, watched = weights(tmp_path / "plain"), weights(full)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    lines = [msgspec.json.decode(line) for line in (full / "train.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert all(0 < line["mfu"] <= line["train_mfu"] for line in lines)
    assert len(list((full / "tb").iterdir())) == 1
    assert sorted(path.name for path in (full / "tables").iterdir()) == [
        f"step-{step:06d}" for step in range(STEPS - 3, STEPS)
    ]
    rows = pq.read_table(full / "tables" / f"step-{STEPS - 1:06d}" / "samples.parquet").to_pylist()
    assert len(rows) == 2 and all(row["ratio"] for row in rows)
    assert receiver.came[-1].samples()["replaybuf_trainer_step,run=r"] == STEPS - 1
    assert "metrics on http://127.0.0.1:" in caplog.text and f"summary steps={STEPS} " in caplog.text
    assert "lost" not in caplog.text


def test_a_full_disk_under_the_metrics_does_not_end_the_training(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonLines, "write", full)
    trained(tmp_path, models / "a")
    assert caplog.text.count("metrics file fails (OSError: [Errno 28] No space left on device)") == 1
    assert f"metrics file lost {STEPS} steps" in caplog.text


def test_a_sink_that_cannot_work_ends_the_trainer_before_it_attaches(tmp_path: Path, models: Path) -> None:
    (tmp_path / "file").touch()
    service = ScriptedService(tmp_path / "checkpoints")
    options = TrainOptions(run="r", model=models / "a", tensorboard=tmp_path / "file", checkpoint_dir=tmp_path / "c")
    with pytest.raises(Invalid, match="of --tensorboard cannot be written"):
        Trainer(options, ServiceFeed(options, cast(Client, service))).train()
    assert service.events == []
