"""A run with LoRA adapters on a real service: own steps and versions, changes of the run, checkpoints."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from replaybuf.client.client import Client
from replaybuf.errors import Invalid
from replaybuf.wire.group import group_to_json
from replaybuf_trainer import publications
from replaybuf_trainer.feeds.service import ServiceFeed
from replaybuf_trainer.option_groups import AdapterOptions, ReaderOptions
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.publishers.folder import FolderPublisher
from replaybuf_trainer.trainer import Trainer
from tests.conftest import RunClient
from tests.trainer.batches import group_of, rollouts
from tests.trainer.served import ServedEngine
from tests.waiting import eventually

ADAPTERS = {"code": 1, "math": 3}
"""Groups of the own batch of each adapter."""
STEPS = 6
TIMEOUT_S = 60.0


def fill(run: RunClient, adapters: dict[str, int], groups: int) -> None:
    """Create a run whose batches hold about two groups, and store groups of each adapter, drawn from their number."""
    run.put(
        batch={"tokens_per_batch": 44, "seq_len": 22},
        strategy={"name": "one-step-off-policy", "options": {"max_staleness": 100}},
        adapters={name: {"groups_per_batch": size} for name, size in adapters.items()},
        max_steps=STEPS,
    )
    for name in adapters:
        append(run, name, groups)


def append(run: RunClient, adapter: str, groups: int) -> None:
    for number in range(groups):
        members = rollouts(2, seed=number + 100 * len(adapter), longest=9)
        named: dict[str, Any] = {"group_id": f"{adapter}-{number}", "prompt_id": f"p{number}", "adapter": adapter}
        (result,) = run.append(msgspec.to_builtins(group_to_json(group_of(members, **named))))
        assert result["status"] == "stored", result


def options(run: RunClient, folder: Path, model: Path, **fields: Any) -> TrainOptions:
    filled: dict[str, Any] = {
        "url": str(run.http.base_url),
        "run": run.run,
        "model": model,
        "checkpoint_dir": folder / "checkpoints",
        "weights_dir": folder / "weights",
        "metrics_file": folder / "train.jsonl",
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "warm_up_steps": 2,
        "reader_options": ReaderOptions(wait_ms=200),
    }
    return TrainOptions(**filled | fields)


def train(made: TrainOptions) -> int:
    with Client(made.url, made.run) as client:
        return Trainer(made, ServiceFeed(made, client)).train()


def adapters_of(folder: Path, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """The adapters of a checkpoint."""
    root = folder / "checkpoints" / f"step-{step:06d}" / "adapters"
    return {path.name: load_file(path / "adapter_model.safetensors") for path in root.iterdir()}


def same(first: dict[str, Any], other: dict[str, Any]) -> bool:
    return first.keys() == other.keys() and all(
        same(value, other[name]) if isinstance(value, dict) else torch.equal(value, other[name])
        for name, value in first.items()
    )


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and norm of each step, from its last line in the metrics file."""
    lines = (msgspec.json.decode(line) for line in (folder / "train.jsonl").read_bytes().splitlines())
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


def test_own_steps_span_batches_and_survive_a_checkpoint_between_them(
    run: RunClient, connect: Callable[[str, str], RunClient], tmp_path: Path, models: Path
) -> None:
    """Digit for digit: curve, weights, and the versions that are announced; each adapter has its own."""
    url = str(run.http.base_url)
    folders = tmp_path / "whole", tmp_path / "parts"
    for folder, client in zip(folders, (run, connect(url, f"{run.run}-parts")), strict=True):
        folder.mkdir()
        fill(client, ADAPTERS, 12)
        made = [options(client, folder, models / "a")]
        if folder == folders[1]:
            made = [options(client, folder, models / "a", steps=step) for step in range(1, STEPS)] + made
        assert [train(part) for part in made][-1] == STEPS
        records = [client.get(f"batches/{step}/record").json() for step in range(STEPS)]
        shares = {name: [record["adapters"].get(name, {}).get("completed") for record in records] for name in ADAPTERS}
        assert False in shares["math"] and True in shares["math"], "some batch ends within an own step"
        policies = [line for line in client.get("ledger", limit=1000).json()["records"] if line["type"] == "POLICY"]
        for name in ADAPTERS:
            done = shares[name].count(True)
            assert [line["version"] for line in policies if line["adapter"] == name] == list(range(1, done + 1))
            assert (folder / "weights" / name / f"v{done:06d}" / "adapter_config.json").is_file()
    assert curve(folders[0]) == curve(folders[1])
    in_parts, expected = (adapters_of(folder, STEPS) for folder in folders)
    assert in_parts.keys() == ADAPTERS.keys() and same(in_parts, expected)


