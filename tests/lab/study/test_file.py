"""The file of a study: what is wrong in it is one error, before anything starts."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from replaybuf.cli.study import StudyOptions, run
from replaybuf.errors import Conflict, Invalid
from replaybuf.lab.study.file import read_study
from replaybuf.lab.study.plan import StudyPlan, plan_study

ONE_USE = '[[strategies]]\nname = "one-step-off-policy"\nlabel = "one-use"\noptions = { max_staleness = 1 }\n'
REPLAY = '[[strategies]]\nname = "replay"\n'


def planned(folder: Path, text: str) -> StudyPlan:
    """Write the file and plan it."""
    path = folder / "study.toml"
    path.write_text(text)
    return plan_study(read_study(path), folder)


def test_every_strategy_is_trained_with_every_seed_and_learning_rate(tmp_path: Path) -> None:
    """Seed by seed, so that a study that is stopped early has all strategies of the first seeds."""
    plan = planned(tmp_path, f"seeds = [3, 1]\nlearning_rates = [1e-4, 5e-5]\n{ONE_USE}{REPLAY}learning_rates = [0.01]")
    assert [training.name for training in plan.trainings] == [
        *("one-use-lr0.0001-seed3", "one-use-lr5e-05-seed3", "replay-seed3"),
        *("one-use-lr0.0001-seed1", "one-use-lr5e-05-seed1", "replay-seed1"),
    ]
    assert {training.variant.learning_rate for training in plan.trainings} == {1e-4, 5e-5, 0.01}
    assert plan.needs_warm_start and plan.model == tmp_path / "study" / "model"


def test_a_strategy_has_options_of_the_trainer(tmp_path: Path) -> None:
    """So that losses can be compared. The other strategies keep the trainer of the demo."""
    loss = """trainer = { loss = "truncated-ratio", loss_options = { bound = 4 }, clip_norm = 0.5 }"""
    plan = planned(tmp_path, f"seeds = [0]\n{ONE_USE}{REPLAY}{loss}")
    one_use, replay = (tomllib.loads(training.text)["trainer"] for training in plan.trainings)
    more = {"loss": "truncated-ratio", "loss_options": {"bound": 4}, "clip_norm": 0.5}
    assert one_use.keys().isdisjoint(more) and replay == one_use | more


def test_a_strategy_has_filters(tmp_path: Path) -> None:
    """So that dropping groups can be compared with training them. The other strategies keep all groups."""
    plan = planned(tmp_path, f'seeds = [0]\n{ONE_USE}{REPLAY}filters = [{{ name = "zero-variance" }}]')
    one_use, replay = (tomllib.loads(training.text)["run"] for training in plan.trainings)
    filters = {"filters": [{"name": "zero-variance", "options": {}}]}
    assert "filters" not in one_use
    assert {name: value for name, value in replay.items() if name not in one_use} == filters


def test_a_training_keeps_as_many_checkpoints_as_are_scored(tmp_path: Path) -> None:
    plan = planned(tmp_path, f"seeds = [0]\nsteps = 10\ncheckpoints = 4\n{ONE_USE}")
    assert "checkpoint_every_steps = 3\nkeep_checkpoints = 5" in plan.trainings[0].text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"seeds = [0]\n{ONE_USE}{REPLAY}groups_per_batch = 64", r"differ in groups_per_batch: one-use 32, replay 64"),
        ('seeds = [0]\n[[strategies]]\nname = "replaay"', r"strategy replaay: .*installed.*replay"),
        (f"seeds = [0]\n{REPLAY}options = {{ max_uses = 0 }}", r"strategy replay: .*max_uses"),
        (
            f"seeds = [0]\n{ONE_USE}trainer = {{ los = 'gspo' }}",
            r"strategy one-use: trainer.los is not a key.*did you mean loss",
        ),
        (f"seeds = [0]\n{REPLAY}trainer = {{ clip_norm = 0 }}", r"strategy replay: trainer.clip_norm is 0"),
        (f"seeds = [0]\n{REPLAY}trainer = {{ loss = 'gpso' }}", r"strategy replay: trainer: loss is 'gpso'.*gspo"),
        (f"seeds = [0]\n{REPLAY}trainer = {{ loss_options = {{ clip = 1 }} }}", r"unknown field `clip`; "),
        (f"seeds = [0]\n{REPLAY}trainer = {{ learning_rate = 0.1 }}", r"replay: trainer.learning_rate.*learning_rates"),
        (f"seeds = [0]\n{REPLAY}filters = [{{ name = 'zero' }}]", r"strategy replay: .*zero-variance"),
        (f"seeds = [0]\n{REPLAY}{REPLAY}", r"strategies has 'replay' 2 times; give each a label"),
        (f"seeds = [1, 1]\n{REPLAY}", r"seeds has 1 2 times"),
        (REPLAY, "seeds"),
        ("seeds = [0]", "strategies"),
        (f"seeds = [0]\nsteps = 0\n{REPLAY}", "steps"),
        (f"seeds = [0]\nepochs = 2\n{REPLAY}", "epochs"),
        (f'seeds = [0]\nmodel = "nowhere"\n{REPLAY}', "config.json does not exist"),
        (
            "seeds = [0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]\nlearning_rates = [1e-3, 1e-4, 2e-4]\n"
            + "".join(f'{REPLAY}label = "r{number}"\n' for number in range(6)),
            "288 trainings; the maximum is 256",
        ),
    ],
)
def test_a_wrong_file_is_one_error_before_anything_starts(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "study.toml"
    path.write_text(text)
    with pytest.raises(Invalid, match=message):
        run(Console(), path, StudyOptions())
    assert list(tmp_path.iterdir()) == [path]


def test_a_training_that_was_begun_with_other_settings_is_not_mixed_up(tmp_path: Path) -> None:
    """Another number of steps is another training; the folder of the first says so."""
    begun = planned(tmp_path, f"seeds = [0]\n{REPLAY}").trainings[0]
    begun.folder.create()
    begun.folder.run_file.write_text(begun.text)
    planned(tmp_path, f"seeds = [0, 1]\nsamples = 8\n{REPLAY}")
    with pytest.raises(Conflict, match="replay-seed0 was begun with other settings"):
        planned(tmp_path, f"seeds = [0]\nsteps = 7\n{REPLAY}")
