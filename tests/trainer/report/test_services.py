"""Figures in the tools that people use: Prometheus, TensorBoard, Weights & Biases."""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboardX.proto import event_pb2

from replaybuf.errors import Invalid, MissingExtra
from replaybuf.wire.contract import Amount, WaitingAnswer
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.report.sinks.prometheus import BY_EPOCH, BY_STALENESS, GAUGES, Prometheus
from replaybuf_trainer.report.sinks.tensorboard import TensorBoard
from replaybuf_trainer.report.sinks.weights_and_biases import WeightsAndBiases
from tests.metric_push.receiver import Receiver

WAIT = WaitingAnswer(
    reason="too_few_groups", have=Amount(groups=3), need=Amount(groups=8), blocked_on="producers", retry_after_s=0.5
)
MEANS = {"loss_tokens": 40.0} | dict.fromkeys(BY_STALENESS, 0.5)
EPOCH = dict.fromkeys(BY_EPOCH, 0.5)
TIMEOUT_S = 60.0
PAGE = (
    (Path(__file__).parents[3] / "docs" / "reference-trainer.md")
    .read_text()
    .partition("All metrics start with")[2]
    .partition("\n## ")[0]
)


def figures(step: int, **fields: Any) -> dict[str, Any]:
    """Figures of a step of 2 s with 40 loss tokens."""
    filled: dict[str, Any] = {
        "time": 1e9 + step,
        "step": step,
        "version": step,
        "reward_mean": 0.25,
        "tokens": 100,
        "rollouts": 8,
        "skipped": False,
        "step_s": 2.0,
        "phase_s": {"wait": 0.5, "backward": 1.5},
        "wait_reasons": {"too_few_groups": 0.5},
        "by_staleness": {"0": MEANS},
    }
    return filled | MEANS | fields


# ---------------------------------------------------------------------- Prometheus


def test_metrics_are_pushed_without_a_port_and_at_the_end() -> None:
    """The last push has the last step; the job is the trainer and the instance has the name of the run."""
    with Receiver().up() as receiver:
        made = Prometheus("r", lambda: None, dict)
        made.push(f"http://{receiver.address}", 3600.0)
        made.write(figures(4, reward_mean=0.5))
        made.close()
    (push,) = receiver.came
    assert push.path.startswith("/metrics/job/replaybuf-trainer/instance/") and push.path.endswith("%3Ar")
    assert push.samples()["replaybuf_trainer_reward_mean,run=r"] == 0.5


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    """Metrics of the run r on a free port, of a trainer that waits for groups."""
    made = Prometheus("r", lambda: WAIT, lambda: {"TensorBoard": 3})
    yield made
    made.close()


def scraped(exporter: Prometheus) -> dict[str, float]:
    """Scrape the samples by name and labels, without prefix and run."""
    readings = {}
    text = httpx.get(f"http://127.0.0.1:{exporter.listen('127.0.0.1', 0)}/metrics", trust_env=False).text
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            assert labels.pop("run") == "r" and name.startswith("replaybuf_trainer_")
            values = ",".join(f"{label}={labels[label]}" for label in sorted(labels))
            readings[name.removeprefix("replaybuf_trainer_") + (f"{{{values}}}" if values else "")] = value
    return readings


def test_counters_add_up_and_gauges_have_the_newest_step(prometheus: Prometheus) -> None:
    for step in (4, 5):
        prometheus.write(figures(step, reward_mean=0.1 * step))
    values = scraped(prometheus)
    assert (values["step"], values["reward_mean"]) == (5, 0.5)
    assert (values["tokens_total"], values["samples_total"], values["loss_tokens_total"]) == (200, 16, 80)
    assert values["phase_seconds_total{phase=backward}"] == 3.0
    assert values["waiting_seconds_total{reason=too_few_groups}"] == 1.0
    assert (values["step_seconds_count"], values["step_seconds_sum"], values["step_seconds_bucket{le=1.0}"]) == (
        2,
        4,
        0,
    )
    assert values["waiting{reason=too_few_groups}"] == 1
    assert values["figures_lost_total{sink=TensorBoard}"] == 3


def test_statistics_have_the_label_staleness_which_is_bounded(prometheus: Prometheus) -> None:
    """Counters stay; the gauge of a staleness that the newest batch lacks goes away."""
    prometheus.write(figures(0, by_staleness={"0": MEANS, "8+": MEANS}))
    prometheus.write(figures(1, by_staleness={"8+": MEANS | {"ratio_mean": 1.5}}))
    values = scraped(prometheus)
    assert values["ratio_mean_by_staleness{staleness=8+}"] == 1.5
    assert "ratio_mean_by_staleness{staleness=0}" not in values
    assert values["loss_tokens_by_staleness_total{staleness=0}"] == 40
    assert values["loss_tokens_by_staleness_total{staleness=8+}"] == 80