def test_a_run_without_adapters_publishes_merged_weights(run: RunClient, tmp_path: Path, models: Path) -> None:
    """A resumed trainer continues with the same weights, digit for digit; the frozen weights stay."""
    run.put(batch={"groups_per_batch": 1, "seq_len": 64}, strategy={"options": {"max_staleness": 100}}, max_steps=4)
    append(run, "", 4)
    assert [train(options(run, tmp_path, models / "a", steps=step)) for step in (2, 4)] == [2, 4]
    base, first, last = (
        load_file(folder / "model.safetensors")
        for folder in (models / "a", *(tmp_path / "weights" / f"v{version:06d}" for version in (2, 4)))
    )
    assert base.keys() == first.keys() == last.keys()
    changed = {name for name in base if not torch.equal(base[name], last[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    assert any(not torch.equal(first[name], last[name]) for name in changed)


def test_an_adapter_is_added_and_another_removed_while_the_trainer_waits(
    run: RunClient, engine: ServedEngine, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No batch comes before the new adapter is served, so the trainer cannot wait for one."""
    monkeypatch.setattr(publications, "FOLLOW_EVERY_S", 0.02)
    fill(run, ADAPTERS, 1)
    made = options(run, tmp_path, models / "a", engines=(engine.url,), steps=2)

    def names() -> list[str]:
        return [card["id"] for card in engine.http.get("/v1/models").json()["data"]]

    def change() -> None:
        eventually(lambda: names() == ["policy", "code", "math"], TIMEOUT_S)
        eventually(lambda: run.state()["step"] == 1, TIMEOUT_S)
        change = {"code": None, "poem.v1": {"groups_per_batch": 1}}
        assert run.http.patch(run.path, json={"adapters": change}).status_code == 200
        eventually(lambda: names() == ["policy", "math", "poem.v1"], TIMEOUT_S)
        append(run, "poem.v1", 1)

    with Client(made.url, made.run) as client:
        trainer = Trainer(made, ServiceFeed(made, client))
        changer = threading.Thread(target=change)
        changer.start()
        assert trainer.train() == 2
        changer.join(TIMEOUT_S)
    assert run.state()["adapters"]["poem.v1"]["published_version"] == 1
    assert engine.http.get("/weight_info", params={"model": "poem.v1"}).json() == {"weight_version": "1"}
    assert adapters_of(tmp_path, 2).keys() == {"code", "poem.v1"}, "those that have trained"


def test_a_checkpoint_of_other_adapters_or_another_model_is_rejected_before_the_trainer_attaches(
    run: RunClient, tmp_path: Path, models: Path
) -> None:
    """A model folder that only moved is the same model."""
    fill(run, ADAPTERS, 3)
    assert train(options(run, tmp_path, models / "a", steps=1)) == 1
    epoch = run.state()["epoch"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"lora_rank": 8}, r"adapters with rank 4; this trainer has 8"),
        ({"lora_options": AdapterOptions(targets=("q_proj",))}, r"adapters with targets all; .* has \['q_proj'\]"),
        ({"lora_rank": None}, "LoRA adapters of rank 4; --lora-rank is not given"),
        ({"model": models / "b"}, r"adapters of the model .*/a; --model .*/b has other weights"),
    ]
    for fields, message in cases:
        with pytest.raises(Invalid, match=rf"step-000001 has {message}; use another --checkpoint-dir"):
            train(options(run, tmp_path, **({"model": models / "a"} | fields)))
    assert run.state()["epoch"] == epoch
    shutil.copytree(models / "a", tmp_path / "moved")
    assert train(options(run, tmp_path, tmp_path / "moved", steps=2)) == 2


def test_a_publisher_that_takes_no_adapters_is_rejected(
    run: RunClient, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderPublisher, "takes_adapters", False)
    fill(run, ADAPTERS, 1)
    with pytest.raises(Invalid, match=r"FolderPublisher publishes no adapters, and the run has \['code', 'math'\]"):
        train(options(run, tmp_path, models / "a"))
