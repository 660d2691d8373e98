"""What TRL cannot train is refused before the training starts, with one error that names the way out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training import CONFIG, GROUPS, Nowhere, fill, make_trainer

from replaybuf.client import peers
from replaybuf.errors import Invalid, NotFound, WrongStep
from replaybuf_trl import layout, newest_checkpoint
from tests.conftest import RunClient, group

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "token budget": ({"token_budget": None}, "token_budget is None; needed: 0"),
    "another token budget": ({"token_budget": 512}, "token_budget is 512; needed: 0"),
    "epochs": ({"max_steps": -1}, "max_steps is -1; needed: 1"),
    "restored callbacks": ({"restore_callback_states_from_checkpoint": True}, "by one without a worker"),
    "a search for a batch size": ({"auto_find_batch_size": True}, "auto_find_batch_size is True; needed: False"),
    "checkpoints without optimizer": ({"save_only_model": True}, "save_only_model is True; needed: False"),
}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another batch size": (
        {},
        {"per_device_train_batch_size": 8},
        "is 8; needed: 16, because a step of TRL has per_device_train_batch_size 8",
    ),
    "another accumulation": (
        {},
        {"gradient_accumulation_steps": 3},
        "needed: 12, because a step of TRL has per_device_train_batch_size 4",
    ),
    "another publication": ({}, {"weight_sync_steps": 2}, "steps_per_publish is 1; needed: 2"),
    "a token budget of the run": ({"batch": {"tokens_per_batch": 400}}, {}, "needed: 512"),
    "a token budget per rank": ({"batch": {"tokens_per_batch": {"per_rank": 400}}}, {}, "tokens_per_batch is 400"),
    "any number of groups": (
        {"batch": {"groups_per_batch": None, "tokens_per_batch": 512}},
        {},
        "batch.groups_per_batch is None",
    ),
    "short batches": ({"batch": {"timeout_s": 5}}, {}, "batch.timeout_s is 5.0; needed: None"),
    "a short last batch": ({"tickets": {"prompts": 10}}, {}, "batch.tail is train; needed: drop"),
    "groups of any size": ({"group_size": None}, {}, "group_size is None"),
    "partial groups": ({"min_group_size": 1}, {}, "min_group_size is 1; needed: None"),
    "adapters": (
        {"adapters": {"a": {"groups_per_batch": GROUPS}}, "batch": {"groups_per_batch": None, "tokens_per_batch": 512}},
        {},
        "adapters is ['a']; needed: []",
    ),
    "token-wise advantages": ({"advantage": "process"}, {}, "advantage is process; needed: grpo"),
    "no look-ahead": ({"strategy": {"name": "on-policy"}}, {}, "look_ahead of strategy on-policy is 0; needed: 1"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_are_checked_when_the_trainer_is_made(case: str, run: RunClient, model: Path, tmp_path: Path) -> None:
    arguments, message = ARGUMENTS[case]
    with pytest.raises(Invalid, match=re.escape(message)):
        make_trainer(run, model, tmp_path, **arguments)


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_run_that_trl_cannot_train_is_refused(case: str, run: RunClient, model: Path, tmp_path: Path) -> None:
    changes, arguments, message = LAYOUTS[case]
    config = CONFIG | changes | {"batch": CONFIG["batch"] | changes.get("batch", {})}
    assert run.put(**config).status_code == 201
    trainer = make_trainer(run, model, tmp_path, **arguments)
    with pytest.raises(Invalid, match=re.escape(message)):
        trainer.train()
    assert not list((tmp_path).glob("weights/*"))


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
