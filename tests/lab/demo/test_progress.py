"""What the demo knows: growing files are read once, a resumed history replaces what it goes behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from replaybuf.lab.demo.progress import (
    Evaluation,
    GeneratorLine,
    LineReader,
    Phases,
    Progress,
    TrainerLine,
    append_line,
    waited,
)


def evaluation(step: int, sampled: float = 0.5, greedy: float | None = None) -> Evaluation:
    """Make an evaluation of 200 problems, 4 completions each."""
    return Evaluation(step=step, problems=200, samples=4, sampled=sampled, greedy=greedy)


def test_only_complete_new_lines_are_read(tmp_path: Path) -> None:
    """A line that is still being written is left for the next time."""
    path = tmp_path / "train.jsonl"
    reader = LineReader(path, TrainerLine)
    assert reader.new_lines() == []
    path.write_text('{"step": 0}\n{"step": 1')
    assert [line.step for line in reader.new_lines()] == [0]
    with path.open("a") as file:
        file.write('}\n{"step": 2}\n')
    assert [line.step for line in reader.new_lines()] == [1, 2]
    assert reader.new_lines() == []


def test_fields_nobody_asked_for_and_broken_lines_do_no_harm(tmp_path: Path) -> None:
    """A trainer killed in the middle of a line leaves a broken one behind; the rest counts."""
    path = tmp_path / "train.jsonl"
    broken = b'{"step": 1, "lo{"step": 1}\n{"step": 1, "wait_reasons": {"\xff": 1}}\n'
    path.write_bytes(b'{"step": 0, "mood": "good"}\n' + broken + b'{"step": 2}\n')
    assert [line.step for line in LineReader(path, TrainerLine).new_lines()] == [0, 2]


def test_lines_written_are_lines_read(tmp_path: Path) -> None:
    """What the demo appends for a resume comes back as it was."""
    path = tmp_path / "metrics" / "evaluations.jsonl"
    append_line(path, evaluation(0, greedy=0.9))
    append_line(path, evaluation(5))
    assert LineReader(path, Evaluation).new_lines() == [evaluation(0, greedy=0.9), evaluation(5)]


def test_a_resumed_trainer_voids_the_steps_after_its_checkpoint() -> None:
    """Going back to step 2 leaves steps 0 and 1 of the first start, and the new ones."""
    progress = Progress(seed=0, total_steps=10)
    progress.add_steps(TrainerLine(step=step, reward_mean=0.1) for step in range(5))
    progress.add_steps([TrainerLine(step=2, reward_mean=0.9)])
    assert [(line.step, line.reward_mean) for line in progress.ordered] == [(0, 0.1), (1, 0.1), (2, 0.9)]
    assert progress.done_steps == 3


def test_accuracy_after_is_known_only_once_greedy_was_measured_at_the_end() -> None:
    """An evaluation on the way is no result; the last one of a step counts."""
    progress = Progress(seed=0, total_steps=10)
    progress.add_evaluation(evaluation(0, 0.2, 0.8))
    progress.add_evaluation(evaluation(8, 0.4))
    progress.add_evaluation(evaluation(8, 0.5))
    assert (progress.before, progress.after) == (evaluation(0, 0.2, 0.8), None)
    progress.add_evaluation(evaluation(10, 0.6, 0.9))
    assert progress.after == evaluation(10, 0.6, 0.9)
    assert [one.sampled for one in progress.evaluations] == [0.2, 0.5, 0.6]


def test_time_left_comes_from_the_recent_steps_of_this_start() -> None:
    """The pause between two starts does not count as a slow step."""
    progress = Progress(seed=0, total_steps=110)
    progress.add_steps(TrainerLine(step=step, time=float(step)) for step in range(5))
    progress.first_step = 5
    assert progress.seconds_left is None
    progress.add_steps(TrainerLine(step=step, time=1000 + 0.5 * step) for step in range(5, 10))
    assert progress.seconds_left == pytest.approx(50)


def test_speeds_are_tokens_over_the_time_between_lines() -> None:
    """Trained tokens of a line belong to the time before it; generated ones are a running count."""
    progress = Progress(seed=0, total_steps=10)
    progress.add_steps(TrainerLine(step=step, time=float(step), tokens=300) for step in range(4))
    progress.generated = [GeneratorLine(time=0.0, generated_tokens=0), GeneratorLine(time=2.0, generated_tokens=500)]
    assert progress.trained_tokens_per_s == pytest.approx(300)
    assert progress.generated_tokens_per_s == pytest.approx(250)


def test_waiting_adds_up_by_reason_and_names_the_rest_fetching() -> None:
    """Time of the request that brought the batch has no reason of its own."""
    lines = [
        TrainerLine(step=0, wait_s=1.0, wait_reasons={"no_groups": 0.75}, train_s=2.0, publish_s=1.0),
        TrainerLine(step=1, wait_s=1.0, wait_reasons={"too_few_groups": 1.0}, train_s=2.5, publish_s=0.5),
    ]
    total = waited(lines)
    assert total.share == pytest.approx(0.25)
    assert total.shares() == pytest.approx({"too_few_groups": 0.125, "no_groups": 0.09375, "fetching": 0.03125})


def test_no_steps_have_no_waiting() -> None:
    """Nothing is divided by nothing."""
    assert waited([]).share == 0.0


def test_phases_add_up_when_they_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a phase stops when another begins."""
    now = iter([0.0, 1.0, 3.0, 7.0, 8.0])
    monkeypatch.setattr("replaybuf.lab.demo.progress.time.monotonic", lambda: next(now))
    phases = Phases()
    for name in ("starting", "training", "starting"):
        phases.enter(name)
    phases.leave()
    assert phases.seconds == {"starting": 3.0, "training": 4.0}
