"""TRL trains the same number of rollouts in each step: nobody changes it, and a batch of another size is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_training import AtStep
from training import CONFIG, GROUPS, SIZE, STEPS, fill, make_trainer, of_ledger

from replaybuf.errors import Conflict
from tests.conftest import RunClient


def change(run: RunClient, groups: int) -> int:
    """Change the groups per batch; return the status code."""
    return run.http.patch(run.path, json={"batch": {"groups_per_batch": groups}}).status_code


@pytest.mark.timeout(600)
@pytest.mark.parametrize("groups", [GROUPS // 2, 2 * GROUPS])
def test_a_live_change_of_the_batches_is_refused(groups: int, run: RunClient, model: Path, tmp_path: Path) -> None:
    """TRL took the rollouts of one batch for those of two steps, or waited for ever for the rest of a step."""
    made = fill(run)
    trainer = make_trainer(run, model, tmp_path)
    answers: list[int] = []
    trainer.add_callback(AtStep(2, lambda: answers.append(change(run, groups))))
    trainer.train()
    assert answers == [409]
    assert all(trainer.trained[step] == of_ledger(run, step, made) for step in range(STEPS))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("groups", [GROUPS // 2, 2 * GROUPS])
def test_a_batch_of_another_size_ends_the_training_with_the_reason(
    groups: int, run: RunClient, model: Path, tmp_path: Path
) -> None:
    """Whoever made it: here a change between two trainings."""
    fill(run)
    assert change(run, groups) == 200
    trainer = make_trainer(run, model, tmp_path)
    with pytest.raises(Conflict, match=f"step 0 has {groups * SIZE} rollouts .* needed: {GROUPS * SIZE} "):
        trainer.train()
    assert not trainer.trained
    assert run.state()["step"] == 0


@pytest.mark.timeout(600)
def test_after_the_way_out_of_the_error_the_training_goes_on(run: RunClient, model: Path, tmp_path: Path) -> None:
    made = fill(run)
    assert change(run, GROUPS // 2) == 200
    with pytest.raises(Conflict, match="on_resume='resample'"):
        make_trainer(run, model, tmp_path).train()
    run.attach(on_resume="resample")
    assert change(run, GROUPS) == 200
    again = make_trainer(run, model, tmp_path)
    again.train()
    assert all(again.trained[step] == of_ledger(run, step, made) for step in range(STEPS))


BATCHES: dict[str, dict[str, Any]] = {
    "a token budget": {"tokens_per_batch": 40},
    "any number of groups": {"groups_per_batch": None, "tokens_per_batch": 512},
    "a time limit": {"groups_per_batch": 2 * GROUPS * STEPS, "timeout_s": 0.5},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", BATCHES)
def test_rules_that_make_batches_of_any_size_are_found_at_the_batch(
    case: str, run: RunClient, model: Path, tmp_path: Path
) -> None:
    fill(run, batch=CONFIG["batch"] | BATCHES[case])
    with pytest.raises(Conflict, match=f"needed: {GROUPS * SIZE} "):
        make_trainer(run, model, tmp_path).train()
    assert run.state()["step"] == 0
