"""Means over the newest groups, merged by rollouts and tokens."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from replaybuf.generator.metrics import exposition
from replaybuf.generator.recent import WINDOW_GROUPS, RecentGroups
from tests.builders import group, rollout
from tests.generator.doubles import ServiceDouble
from tests.generator.test_stages import Sums
from tests.generator.worlds import completed


def test_groups_of_different_sizes_count_by_their_rollouts() -> None:
    recent = RecentGroups()
    assert recent.means() is None
    recent.add(group(rollout(reward=1.0), rollout(reward=1.0), rollout(reward=0.0)))
    recent.add(group(rollout(reward=0.0)))
    means = recent.means()
    assert means is not None and (means.groups, means.reward, means.kl) == (2, 0.5, {})
    assert means.completion_tokens == 3.0


def test_kl_is_the_estimate_over_sampled_tokens_where_both_logprobs_are_there() -> None:
    """The second token is the environment's; the third has an impossible reference logprob."""
    recent = RecentGroups()
    columns = {"completion_mask": [1, 0, 1], "inference_logprobs": [-1.0, 0.0, -40.0]}
    recent.add(group(rollout(**columns, ref_logprobs=[-2.0, -9.0, -0.5])))
    recent.add(group(rollout()))
    means = recent.means()
    assert means is not None and list(means.kl) == ["ref"]
    first, third = math.exp(-1.0) - 1 + 1.0, math.expm1(20.0) - 20.0
    assert means.kl["ref"] == pytest.approx((first + third) / 2)


def test_equal_logprobs_have_no_kl_and_old_groups_leave() -> None:
    recent = RecentGroups()
    recent.add(group(rollout(reward=9.0)))
    for _ in range(WINDOW_GROUPS):
        recent.add(group(rollout(reward=1.0, inference_logprobs=[-0.5] * 3, old_logprobs=[-0.5] * 3)))
    means = recent.means()
    assert means is not None and (means.groups, means.reward, means.kl) == (WINDOW_GROUPS, 1.0, {"old": 0.0})


def test_the_means_are_metrics_and_in_the_status_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    w = completed(tmp_path, ServiceDouble(prompts=3), stages=[Sums("ref_logprobs", 4)])
    lines = exposition("r", w.daemon).decode().splitlines()
    shown = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "_mean{" in line}
    assert shown["replaybuf_generator_reward_mean"] == 1.0
    lengths = np.concatenate([group.completion_lengths for group in w.service.groups])
    assert shown["replaybuf_generator_completion_tokens_mean"] == pytest.approx(lengths.mean())
    assert shown["replaybuf_generator_kl_mean"] >= 0.0
    assert "last 3 groups: reward 1.000, length 3.0, KL to ref " in caplog.text
