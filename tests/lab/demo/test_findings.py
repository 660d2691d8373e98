"""What a report says about a demo: it claims a change only where one was measured, and names who waited for whom."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from replaybuf.lab.demo.changes import paired_change, window_change
from replaybuf.lab.demo.findings import findings, headline
from replaybuf.lab.demo.report import GeneratorWaiting, Report, Session, build_report
from replaybuf.launch.progress import Evaluation, Progress, TrainerLine, Waiting
from tests.lab.demo.conftest import HYPERPARAMETERS

STEPS = 40


def text_of(report: Report) -> str:
    """Return all findings as one text."""
    return " ".join(findings(report))


def report_of_rewards(progress: Progress, rewards: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Report:
    """Return the report of a demo with these rewards."""
    progress.steps.clear()
    progress.add_steps(TrainerLine(step=step, reward_mean=reward) for step, reward in enumerate(rewards.tolist()))
    return build_report(progress, [], HYPERPARAMETERS)


@pytest.mark.parametrize(
    ("slope", "words", "never"),
    [(0.0, "did not change measurably", "rose"), (0.01, "rose", "fell"), (-0.01, "fell", "rose")],
)
def test_the_reward_rises_only_if_it_did(progress: Progress, slope: float, words: str, never: str) -> None:
    """Batches with a spread of 0.05, without a trend, with one, and with one downwards."""
    noise = np.random.default_rng(0).normal(0, 0.05, STEPS)
    report = report_of_rewards(progress, 0.4 + slope * np.arange(STEPS) + noise)
    sentence = next(finding for finding in findings(report) if finding.startswith("Mean reward"))
    assert words in sentence and never not in sentence


def test_an_accuracy_within_the_noise_has_not_changed(progress: Progress) -> None:
    """One problem more of 200 is no result, in headline and findings alike."""
    before, after = progress.evaluations[0], progress.evaluations[-1]
    lucky = before.sampled_by_problem | {"150": 1.0}
    progress.evaluations[-1] = msgspec.structs.replace(after, sampled=0.255, sampled_by_problem=lucky)
    report = build_report(progress, [], HYPERPARAMETERS)
    assert "Sampled accuracy (temperature 1) did not change measurably: from 25.0 to 25.5 %" in text_of(report)
    assert "sampled accuracy 25.0% → 25.5% (+0.5 ± 0.5: no measurable change)" in headline(report)


def test_an_accuracy_that_fell_is_said_to_have_fallen(progress: Progress) -> None:
    before, after = progress.evaluations[0], progress.evaluations[-1]
    worse = {name: score * (int(name) >= 30) for name, score in before.sampled_by_problem.items()}
    progress.evaluations[-1] = msgspec.structs.replace(after, sampled=0.1, sampled_by_problem=worse)
    report = build_report(progress, [], HYPERPARAMETERS)
    assert "Sampled accuracy (temperature 1) fell: from 25.0 to 10.0 %, -15.0 ± 2.5 points." in text_of(report)
    assert "sharpened" not in text_of(report)


def test_sampling_that_gained_more_than_greedy_is_called_sharpening(report: Report) -> None:
    """37.5 points against 5, each over the same problems."""
    assert "Sampled accuracy gained more than greedy accuracy (+32.5 ± 4.0 points): reinforcement" in text_of(report)


def test_two_steps_are_too_few_to_judge_the_reward(progress: Progress) -> None:
    report = report_of_rewards(progress, np.array([0.1, 0.9]))
    assert "from 10.0 to 90.0 %; there are too few values to judge the change." in text_of(report)


def test_evaluations_of_an_older_demo_have_no_errors_and_no_verdict(
    progress: Progress, sessions: list[Session]
) -> None:
    """Their lines have neither errors nor scores by problem; a resumed demo still gets its report."""
    progress.evaluations = [
        Evaluation(step=evaluation.step, problems=200, samples=4, sampled=evaluation.sampled, greedy=evaluation.greedy)
        for evaluation in progress.evaluations
    ]
    report = build_report(progress, sessions, HYPERPARAMETERS)
    assert headline(report) == "sampled accuracy 25.0% → 62.5%, greedy accuracy 80.0% → 85.0%, 10 steps in 0:25"
    assert "rose" not in text_of(report).partition("Mean reward")[0]


def test_staleness_names_the_ages_the_bound_and_the_drops(report: Report) -> None:
    wanted = (
        "of the trained tokens 10.0% were 0 versions old, 90.0% were 1 version old. The run allows at most 1. "
        "Dropped because too stale: 10 groups."
    )
    assert wanted in text_of(report)


def test_waits_name_who_waited_for_whom_and_the_reason(report: Report) -> None:
    """The trainer waits for the generator in a fifth of its time, the generator in half of its reports."""
    text = text_of(report)
    assert (
        "The trainer waited 25.0% of its time: 20.0% for the generator [too_few_groups], 5.0% for the service" in text
    )
    assert "waited in 50.0% of its 10 reports: 50.0% for the trainer" in text and "[rate_limited]" in text
    assert "So the trainer set the pace." in text


@pytest.mark.parametrize(
    ("trainer", "generator", "words"),
    [
        ({"too_few_groups": 0.4}, {"rate_limited": 0.1}, "So the generator set the pace."),
        ({"fetching": 0.4}, {}, "Neither part held up the other."),
    ],
)
def test_the_pace_is_that_of_the_part_that_waited_less(
    report: Report, trainer: dict[str, float], generator: dict[str, float], words: str
) -> None:
    """Time in which the service sends a batch is not the generator's."""
    changed = msgspec.structs.replace(
        report,
        waiting=Waiting(10.0, 0.4, trainer),
        generator_waiting=GeneratorWaiting(20, sum(generator.values()), generator),
    )
    assert words in text_of(changed)


def test_the_notes_name_the_accuracy_that_the_warm_start_reached(report: Report) -> None:
    """It ends near its target, not at it."""
    assert "brought its sampled accuracy on the held-out problems to 25.0%" in text_of(report)


def test_the_error_of_a_paired_change_is_that_of_the_differences() -> None:
    """Problems of very different difficulty that all gain the same have no error; unknown ones are left out."""
    before = {"easy": 0.9, "hard": 0.1, "middle": 0.5}
    change = paired_change(before, {name: score + 0.1 for name, score in before.items()} | {"new": 1.0})
    assert change is not None
    assert [change.before, change.difference] == pytest.approx([0.5, 0.1])
    assert change.direction == 1
    assert change.error == pytest.approx(0.0, abs=1e-9)
    assert paired_change({}, {}) is None


def test_quarters_of_a_run_are_compared() -> None:
    """Means 0.15 and 0.75 of two values each; each has an error of 0.05."""
    change = window_change([0.1, 0.2, 0.0, 9.0, 9.0, 0.0, 0.7, 0.8])
    assert change is not None
    assert [change.before, change.after, change.error] == pytest.approx([0.15, 0.75, 0.05 * 2**0.5])
    assert window_change([]) is None