def test_statistics_of_epochs_are_those_of_the_newest_batch(prometheus: Prometheus) -> None:
    """A batch whose epochs ended early has fewer, and none are left of a training with one epoch per batch."""
    prometheus.write(figures(0, by_epoch={"0": EPOCH, "1": EPOCH | {"loss": 0.25}}))
    assert scraped(prometheus)["loss_by_epoch{epoch=1}"] == 0.25
    prometheus.write(figures(1, by_epoch={"0": EPOCH | {"clip_fraction": 0.125}}))
    values = scraped(prometheus)
    assert values["clip_fraction_by_epoch{epoch=0}"] == 0.125 and "loss_by_epoch{epoch=1}" not in values
    prometheus.write(figures(2))
    assert not any("_by_epoch" in name for name in scraped(prometheus))


def test_the_page_describes_every_metric_with_its_labels(prometheus: Prometheus) -> None:
    """The table has exactly the metrics that a scrape has."""
    prometheus.write(dict.fromkeys(GAUGES, 0) | figures(0, by_epoch={"0": EPOCH}))
    described: dict[str, set[str]] = {}
    for names, labels in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]*)\|", PAGE, re.MULTILINE):
        described |= {name: set(re.findall(r"\w+", labels)) for name in re.findall(r"\w+", names)}
    tags: dict[str, set[str]] = {}
    for sample in scraped(prometheus):
        name, _, labels = re.sub(r"(?<=step_seconds)_(sum|count|bucket)", "", sample).partition("{")
        if not name.endswith("_created"):
            tags.setdefault(name, set()).update(set(re.findall(r"(\w+)=", labels)) - {"le"})
    assert described == tags


def test_a_taken_port_is_rejected_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Invalid, match=rf"cannot listen on 127.0.0.1:{port}: .*choose another --metrics-address"):
            Prometheus("r", lambda: None, dict).listen("127.0.0.1", port)


# ---------------------------------------------------------------------- TensorBoard


def events(folder: Path) -> list[Any]:
    """Read the event files of a folder: records of length, checksum, bytes, checksum."""
    lines = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            lines.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return lines


def test_an_event_file_has_the_scalars_of_each_step(tmp_path: Path) -> None:
    """On disk after each step. The first event makes TensorBoard ignore later steps of a killed process."""
    sink = TensorBoard(tmp_path / "tb")
    sink.write(figures(4))
    version, start, step = events(tmp_path / "tb")
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (4, event_pb2.SessionLog.START)
    scalars = {value.tag: value.simple_value for value in step.summary.value}
    assert (step.step, step.wall_time) == (4, 1e9 + 4)
    assert (scalars["reward_mean"], scalars["phase_s/backward"], scalars["by_staleness/0/kl"]) == (0.25, 1.5, 0.5)
    sink.close()


def test_a_folder_that_cannot_be_written_is_rejected_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Invalid, match=r"folder \S+/file/tb of --tensorboard cannot be written: Not a directory"):
        TensorBoard(tmp_path / "file" / "tb")


@pytest.mark.parametrize("module", ["tensorboardX.event_file_writer", "wandb"])
def test_a_missing_library_is_named_with_its_extra(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    extra = {"wandb": "wandb"}.get(module, "tensorboard")
    with pytest.raises(MissingExtra, match=rf"pip install 'replaybuf\[{extra}\]'"):
        if extra == "wandb":
            WeightsAndBiases("p", TrainOptions(run="r", model=tmp_path))
        else:
            TensorBoard(tmp_path)


# ---------------------------------------------------------------------- Weights & Biases

LOGGED = """
import sys
from pathlib import Path
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.report.sinks.weights_and_biases import WeightsAndBiases
secrets = {"token": "SECRET", "publish_token": "SECRET", "push_metrics": "http://me:SECRET@gateway"}
sink = WeightsAndBiases("project", TrainOptions(run="r", model=Path("m"), **secrets))
for step in range(2):
    sink.write({"step": step, "loss": 0.5, "phase_s": {"wait": 1.0}})
sink.close()
"""


def logged(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Log two steps in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-c", LOGGED],
        cwd=folder,
        env=clean | {"HOME": str(folder), "WANDB_DIR": str(folder)} | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_wandb_writes_the_figures_to_a_folder_when_it_is_offline(tmp_path: Path) -> None:
    """Without a network. The folder has both steps and the options, and no secret."""
    done = logged(tmp_path, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    (record,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    data = record.read_bytes()
    assert data.count(b"phase_s/wait") >= 2 and b"rows_per_forward" in data
    assert all(b"SECRET" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_wandb_without_a_key_is_rejected_with_the_way_out(tmp_path: Path) -> None:
    done = logged(tmp_path)
    assert done.returncode != 0
    assert "wandb does not start" in done.stderr and "WANDB_MODE=offline writes to a local folder" in done.stderr
