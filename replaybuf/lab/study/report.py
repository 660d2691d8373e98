"""Results of a study: the struct of study.json, and the rows of its table."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

import msgspec

from replaybuf.errors import NotFound, counted
from replaybuf.generator.checkpoint_scores import SCORES_FILE, ScoreFile, open_checkpoints, setting_of
from replaybuf.lab.study.curves import Band, Interval, Points, band, cost_ratio, cost_to_reach, interval
from replaybuf.lab.study.plan import StudyPlan, Training
from replaybuf.lab.study.session import model_before, open_problems, read_costs
from replaybuf.wire.answer.evaluations import EvaluationRequest

AXES = {"tokens": "generated tokens", "step": "optimizer steps", "wall_s": "wall seconds"}
"""Costs by their name in study.json, with their name for people."""


class ScoredPoint(msgspec.Struct, frozen=True):
    """Accuracy of one checkpoint, with its standard error over the problems, and what it had cost."""

    step: int
    tokens: float
    wall_s: float
    accuracy: float
    standard_error: float | None

    def cost(self, axis: str) -> float:
        """Return a cost by its name in `AXES`."""
        return float(getattr(self, axis))


class TrainingResult(msgspec.Struct, frozen=True):
    """One seed of a strategy. `share_to_reach`: see `StrategyResult`; None = it never did.

    `cost_ratios`: cost for the same accuracies by axis, relative to the first strategy with the same seed
    (`curves.cost_ratio`). `staleness`: mean of the trained rollouts, in versions; None = not known.
    """

    seed: int
    groups: int | None
    points: list[ScoredPoint]
    share_to_reach: float | None
    cost_ratios: dict[str, float | None]
    staleness: float | None


class StrategyResult(msgspec.Struct, frozen=True):
    """One strategy with one learning rate, over all seeds.

    `trainer`: options of the trainer. `final`: accuracy after the last step; `costs` at the end by axis.
    `share_to_reach` of a training: tokens with which it reached the final accuracy of the first strategy with the same
    seed, as a share of that one's tokens.
    """

    title: str
    strategy: str
    options: dict[str, Any]
    trainer: dict[str, Any]
    learning_rate: float
    steps: int
    trainings: list[TrainingResult]
    final: Interval
    costs: dict[str, Interval]
    bands: dict[str, Band]


class StudyResult(msgspec.Struct, frozen=True):
    """All of a study. `settings`: keys of its file; `problems`: held-out ones, `samples` of each at temperature 1."""

    settings: dict[str, Any]
    problems: int
    samples: int
    before: ScoredPoint
    strategies: list[StrategyResult]
    cores: int | None
    versions: dict[str, str]


def build_result(plan: StudyPlan) -> StudyResult:
    """Return the result of a study whose trainings are finished and scored. Raises `NotFound` where a score lacks."""
    held_out = open_problems(plan)
    setting = setting_of(held_out, plan.file.environment, 1)
    score = ScoreFile(plan.data_dir / SCORES_FILE).find(model_before(plan), setting)
    if score is None:
        raise NotFound("the model before training has no score; run the study again", name="scores")
    before = ScoredPoint(0, 0.0, 0.0, *_figures(score.result))
    curves = {training.name: _points(training, plan, setting, before) for training in plan.trainings}
    references = {training.seed: curves[training.name] for training in plan.of(plan.variants[0])}
    strategies = []
    for variant in plan.variants:
        trainings = [_compared(planned, curves[planned.name], references[planned.seed]) for planned in plan.of(variant)]
        last = [training.points[-1] for training in trainings]
        strategies.append(
            StrategyResult(
                title=variant.title,
                strategy=variant.strategy,
                options=variant.options,
                trainer=variant.trainer,
                learning_rate=variant.learning_rate,
                steps=variant.steps,
                trainings=trainings,
                final=interval([point.accuracy for point in last]),
                costs={axis: interval([point.cost(axis) for point in last]) for axis in AXES},
                bands={axis: band([_curve(training.points, axis) for training in trainings]) for axis in AXES},
            )
        )
    return StudyResult(
        settings=msgspec.to_builtins(plan.file),
        problems=len(held_out.prompts),
        samples=plan.file.samples,
        before=before,
        strategies=strategies,
        cores=os.cpu_count(),
        versions={"replaybuf": version("replaybuf"), "python": platform.python_version()},
    )


def _points(training: Training, plan: StudyPlan, setting: str, before: ScoredPoint) -> list[ScoredPoint]:
    """Return the accuracy of each checkpoint with its costs, from before the training on."""
    costs, scores = read_costs(training), ScoreFile(training.scores)
    points = [before]
    for checkpoint in open_checkpoints(training.folder.checkpoints, plan.model):
        score = scores.find(checkpoint, setting)
        if score is None or score.step not in costs.step:
            continue
        at = costs.step.index(score.step)
        points.append(ScoredPoint(score.step, costs.tokens[at], costs.wall_s[at], *_figures(score.result)))
    if points[-1].step != costs.step[-1]:
        detail = f"training {training.name} has no score of its last step, {costs.step[-1]}; run the study again"
        raise NotFound(detail, name="scores", value=training.name)
    return points


def _compared(training: Training, points: list[ScoredPoint], reference: list[ScoredPoint]) -> TrainingResult:
    tokens = cost_to_reach(_curve(points, "tokens"), reference[-1].accuracy)
    share = None if tokens is None or not reference[-1].tokens else tokens / reference[-1].tokens
    ratios = {axis: cost_ratio(_curve(points, axis), _curve(reference, axis)) for axis in AXES}
    costs = read_costs(training)
    return TrainingResult(training.seed, costs.groups, points, share, ratios, costs.staleness)


def _curve(points: list[ScoredPoint], axis: str) -> Points:
    return [(point.cost(axis), point.accuracy) for point in points]


def _figures(result: EvaluationRequest) -> tuple[float, float | None]:
    return result.reward_mean, result.standard_error


def table_of(result: StudyResult) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return heading and rows of the table, one row per strategy; `notes_of` explains the columns."""
    heading = (
        *("strategy", ">lr", ">seeds", ">accuracy", ">tokens", ">steps", ">seconds", ">staleness"),
        *(">to match the first", ">tokens for the same"),
    )
    before = f"{result.before.accuracy:.3f}"
    rows: list[tuple[str, ...]] = [("before training", "", "", before, "0", "0", "0", "", "", "")]
    for strategy in result.strategies:
        tokens, step, wall_s = (strategy.costs[axis] for axis in AXES)
        trainings = strategy.trainings
        known = [training.staleness for training in trainings if training.staleness is not None]
        rows.append(
            (
                strategy.title,
                f"{strategy.learning_rate:g}",
                str(strategy.final.seeds),
                _accuracy(strategy.final),
                f"{tokens.mean:,.0f}",
                f"{step.mean:g}",
                f"{wall_s.mean:,.0f}",
                f"{sum(known) / len(known):.2f}" if known else "",
                ", ".join(_share(training.share_to_reach) for training in trainings),
                ", ".join(_share(training.cost_ratios["tokens"], "-") for training in trainings),
            )
        )
    return heading, rows


def notes_of(result: StudyResult) -> list[str]:
    """Return sentences about the columns of the table and the noise of its figures."""
    errors = [
        point.standard_error
        for strategy in result.strategies
        for run in strategy.trainings
        for point in run.points[-1:]
    ]
    known = [error for error in errors if error is not None]
    noise = f" The standard error of one training is up to {max(known):.3f}." if known else ""
    first = result.strategies[0].title
    return [
        f"accuracy: mean over seeds ± 95 % confidence of the mean, {counted(result.problems, 'held-out problem')} with "
        f"{counted(result.samples, 'completion')} each at temperature 1.{noise}",
        "tokens: generated in a training; seconds: of the trainer's steps, waits included.",
        f"to match the first: tokens until the final accuracy of {first} with the same seed, as a share of its tokens.",
        f"tokens for the same: for all accuracies that both reached, relative to {first} with the same seed; - with "
        "less than half of its rise.",
        "staleness: mean of the trained completions, in versions of the policy.",
    ]


def _accuracy(value: Interval) -> str:
    return f"{value.mean:.3f}" if value.half is None else f"{value.mean:.3f} ± {value.half:.3f}"


def _share(share: float | None, without: str = "never") -> str:
    return without if share is None else f"{share:.0%}"
