"""What TRL cannot train is refused before the training starts, with one error that names the way out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from training import CONFIG, GROUPS, Nowhere, fill, make_trainer
from trl.experimental.async_grpo import packing

from replaybuf.client import peers
from replaybuf.errors import BatchOverdue, Invalid, NotFound, WrongStep
from replaybuf_trl import layout, newest_checkpoint
from tests.conftest import RunClient, group
from tests.waiting import eventually

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "token budget": ({"token_budget": None}, "token_budget is None; needed: 0"),
    "another token budget": ({"token_budget": 512}, "token_budget is 512; needed: 0"),
    "epochs": ({"max_steps": -1}, "max_steps is -1; needed: 1"),
    "restored callbacks": ({"restore_callback_states_from_checkpoint": True}, "by one without a worker"),
    "a search for a batch size": ({"auto_find_batch_size": True}, "auto_find_batch_size is True; needed: False"),
    "checkpoints without optimizer": ({"save_only_model": True}, "save_only_model is True; needed: False"),
}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another publication": ({}, {"weight_sync_steps": 2}, "steps_per_publish is 1; needed: 2"),
    "a short last batch": ({"tickets": {"prompts": 10}}, {}, "batch.tail is train; needed: drop"),
    "adapters": (
        {"adapters": {"a": {"groups_per_batch": GROUPS}}, "batch": {"groups_per_batch": None, "tokens_per_batch": 512}},
        {},
        "adapters is ['a']; needed: []",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_are_checked_when_the_trainer_is_made(case: str, run: RunClient, model: Path, tmp_path: Path) -> None:
    arguments, message = ARGUMENTS[case]
    with pytest.raises(Invalid, match=re.escape(message)):
        make_trainer(run, model, tmp_path, **arguments)


def test_a_gpu_without_flash_attention_is_refused_when_the_trainer_is_made(
    run: RunClient, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL does not declare `kernels` and imports it in the first forward pass."""

    def of_trl() -> None: ...

    of_trl.__module__ = packing.__name__
    monkeypatch.setattr(packing, "_flash_attn", of_trl)
    monkeypatch.setattr(layout, "find_spec", lambda _: None)
    with pytest.raises(Invalid, match=re.escape("pip install 'trl[kernels]'. On a CPU call")):
        make_trainer(run, model, tmp_path)


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_run_that_trl_cannot_train_is_refused(case: str, run: RunClient, model: Path, tmp_path: Path) -> None:
    changes, arguments, message = LAYOUTS[case]
    config = CONFIG | changes | {"batch": CONFIG["batch"] | changes.get("batch", {})}
    assert run.put(**config).status_code == 201
    trainer = make_trainer(run, model, tmp_path, **arguments)
    with pytest.raises(Invalid, match=re.escape(message)):
        trainer.train()
    assert not list((tmp_path).glob("weights/*"))


@pytest.mark.timeout(600)
def test_a_strategy_without_look_ahead_is_an_error(run: RunClient, model: Path, tmp_path: Path) -> None:
    fill(run, strategy={"name": "on-policy"})
    with pytest.raises(BatchOverdue, match="a strategy without look-ahead"):
        make_trainer(run, model, tmp_path).train()
    assert run.state()["step"] == 0


@pytest.mark.timeout(600)
def test_a_live_change_to_a_strategy_without_look_ahead_is_an_error(
    run: RunClient, model: Path, tmp_path: Path
) -> None:
    """TRL would wait for ever: the next batch comes after its ack, and it acks after it has the next batch."""
    fill(run, steps=1)

    def change() -> int:
        eventually(lambda: run.state()["groups"]["in_batches"], 30.0)
        return run.http.patch(run.path, json={"strategy": {"name": "on-policy"}}).status_code

    with ThreadPoolExecutor(1) as pool:
        changed = pool.submit(change)
        with pytest.raises(BatchOverdue, match="a strategy without look-ahead"):
            make_trainer(run, model, tmp_path).train()
        assert changed.result() == 200


def test_an_unknown_run_is_named(run: RunClient, model: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=run.run):
        make_trainer(run, model, tmp_path).train()


def test_a_trainer_without_the_callback_is_refused(run: RunClient, model: Path, tmp_path: Path) -> None:
    fill(run)
    with pytest.raises(Invalid, match=re.escape("callbacks=[ReplaybufCallback(worker)]")):
        make_trainer(run, model, tmp_path, callback=False).train()


def test_a_trainer_without_publications_is_refused(run: RunClient, model: Path, tmp_path: Path) -> None:
    fill(run)
    with pytest.raises(Invalid, match=re.escape("weight_transfer=ReplaybufWeightTransfer(worker, ...)")):
        make_trainer(run, model, tmp_path, weight_transfer=Nowhere()).train()


def test_advantages_per_token_name_their_group(run: RunClient, model: Path, tmp_path: Path) -> None:
    assert run.put(**CONFIG).status_code == 201
    for number in range(2 * GROUPS):
        made = group(f"g{number}")
        for rollout in made["rollouts"]:
            rollout["token_advantages"] = [0.5, 0.25, 0.25]
        assert run.append(made)[0]["status"] == "stored"
    with pytest.raises(Invalid, match=r"group g\d has a rollout with advantages from 0.25 to 0.5"):
        make_trainer(run, model, tmp_path).train()
    assert run.state()["step"] == 0


def test_checkpoints_of_other_runs_and_of_freed_steps_are_refused(
    run: RunClient, connect: Callable[[str, str], RunClient], model: Path, tmp_path: Path
) -> None:
    fill(run)
    make_trainer(run, model, tmp_path, keep=1).train()
    with pytest.raises(WrongStep, match=r"resume_step is 2; steps 6 .* a checkpoint of these steps, or use a new run"):
        make_trainer(run, model, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with pytest.raises(WrongStep, match="resume_step is 0; steps 6"):
        make_trainer(run, model, tmp_path).train()
    with pytest.raises(Invalid, match="the checkpoint has 6 steps and max_steps is 6"):
        make_trainer(run, model, tmp_path).train(resume_from_checkpoint=newest_checkpoint(tmp_path))

    other = connect(str(run.http.base_url), f"{run.run}-other")
    fill(other)
    with pytest.raises(Invalid, match=f"the checkpoint of step 2 is of run {run.run}, not {other.run}"):
        make_trainer(other, model, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    state = tmp_path / "checkpoint-2" / "trainer_state.json"
    without = json.loads(state.read_text()) | {"stateful_callbacks": {}}
    state.write_text(json.dumps(without))
    with pytest.raises(Invalid, match=f"is of run None, not {run.run}"):
        make_trainer(run, model, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_an_untested_version_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    layout.check_version()
    monkeypatch.setattr(peers, "version", lambda _: "1.17.0.dev0")
    with pytest.warns(UserWarning, match=r"trl is 1.17.0.dev0; replaybuf-trl is tested with 1.16 up to"):
        layout.check_version()
