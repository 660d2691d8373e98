"""The trainings of a study, each with its folder and its run file, checked before anything starts.

::

    DATA/
      model/           the shared model, with its problems
      trainings/NAME/  run.toml, checkpoints/, scores.json, costs.json (written last) and what `replaybuf up` writes
      scores.json      score of the model before any training
      study.json, study.svg
      logs/, lock
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from replaybuf.errors import Conflict, Invalid
from replaybuf.generator.checkpoint_scores import SCORES_FILE
from replaybuf.lab.demo.folder import HELD_OUT, PROMPTS, Folder, Request
from replaybuf.lab.demo.run_file import Settings, run_text
from replaybuf.lab.study.file import StrategyEntry, StudyFile
from replaybuf.launch.planning import Planner

SET_BY_STUDY = {
    "model": "set model of the study",
    "learning_rate": "set learning_rates",
    "steps": "set steps of the strategy",
    "seed": "set seeds",
    "checkpoint_every_steps": "set checkpoints",
    "keep_checkpoints": "set checkpoints",
} | dict.fromkeys(
    ("checkpoint_dir", "command", "engines", "env", "metrics_file", "reader_options", "weights_dir"),
    "the study sets it",
)
"""Keys of the trainer's section that a strategy cannot have, each with the way out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One strategy with one learning rate: what has one curve."""

    title: str
    strategy: str
    options: dict[str, Any]
    filters: list[dict[str, Any]]
    trainer: dict[str, Any]
    learning_rate: float
    steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class Training:
    """One variant with one seed, in a folder of its own."""

    variant: Variant
    seed: int
    folder: Folder
    text: str

    @property
    def name(self) -> str:
        """Name of the folder, and of the training in messages."""
        return self.folder.root.name

    @property
    def costs(self) -> Path:
        """File with the costs by step: the training is finished once it is there."""
        return self.folder.root / "costs.json"

    @property
    def scores(self) -> Path:
        """File with the scores of the checkpoints."""
        return self.folder.root / SCORES_FILE


@dataclasses.dataclass(frozen=True, slots=True)
class StudyPlan:
    """Everything that a study runs: its trainings in the order of the file, seed by seed."""

    file: StudyFile
    data_dir: Path
    model: Path
    variants: list[Variant]
    trainings: list[Training]

    @property
    def held_out(self) -> Path:
        """File of the held-out problems."""
        return self.model / HELD_OUT

    @property
    def needs_warm_start(self) -> bool:
        """Whether the shared model has to be made first."""
        return not self.held_out.is_file()

    def of(self, variant: Variant) -> list[Training]:
        """Return the trainings of a variant, one per seed."""
        return [training for training in self.trainings if training.variant is variant]


def plan_study(study: StudyFile, folder: Path) -> StudyPlan:
    """Return the plan of a study whose file is in `folder`.

    Raises `Invalid` for a strategy that is not installed, options that `replaybuf up` rejects and a model without
    problems, and `Conflict` for a training that was begun with other settings.
    """
    data_dir = (folder / study.data_dir).resolve()
    model = (folder / study.model).resolve() if study.model else data_dir / "model"
    if study.model:
        for name in ("config.json", PROMPTS, HELD_OUT):
            if not (model / name).is_file():
                detail = f"model is {study.model!r}: {model / name} does not exist; leave model out for a warm start"
                raise Invalid(detail, name="model", value=study.model)
    variants, trainings = [], []
    for entry in study.strategies:
        _check_trainer(entry)
        rates = entry.learning_rates or study.learning_rates
        for rate in rates:
            title = entry.title if len(rates) == 1 else f"{entry.title}-lr{rate:g}"
            filters = [{"name": spec.name, "options": spec.options} for spec in entry.filters]
            steps = entry.steps or study.steps
            variant = Variant(title, entry.name, entry.options, filters, entry.trainer, rate, steps)
            variants.append(variant)
            trainings += [_training(study, variant, seed, data_dir, model) for seed in study.seeds]
    by_seed = sorted(trainings, key=lambda training: study.seeds.index(training.seed))
    return StudyPlan(study, data_dir, model, variants, by_seed)


def _check_trainer(entry: StrategyEntry) -> None:
    for key in entry.trainer.keys() & SET_BY_STUDY:
        detail = f"strategy {entry.title}: trainer.{key} cannot be set: {SET_BY_STUDY[key]}"
        raise Invalid(detail, name=f"trainer.{key}", value=entry.trainer[key])


def _training(study: StudyFile, variant: Variant, seed: int, data_dir: Path, model: Path) -> Training:
    request = Request(seed, variant.steps, variant.strategy, variant.options)
    settings = Settings(
        model=str(model),
        environment=study.environment,
        groups_per_batch=study.groups_per_batch,
        learning_rate=variant.learning_rate,
        checkpoint_every_steps=-(-variant.steps // study.checkpoints),
        keep_checkpoints=study.checkpoints + 1,
        run_options={"filters": variant.filters} if variant.filters else {},
        trainer_options=variant.trainer,
    )
    folder = Folder(data_dir / "trainings" / f"{variant.title}-seed{seed}")
    text = run_text(request, settings)
    planner = Planner(tomllib.loads(text), folder.root, made_later=model)
    if planner.plan() is None:
        raise Invalid(f"strategy {variant.title}: {'; '.join(planner.problems)}", name="strategies")
    if folder.run_file.is_file() and folder.run_file.read_text() != text:
        raise Conflict(
            f"{folder.root} was begun with other settings; set another data_dir, or delete that folder to train again",
            name="data_dir",
            value=str(folder.root),
        )
    return Training(variant, seed, folder, text)
