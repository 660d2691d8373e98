"""The file of a study: its keys with their bounds, and what must hold between them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from replaybuf.errors import Invalid
from replaybuf.lab.demo.folder import DEFAULT_STEPS
from replaybuf.lab.demo.run_file import ENVIRONMENT, GROUPS_PER_BATCH, LEARNING_RATE, TARGET_ACCURACY
from replaybuf.launch.file import read_file
from replaybuf.wire.config import Filters

MOST_TRAININGS = 256
Label = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,39}$")]
"""Part of the name of a folder."""
Steps = Annotated[int, Meta(ge=1, le=100_000)]
LearningRate = Annotated[float, Meta(gt=0, le=1)]
LearningRates = Annotated[list[LearningRate], Meta(min_length=1, max_length=8)]
Groups = Annotated[int, Meta(ge=1, le=16384)]


class StrategyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One strategy: `label` in tables and folders (default: `name`), options, and what it has otherwise than the rest.

    `filters`: of its runs. `trainer`: options of the trainer, such as its loss. `groups_per_batch` must be that of all
    others.
    """

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    label: Label | None = None
    options: dict[str, Any] = {}
    filters: Filters = []
    trainer: dict[str, Any] = {}
    steps: Steps | None = None
    learning_rates: LearningRates | None = None
    groups_per_batch: Groups | None = None

    @property
    def title(self) -> str:
        """Label, or name."""
        return self.label or self.name


class StudyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the file. Relative paths start at the folder of the file.

    - `data_dir`: everything that the study writes
    - `task`, `target_accuracy`, `warm_start_seed`: of the warm start that all trainings share; with `model`, a folder
      with prompts.jsonl and held_out.jsonl, there is no warm start
    - `checkpoints`: number of scored checkpoints per training, beside the model before it; `samples` at temperature 1
      per held-out problem
    - `limit_s`: maximum time of one training, in seconds
    """

    data_dir: str = "study"
    task: Literal["spell_backward", "chain_sum"] = "spell_backward"
    target_accuracy: Annotated[float, Meta(ge=0, le=1)] = TARGET_ACCURACY
    warm_start_seed: Annotated[int, Meta(ge=0)] = 0
    model: str | None = None
    environment: str = ENVIRONMENT
    seeds: Annotated[list[Annotated[int, Meta(ge=0, le=2**31)]], Meta(min_length=1, max_length=16)]
    learning_rates: LearningRates = msgspec.field(default_factory=lambda: [LEARNING_RATE])
    steps: Steps = DEFAULT_STEPS
    groups_per_batch: Groups = GROUPS_PER_BATCH
    checkpoints: Annotated[int, Meta(ge=1, le=100)] = 5
    samples: Annotated[int, Meta(ge=1, le=64)] = 4
    limit_s: Annotated[float, Meta(ge=10, le=86400)] = 3600.0
    strategies: Annotated[list[StrategyEntry], Meta(min_length=1, max_length=16)]


def read_study(path: Path) -> StudyFile:
    """Read the file of a study.

    Raises `Invalid` for a file that is not one, a value out of bounds, labels or seeds that come twice, too many
    trainings, and strategies that differ in the budget of a batch. `plan` checks the strategies themselves.
    """
    tables = read_file(path)
    try:
        study = msgspec.convert(tables, StudyFile)
    except msgspec.ValidationError as error:
        raise Invalid(f"{path}: {error}", name="file", value=str(path)) from error
    _check_distinct(path, "strategies", [entry.title for entry in study.strategies], "give each a label of its own")
    _check_distinct(path, "seeds", study.seeds, "a seed needs one training")
    budgets = {entry.title: entry.groups_per_batch or study.groups_per_batch for entry in study.strategies}
    if len(set(budgets.values())) > 1:
        listed = ", ".join(f"{title} {groups}" for title, groups in budgets.items())
        detail = f"{path}: strategies differ in groups_per_batch: {listed}; give all the same, or none and one for all"
        raise Invalid(detail, name="groups_per_batch", value=budgets)
    rates = [entry.learning_rates or study.learning_rates for entry in study.strategies]
    if (count := len(study.seeds) * sum(map(len, rates))) > MOST_TRAININGS:
        detail = f"{path} has {count} trainings; the maximum is {MOST_TRAININGS}: split it, or lower seeds"
        raise Invalid(detail, name="trainings", value=count, bound=MOST_TRAININGS)
    return study


def _check_distinct(path: Path, name: str, values: list[Any], way_out: str) -> None:
    for value in values:
        if values.count(value) > 1:
            detail = f"{path}: {name} has {value!r} {values.count(value)} times; {way_out}"
            raise Invalid(detail, name=name, value=value)
