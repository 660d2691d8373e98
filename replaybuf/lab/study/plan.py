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
from pathlib import Path

from replaybuf.errors import Conflict, Invalid
from replaybuf.generator.checkpoint_scores import SCORES_FILE
from replaybuf.lab.demo.folder import HELD_OUT, PROMPTS, Folder, Request
from replaybuf.lab.demo.run_file import Settings, check_request, run_text
from replaybuf.lab.study.file import StudyFile


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One strategy with one learning rate: what has one curve."""

    title: str
    strategy: str
    options: dict[str, object]
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

    Raises `Invalid` for a strategy that is not installed, options out of bounds and a model without problems, and
    `Conflict` for a training that was begun with other settings.
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
        rates = entry.learning_rates or study.learning_rates
        for rate in rates:
            title = entry.title if len(rates) == 1 else f"{entry.title}-lr{rate:g}"
            variant = Variant(title, entry.name, entry.options, rate, entry.steps or study.steps)
            variants.append(variant)
            trainings += [_training(study, variant, seed, data_dir, model) for seed in study.seeds]
    by_seed = sorted(trainings, key=lambda training: study.seeds.index(training.seed))
    return StudyPlan(study, data_dir, model, variants, by_seed)


def _training(study: StudyFile, variant: Variant, seed: int, data_dir: Path, model: Path) -> Training:
    request = Request(seed, variant.steps, variant.strategy, variant.options)
    settings = Settings(
        model=str(model),
        environment=study.environment,
        groups_per_batch=study.groups_per_batch,
        learning_rate=variant.learning_rate,
        checkpoint_every_steps=-(-variant.steps // study.checkpoints),
        keep_checkpoints=study.checkpoints + 1,
    )
    try:
        check_request(request, settings)
    except Invalid as error:
        detail = f"strategy {variant.title}: {error.detail}"
        raise Invalid(detail, name=error.name, value=error.value, bound=error.bound) from error
    folder = Folder(data_dir / "trainings" / f"{variant.title}-seed{seed}")
    text = run_text(request, settings)
    if folder.run_file.is_file() and folder.run_file.read_text() != text:
        raise Conflict(
            f"{folder.root} was begun with other settings; set another data_dir, or delete that folder to train again",
            name="data_dir",
            value=str(folder.root),
        )
    return Training(variant, seed, folder, text)
