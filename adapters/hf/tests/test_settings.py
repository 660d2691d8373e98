"""What both frameworks may not do to a run is one clear error before the first step; what they may do works."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from trainings import STEPS, Settings, Training, curve, fill, published, train_hf, train_lightning

from replaybuf.client import Client, peers
from replaybuf.errors import Invalid, WrongStep
from replaybuf.wire.group import group_to_json
from replaybuf_hf import newest_checkpoint
from tests.conftest import RunClient, ServeProcess
from tests.trainer.batches import group_of, rollouts
from tests.waiting import eventually

Train = Callable[[Settings], None]
BOTH = pytest.mark.parametrize("train", [train_hf, train_lightning])
CHECKPOINTS = {train_hf: "checkpoint-2", train_lightning: "step=2.ckpt"}


@pytest.fixture
def settings(run: RunClient, tmp_path: Path) -> Settings:
    """A training on one rank, in this process."""
    return {"folder": str(tmp_path), "options": {"url": str(run.http.base_url), "run": run.run}, "ranks": 1}


@pytest.fixture
def on_policy(run: RunClient) -> Iterator[Client]:
    """A run of a strategy without look-ahead, and a producer that stores the groups of each version once published."""
    fill(run, 0, strategy={"name": "on-policy"}, batch={"groups_per_batch": 1, "seq_len": 64})
    stopping = threading.Event()

    def produce(client: Client) -> None:
        made = 0
        while not stopping.is_set() and made < STEPS:
            if client.get_policy(after=made - 1 if made else None, wait_ms=500).version == made:
                group = group_of(rollouts(4, seed=made), policy_version=made, group_id=f"v{made}")
                run.append(msgspec.to_builtins(group_to_json(group)))
                made += 1

    with Client(str(run.http.base_url), run.run) as client:
        producer = threading.Thread(target=produce, args=(client,))
        producer.start()
        yield client
        stopping.set()
        producer.join()


def steps_of(folder: str) -> list[int]:
    path = Path(folder) / "lines.jsonl"
    return sorted(curve(Path(folder))) if path.exists() else []


@pytest.mark.parametrize(
    ("train", "changes", "message"),
    [
        (train_hf, {"arguments": {"gradient_accumulation_steps": 4}}, "gradient_accumulation_steps is 4; one step"),
        (train_hf, {"arguments": {"max_steps": -1}}, "max_steps is -1; a run has no length"),
        (train_hf, {"arguments": {"save_total_limit": 1}}, "save_total_limit is 1; the Trainer deletes"),
        (train_hf, {"arguments": {"save_only_model": True}}, "save_only_model is True; a resume needs"),
        (
            train_hf,
            {"kind": "Silent"},
            "nothing publishes weights, .* one-step-off-policy .* publish_weights",
        ),
        (train_hf, {"kind": "Prepared"}, "train_dataloader is DataLoaderDispatcher; accelerate would shard"),
        (train_hf, {"kind": "Paired"}, "parallelism_config is 2 ranks per batch; each of 1 ranks"),
        (train_hf, {"resume": True}, "no complete checkpoint in"),
        (train_lightning, {"arguments": {"limit_train_batches": 3}}, "limit_train_batches is 3; a run is trained"),
        (train_lightning, {"automatic": True}, "automatic_optimization is True; a step has several"),
        (train_lightning, {"without_callback": True}, "callbacks is 0 of type ReplaybufCallback; one acks"),
        (train_lightning, {"silent": True}, "nothing publishes weights, .* ReplaybufCallback"),
        (train_lightning, {"twice": True}, "one batch took 2 optimizer steps"),
    ],
)
def test_a_setting_that_breaks_the_order_of_steps_is_refused(
    train: Train, changes: Settings, message: str, run: RunClient, settings: Settings
) -> None:
    fill(run)
    with pytest.raises(Invalid, match=message):
        train(settings | changes)
    assert run.state()["step"] == 0


def test_lightning_refuses_accumulation_itself(run: RunClient, settings: Settings) -> None:
    fill(run)
    with pytest.raises(MisconfigurationException, match="Remove `Trainer\\(accumulate_grad_batches=4\\)`"):
        train_lightning(settings | {"arguments": {"accumulate_grad_batches": 4}})


@BOTH
def test_a_missing_column_is_named_before_the_first_step(train: Train, run: RunClient, settings: Settings) -> None:
    fill(run)
    settings["options"]["columns"] = ("ref_logprobs", "teacher_logprobs")
    with pytest.raises(Invalid, match=r"has no \['teacher_logprobs'\], which the loss needs. Have every generator"):
        train(settings)
    assert run.state()["step"] == 0


@BOTH
def test_a_run_with_lora_adapters_is_refused(train: Train, run: RunClient, settings: Settings) -> None:
    fill(run, 0, adapters={"fr": {"groups_per_batch": 2}}, batch={"tokens_per_batch": 4096, "seq_len": 40})
    with pytest.raises(Invalid, match=r"has LoRA adapters \['fr'\]; this trainer has one policy"):
        train(settings)
    assert run.state()["epoch"] == 0


@BOTH
def test_a_checkpoint_of_another_run_and_a_freed_step_are_refused(
    train: Train, run: RunClient, settings: Settings, connect: Callable[[str, str], RunClient]
) -> None:
    fill(run)
    settings["options"]["keep_checkpoints"] = 1
    train(settings | {"arguments": {"max_steps": 4}})
    assert run.state()["checkpoints"] == [4]

    old = settings | {"resume": str(Path(settings["folder"]) / CHECKPOINTS[train])}
    with pytest.raises(WrongStep, match=r"resume_step is 2; steps 4 .* can be resumed"):
        train(old)

    other = connect(str(run.http.base_url), f"{run.run}-other")
    fill(other)
    with pytest.raises(Invalid, match=f"is of run {run.run}, not {other.run}. Resume with RunOptions"):
        train(settings | {"options": settings["options"] | {"run": other.run}})
    assert other.state()["epoch"] == 0

    train(settings)  # the newest one is of this run, and can be resumed
    assert steps_of(settings["folder"]) == list(range(1, STEPS + 1))


@BOTH
def test_a_checkpoint_of_other_ranks_needs_consent(train: Train, run: RunClient, settings: Settings) -> None:
    fill(run)
    assert Training(train, settings | {"ranks": 2, "arguments": {"max_steps": 2}}).wait() == {}
    with pytest.raises(Invalid, match=r"was written by 2 ranks; now there are 1, so losses would differ"):
        train(settings)
    assert run.state()["step"] == 2
    settings["options"]["allow_other_ranks"] = True
    train(settings)
    assert steps_of(settings["folder"]) == list(range(1, STEPS + 1))


def test_a_checkpoint_without_its_mark_is_not_the_newest(run: RunClient, settings: Settings) -> None:
    fill(run)
    train_hf(settings | {"arguments": {"max_steps": 4}})
    folder = Path(settings["folder"])
    (folder / "checkpoint-4" / "replaybuf.json").unlink()  # as if killed before the mark was written
    with pytest.raises(Invalid, match=r"checkpoint-4 has no replaybuf.json: it is incomplete"):
        train_hf(settings | {"resume": str(folder / "checkpoint-4")})
    with pytest.raises(InterruptedError):  # step 4 is written again, and the Trainer dies on the way
        train_hf(settings | {"resume": True, "kind": "Interrupted"})
    assert newest_checkpoint(folder) == str(folder / "checkpoint-2")
    train_hf(settings | {"resume": True})
    assert (folder / "lines.jsonl").read_text().count('"step": 3,') == 3


@BOTH
def test_an_error_of_one_rank_ends_all_ranks(train: Train, run: RunClient, settings: Settings) -> None:
    fill(run)
    settings["options"]["columns"] = ("teacher_logprobs",)
    errors = Training(train, settings | {"ranks": 2}).wait()
    assert sorted(errors) == [0, 1]
    assert len(set(errors.values())) == 1, errors


@BOTH
def test_a_strategy_without_look_ahead_trains(train: Train, on_policy: Client, settings: Settings) -> None:
    train(settings)
    assert steps_of(settings["folder"]) == list(range(1, STEPS + 1))
    assert on_policy.get_run().staleness == {"0": STEPS}


def test_lightning_may_not_fetch_ahead_without_look_ahead(run: RunClient, settings: Settings) -> None:
    fill(run, strategy={"name": "on-policy"}, max_steps=None)
    with pytest.raises(Invalid, match=r"look_ahead is 0; .* set Trainer\(max_steps=\) or max_steps of the run"):
        train_lightning(settings | {"arguments": {"max_steps": -1, "max_epochs": 1}})
    assert run.state()["step"] == 0


@BOTH
def test_a_published_version_keeps_its_weights(train: Train, run: RunClient, settings: Settings) -> None:
    """The training resumes at step 3, between version 1 (of step 2) and version 2 (of step 4)."""
    fill(run, steps_per_publish=2)
    train(settings | {"arguments": {"max_steps": 3}, "save_every": 3})
    assert run.state()["checkpoints"] == [3]
    train(settings)
    versions = published(Path(settings["folder"]))
    assert [version for version, _ in versions] == [0, 1, 2, 3]
    assert run.state()["published_version"] == 3


def test_an_evaluation_gets_the_loss_of_the_model(run: RunClient, settings: Settings) -> None:
    """Examples of an `eval_dataset` are no rows of a run."""
    fill(run)
    rows = [torch.arange(3, 3 + 8), torch.arange(20, 20 + 8)]
    settings |= {"kind": "Evaluated", "eval_dataset": [{"input_ids": row, "labels": row} for row in rows]}
    train_hf(settings | {"arguments": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1}})
    lines = [json.loads(line) for line in (Path(settings["folder"]) / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert [line["loss"] for line in lines] == pytest.approx([line["own"] for line in lines], rel=1e-4)
    assert steps_of(settings["folder"]) == list(range(1, STEPS + 1))
    assert run.state()["state"] == "finished"


@BOTH
def test_the_training_ends_with_the_run(train: Train, run: RunClient, settings: Settings) -> None:
    fill(run, max_steps=STEPS - 1)
    train(settings | {"arguments": {"max_steps": STEPS + 3}})
    assert steps_of(settings["folder"]) == list(range(1, STEPS))
    assert run.state()["state"] == "finished"
    if train is train_hf:  # it saves every 2 steps, and after its max_steps
        assert newest_checkpoint(settings["folder"]) == f"{settings['folder']}/checkpoint-{STEPS - 1}"


@BOTH
def test_training_again_after_the_last_step_changes_nothing(train: Train, run: RunClient, settings: Settings) -> None:
    fill(run)
    train(settings)
    before = curve(Path(settings["folder"]))
    train(settings)
    assert curve(Path(settings["folder"])) == before
    assert run.state()["step"] == STEPS


@pytest.mark.parametrize(("train", "package"), [(train_hf, "transformers"), (train_lightning, "lightning")])
def test_another_release_is_a_warning(
    train: Train, package: str, run: RunClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(run)
    monkeypatch.setattr(peers, "version", lambda name: "9.0.1" if name == package else "5.23.0")
    with pytest.warns(UserWarning, match=f"{package} is 9.0.1; replaybuf-hf is tested with"):
        train(settings | {"arguments": {"max_steps": 1}})


def test_a_service_that_is_killed_and_comes_back_is_waited_for(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient], tmp_path: Path
) -> None:
    run = connect(own_service.url, "main")
    fill(run)
    settings = {"folder": str(tmp_path), "options": {"url": own_service.url, "run": "main"}, "ranks": 1}
    own_service.port = own_service.url.rpartition(":")[2]

    def restart() -> None:
        eventually(lambda: 2 in steps_of(str(tmp_path)), 60.0)
        own_service.kill()
        own_service.start()

    killer = threading.Thread(target=restart)
    killer.start()
    train_hf(settings)
    killer.join()
    assert steps_of(str(tmp_path)) == list(range(1, STEPS + 1))
    assert run.state()["checkpoints"][-1] == STEPS
