"""A published version keeps its weights: a training that resumes between two publications gives engines no others."""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from replaybuf.client import Client
from replaybuf_trainer.feeds.service import ServiceFeed
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.publishers.folder import FolderPublisher
from replaybuf_trainer.trainer import Trainer
from tests.conftest import RunClient
from tests.trainer.scripted import STEPS, fill_numbers
from tests.trainer.served import ServedEngine, oracle
from tests.waiting import eventually

BETWEEN = 3
"""Steps done between the publications of versions 1 and 2."""
LATER = 8
TIMEOUT_S = 60.0
PROMPT = [70, 88, 33]


@pytest.fixture
def filled(run: RunClient) -> RunClient:
    """A run that publishes after every second step."""
    run.put(
        batch={"groups_per_batch": 1, "seq_len": 64},
        strategy={"name": "one-step-off-policy", "options": {"max_staleness": 100}},
        max_steps=STEPS,
        steps_per_publish=2,
    )
    fill_numbers(run, range(BETWEEN))
    return run


def options(
    run: RunClient, folder: Path, models: Path, steps: int, engine: ServedEngine | None, **fields: Any
) -> TrainOptions:
    """Options of a training until `steps` are done."""
    return TrainOptions(
        url=str(run.http.base_url),
        run=run.run,
        model=models / "a",
        engines=(engine.url,) if engine else (),
        checkpoint_dir=folder / "checkpoints",
        weights_dir=folder / "weights",
        metrics_file=folder / "train.jsonl",
        steps=steps,
        service_timeout_s=30.0,
        **fields,
    )


def train(
    run: RunClient, folder: Path, models: Path, steps: int, engine: ServedEngine | None = None, **fields: Any
) -> None:
    """Train until `steps` are done, from the newest checkpoint on; save the last one."""
    made = options(run, folder, models, steps, engine, **fields)
    with Client(made.url, made.run) as client:
        assert Trainer(made, ServiceFeed(made, client)).train() == steps


def digests(folder: Path) -> dict[str, str]:
    """Digest of the weights of each published version."""
    files = folder.glob("weights/v*/model.safetensors")
    return {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_the_weights_of_a_published_version_do_not_change(filled: RunClient, tmp_path: Path, models: Path) -> None:
    """The checkpoint of step 3 has other weights than version 1, which was published after step 2."""
    train(filled, tmp_path, models, BETWEEN)
    before = digests(tmp_path)
    assert sorted(before) == ["v000000", "v000001"]
    fill_numbers(filled, range(BETWEEN, STEPS))
    train(filled, tmp_path, models, STEPS)
    after = digests(tmp_path)
    assert sorted(after) == ["v000000", "v000001", "v000002"]
    assert {name: after[name] for name in before} == before
    assert filled.state()["published_version"] == 2


def test_a_restarted_engine_gets_the_published_weights(
    filled: RunClient, engine: ServedEngine, tmp_path: Path, models: Path
) -> None:
    train(filled, tmp_path, models, BETWEEN, engine)
    engine.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(models / "a")}})
    engine.post("/update_weight_version", {"new_version": "0"})
    made = options(filled, tmp_path, models, STEPS, engine)
    with Client(made.url, made.run) as client, ThreadPoolExecutor(1) as pool:
        trainer = Trainer(made, ServiceFeed(made, client))
        trained = pool.submit(trainer.train)
        try:
            eventually(lambda: engine.version() == "1", TIMEOUT_S)
            choice = engine.complete(PROMPT, max_tokens=8)[0]
        finally:
            trainer.stop()
        assert trained.result() == BETWEEN
    expected = oracle(load_model(tmp_path / "weights" / "v000001"), PROMPT, choice["token_ids"])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_without_the_published_weights_nothing_is_published_before_the_next_version(
    filled: RunClient, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a publisher that keeps no folder."""
    train(filled, tmp_path, models, BETWEEN)
    prepared: list[int] = []
    prepare = FolderPublisher.prepare

    def counted(publisher: FolderPublisher, version: int, weights: object) -> None:
        prepared.append(version)
        prepare(publisher, version, weights)  # type: ignore[arg-type]

    monkeypatch.setattr(FolderPublisher, "prepare", counted)
    (tmp_path / "weights").rename(tmp_path / "gone")
    fill_numbers(filled, range(BETWEEN, STEPS))
    train(filled, tmp_path, models, STEPS)
    assert prepared == [2]
    assert "the weights of version 1 are not here any more" in caplog.text


PORTS: dict[str, dict[str, Any]] = {"folder": {}, "http": {"port": 0}}


@pytest.mark.parametrize("publisher", PORTS)
def test_the_version_that_a_checkpoint_needs_outlives_the_newest_three(
    run: RunClient, tmp_path: Path, models: Path, caplog: pytest.LogCaptureFixture, publisher: str
) -> None:
    """Three versions follow the checkpoint of step 3; a trainer that resumes there has version 1 again."""
    run.put(
        batch={"groups_per_batch": 1, "seq_len": 64},
        strategy={"name": "one-step-off-policy", "options": {"max_staleness": 100}},
        max_steps=LATER,
        steps_per_publish=2,
    )
    fill_numbers(run, range(LATER))
    how: dict[str, Any] = {"publisher": publisher, "publisher_options": PORTS[publisher]}
    train(run, tmp_path, models, BETWEEN, **how)
    before = digests(tmp_path)
    train(run, tmp_path, models, LATER, **how, checkpoint_every_steps=100)
    assert sorted(digests(tmp_path)) == ["v000001", "v000002", "v000003", "v000004"]
    shutil.rmtree(tmp_path / "checkpoints" / f"step-{LATER:06d}")  # as if the trainer had died before it was whole
    train(run, tmp_path, models, LATER, **how, checkpoint_every_steps=100)
    assert "are not here any more" not in caplog.text
    assert digests(tmp_path)["v000001"] == before["v000001"]
