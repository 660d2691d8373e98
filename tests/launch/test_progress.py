"""Progress of the demo: growing metrics files, and sessions that resume earlier ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from replaybuf.launch.progress import (
    Evaluation,
    GeneratorLine,
    LineReader,
    Phases,
    Progress,
    TrainerLine,
)


def evaluation(step: int, sampled: float = 0.5, greedy: float | None = None) -> Evaluation:
    """Make an evaluation of 200 problems, 4 completions each."""
    return Evaluation(step=step, problems=200, samples=4, sampled=sampled, greedy=greedy)


def test_only_complete_new_lines_are_read(tmp_path: Path) -> None:
    """The next call reads a line that is still being written."""
    path = tmp_path / "train.jsonl"
    reader = LineReader(path, TrainerLine)
    assert reader.new_lines() == []
    path.write_text('{"step": 0}\n{"step": 1')
    assert [line.step for line in reader.new_lines()] == [0]
    with path.open("a") as file:
        file.write('}\n{"step": 2}\n')
    assert [line.step for line in reader.new_lines()] == [1, 2]
    assert reader.new_lines() == []


def test_unknown_fields_and_broken_lines_are_ignored(tmp_path: Path) -> None:
    """A trainer that is killed in the middle of a line leaves a broken line."""
    path = tmp_path / "train.jsonl"
    broken = b'{"step": 1, "lo{"step": 1}\n{"step": 1, "wait_reasons": {"\xff": 1}}\n'
    path.write_bytes(b'{"step": 0, "mood": "good"}\n' + broken + b'{"step": 2}\n')
    assert [line.step for line in LineReader(path, TrainerLine).new_lines()] == [0, 2]


def test_a_resumed_trainer_replaces_the_steps_after_its_checkpoint() -> None:
    """After a resume at step 2, steps 0 and 1 of the first session remain."""
    progress = Progress(seed=0, total_steps=10)
    progress.add_steps(TrainerLine(step=step, reward_mean=0.1) for step in range(5))
    progress.add_steps([TrainerLine(step=2, reward_mean=0.9)])
    assert [(line.step, line.reward_mean) for line in progress.lines] == [(0, 0.1), (1, 0.1), (2, 0.9)]
    assert progress.done_steps == 3


def test_accuracy_after_needs_a_greedy_evaluation_at_the_end() -> None:
    """An evaluation during the training is not a result; the last one of a step counts."""
    progress = Progress(seed=0, total_steps=10)
    progress.add_evaluation(evaluation(0, 0.2, 0.8))
    progress.add_evaluation(evaluation(8, 0.4))
    progress.add_evaluation(evaluation(8, 0.5))
    assert (progress.before, progress.after) == (evaluation(0, 0.2, 0.8), None)
    progress.add_evaluation(evaluation(10, 0.6, 0.9))
    assert progress.after == evaluation(10, 0.6, 0.9)
    assert [evaluation.sampled for evaluation in progress.evaluations] == [0.2, 0.5, 0.6]


def test_time_left_comes_from_the_recent_steps_of_this_session() -> None:
    """The pause between two sessions does not count as a slow step."""
    progress = Progress(seed=0, total_steps=110)
    progress.add_steps(TrainerLine(step=step, time=float(step)) for step in range(5))
    progress.first_step = 5
    assert progress.seconds_left() is None
    progress.add_steps(TrainerLine(step=step, time=1000 + 0.5 * step) for step in range(5, 10))
    assert progress.seconds_left() == pytest.approx(50)


def test_speeds_are_tokens_over_the_time_between_lines() -> None:
    """Trained tokens of a line belong to the time before it; generated tokens are a running count."""
    progress = Progress(seed=0, total_steps=10)
    progress.add_steps(TrainerLine(step=step, time=float(step), tokens=300) for step in range(4))
    progress.generated = [GeneratorLine(time=0.0, generated_tokens=0), GeneratorLine(time=2.0, generated_tokens=500)]
    assert progress.trained_tokens_per_s() == pytest.approx(300)
    assert progress.generated_tokens_per_s() == pytest.approx(250)


def test_waiting_is_summed_by_reason_and_the_rest_is_fetching() -> None:
    """The time of the request that returned the batch has no other reason."""
    lines = [
        TrainerLine(step=0, wait_s=1.0, wait_reasons={"no_groups": 0.75}, train_s=2.0, publish_s=1.0),
        TrainerLine(step=1, wait_s=1.0, wait_reasons={"too_few_groups": 1.0}, train_s=2.5, publish_s=0.5),
    ]
    progress = Progress(seed=0, total_steps=2)
    progress.add_steps(lines)
    waiting = progress.waiting()
    assert waiting.seconds == 2.0 and waiting.share == pytest.approx(0.25)
    assert waiting.by_reason == pytest.approx({"too_few_groups": 0.125, "no_groups": 0.09375, "fetching": 0.03125})


def test_without_steps_there_is_no_waiting() -> None:
    assert Progress(seed=0, total_steps=2).waiting().share == 0.0


def test_phases_add_up_when_they_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 7.0, 8.0])
    monkeypatch.setattr("replaybuf.launch.progress.time.monotonic", lambda: next(now))
    phases = Phases()
    for name in ("starting", "training", "starting"):
        phases.enter(name)
    phases.enter("")
    assert phases.seconds == {"starting": 3.0, "training": 4.0}
