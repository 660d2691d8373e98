"""TRL trains exactly the batches of the ledger, one per optimizer step, also after a resume."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import GROUPS, SIZE, STEPS, fill, make_trainer, of_ledger, weights_digest
from transformers import TrainerCallback

from replaybuf.errors import Fenced, Invalid, RunFinished
from replaybuf.wire.batch import Batch, read_batch
from replaybuf_trl import newest_checkpoint
from replaybuf_trl.samples import samples_of
from tests.conftest import RunClient


class AtStep(TrainerCallback):
    """Calls something behind the ack of a step, before its weights are published."""

    def __init__(self, steps: int, call: Callable[[], object]) -> None:
        self._steps, self._call = steps, call

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._steps:
            self._call()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_each_optimizer_step_trains_the_batch_of_the_ledger(run: RunClient, model: Path, tmp_path: Path) -> None:
    groups = fill(run)
    trainer = make_trainer(run, model, tmp_path)
    trainer.train()
    assert sorted(trainer.trained) == list(range(STEPS))
    for step in range(STEPS):
        assert trainer.trained[step].total() == GROUPS * SIZE
        assert trainer.trained[step] == of_ledger(run, step, groups)
    state = run.state()
    assert (state["step"], state["published_version"], state["state"]) == (STEPS, STEPS, "finished")
    assert state["checkpoints"] == [2, 4, 6]
    assert len(list((tmp_path / "weights").iterdir())) == 3


def test_no_bound_of_trl_drops_what_the_run_chose(run: RunClient, model: Path, tmp_path: Path) -> None:
    groups = fill(run)
    trainer = make_trainer(run, model, tmp_path, max_staleness=2)
    trainer.train()
    assert all(trainer.trained[step] == of_ledger(run, step, groups) for step in range(STEPS))
    assert max(trainer.staleness.values()) == 2
    assert run.get(f"batches/{STEPS - 1}/record").json()["groups"][0]["staleness"] == STEPS - 1


def test_a_resumed_training_ends_with_the_same_weights(
    run: RunClient, connect: Callable[[str, str], RunClient], model: Path, tmp_path: Path
) -> None:
    whole = connect(str(run.http.base_url), f"{run.run}-whole")
    fill(whole)
    groups = fill(run)
    make_trainer(whole, model, tmp_path / "whole").train()

    first = make_trainer(run, model, tmp_path / "part")
    first.add_callback(AtStep(3, interrupt))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert run.state()["step"] == 3
    second = make_trainer(run, model, tmp_path / "part")
    checkpoint = newest_checkpoint(tmp_path / "part")
    assert checkpoint is not None and checkpoint.endswith("checkpoint-2")
    second.rollout_worker.attach(second.args, 2)
    second.rollout_worker.confirm()  # as publishers do before they load the first weights into an engine
    second.train(resume_from_checkpoint=checkpoint)
    assert second.trained[2] == first.trained[2] == of_ledger(run, 2, groups)
    assert sorted(second.trained) == [2, 3, 4, 5]
    last = f"checkpoint-{STEPS}"
    assert weights_digest(tmp_path / "part" / last) == weights_digest(tmp_path / "whole" / last)


def test_a_published_version_keeps_its_weights(run: RunClient, model: Path, tmp_path: Path) -> None:
    """The training resumes at step 3, between version 1 (of step 2) and version 2 (of step 4)."""
    groups = fill(run, steps_per_publish=2)
    settings = {"weight_sync_steps": 2, "save_steps": 3}
    first = make_trainer(run, model, tmp_path, **settings)
    first.add_callback(AtStep(4, interrupt))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    version_1 = tmp_path / "weights" / "v000001"
    before = weights_digest(version_1)
    again = make_trainer(run, model, tmp_path, **settings)
    again.add_callback(AtStep(5, lambda: digests.append(weights_digest(version_1))))
    digests: list[str] = []
    again.train(resume_from_checkpoint=newest_checkpoint(tmp_path))
    assert sorted(again.trained) == [3, 4, 5]
    assert digests == [before]
    assert run.state()["published_version"] == 3
    assert all(again.trained[step] == of_ledger(run, step, groups) for step in again.trained)


def test_a_part_of_a_checkpoint_is_passed_over(run: RunClient, model: Path, tmp_path: Path) -> None:
    fill(run, steps=2, max_steps=2)
    make_trainer(run, model, tmp_path, max_steps=2).train()
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-9")
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text('{"global_step": 9, "log_hist')
    (tmp_path / "checkpoint-10").mkdir()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_the_training_ends_with_the_run(run: RunClient, model: Path, tmp_path: Path) -> None:
    groups = fill(run, steps=3, max_steps=3)
    trainer = make_trainer(run, model, tmp_path, max_steps=100)
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.trained[2] == of_ledger(run, 2, groups)
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint == str(tmp_path / "checkpoint-3")
    with pytest.raises(RunFinished, match="finished after 3 steps"):
        make_trainer(run, model, tmp_path, max_steps=100).train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize(("max_steps", "error"), [(4, Invalid), (100, RunFinished)])
def test_a_checkpoint_whose_report_was_lost_is_reported_at_the_next_start(
    max_steps: int, error: type[Exception], run: RunClient, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is finished, so there is no later step after which TRL could report it."""
    fill(run, steps=4, max_steps=4)
    killed = make_trainer(run, model, tmp_path, max_steps=4, keep=1)
    monkeypatch.setattr(killed.rollout_worker, "checkpoint", lambda step: interrupt() if step == 4 else None)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert (run.state()["state"], run.state()["checkpoints"]) == ("finished", [])
    with pytest.raises(error):
        make_trainer(run, model, tmp_path, max_steps=max_steps, keep=1).train(
            resume_from_checkpoint=newest_checkpoint(tmp_path)
        )
    assert run.state()["checkpoints"] == [4]
    assert run.state()["groups"]["in_batches"] == 0


def test_a_trainer_that_another_one_replaced_ends(run: RunClient, model: Path, tmp_path: Path) -> None:
    fill(run)
    trainer = make_trainer(run, model, tmp_path)
    trainer.add_callback(AtStep(2, lambda: run.attach(resume_step=2)))
    with pytest.raises(Fenced):
        trainer.train()
    assert run.state()["published_version"] == 2


def test_a_sampling_weight_is_part_of_the_advantage(run: RunClient) -> None:
    fill(run)
    batch = read_batch(run.batch(0, run.attach()).content)
    rows = [
        dataclasses.replace(row, sampling_weights=np.full(len(row.rewards), 0.25, np.float32))
        for row in batch.micro_batches
    ]
    weighted = Batch(batch.meta, rows)
    plain = [sample.advantage for sample in samples_of(batch)]
    assert sorted({round(advantage, 3) for advantage in plain}) == [-1.0, 1.0]
    assert [sample.advantage for sample in samples_of(weighted)] == [0.25 * advantage for advantage in plain]
