"""Status of a generator: counts since the start, rates and mean reward since the last status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replaybuf.generator.progress import Progress, append_status
from tests import builders


def test_counts_grow_while_rates_restart_with_every_status() -> None:
    progress = Progress(now_s=100.0)
    for _ in range(4):
        progress.record_stored(builders.group(), 0.1)  # two rollouts of three tokens, rewards 1 and 0
    first = progress.status(102.0, 5.0, None)
    assert (first.groups, first.rollouts, first.generated_tokens) == (4, 8, 24)
    assert (first.rollouts_per_s, first.tokens_per_s, first.reward_mean) == (4.0, 12.0, 0.5)
    second = progress.status(104.0, 1000.0, "rate_limited")
    assert (second.groups, second.rollouts_per_s, second.reward_mean) == (4, 0.0, None)
    assert second.waiting == "rate_limited"
    progress.record_stored(builders.group(builders.rollout(reward=0.25)), 0.1)
    assert progress.status(105.0, 3.0, None).reward_mean == 0.25


@pytest.mark.parametrize(("seconds", "lacked"), [(0.0, 2 * 3), (1.0, 2 * 2), (3.0, 21 / 2), (90.0, 21 / 2)])
def test_an_aborted_group_saves_what_it_lacked_by_the_pace_of_stored_groups(seconds: float, lacked: float) -> None:
    """Stored rollouts have three tokens after 3 s. A group that outlasts them is expected half way to 24 tokens."""
    progress = Progress(now_s=0.0)
    progress.record_stored(builders.group(), 3.0)
    progress.record_aborted(2, 24, seconds)
    assert progress.groups_aborted == 1
    assert progress.tokens_saved == round(lacked)


def test_the_last_token_of_an_aborted_group_counts() -> None:
    progress = Progress(now_s=0.0)
    progress.record_stored(builders.group(), 3.0)
    progress.record_aborted(2, 3, 90.0)
    assert progress.tokens_saved == 1


def test_each_line_of_the_metrics_file_is_one_json_object(tmp_path: Path) -> None:
    progress, file = Progress(now_s=0.0), tmp_path / "generate.jsonl"
    progress.given_back["reward_raised"] += 1
    append_status(file, progress.status(1.0, 1.0, None))
    append_status(file, progress.status(2.0, 2.0, "engine_away"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["time"] for line in lines] == [1.0, 2.0]
    assert lines[1]["waiting"] == "engine_away"
    assert lines[0]["given_back"] == {"reward_raised": 1}
    assert {"time", "groups", "rollouts", "generated_tokens", "reward_mean", "waiting"} <= lines[0].keys()
