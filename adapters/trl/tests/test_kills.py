"""kill -9 of trainer, service and Valkey at random moments: TRL trains what the ledger says, and learns.

The batches of two runs differ, because generators are asynchronous. So each run is held against its own ledger.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path

import pytest
from training import rollout_digest
from whole_run import GROUP_SIZE, GROUPS, WholeRun, mean_reward, rollouts_of

from replaybuf.lab.demo.changes import paired_change, window_change

STEPS_TO_LEARN = 50
"""In fewer steps accuracy may rise by less than its standard error shows."""


@pytest.mark.timeout(3600)
def test_random_kills_change_nothing_that_trl_trains(
    warm_model: Path, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    kills, seed = request.config.getoption("--kills"), request.config.getoption("--kill-seed")
    steps = request.config.getoption("--steps") or 2 * kills + 10
    with WholeRun(tmp_path, warm_model, steps=steps, save_steps=3) as whole:
        whole.kill_at_random(kills, random.Random(seed))
        whole.finish()
        groups, records = whole.groups(), list(whole.records())
        attempts = whole.attempts()
        state = whole.client.state()
        change = paired_change(whole.accuracy_before, whole.held_out_accuracy())

    assert whole.kills.total() == kills
    for step, record in enumerate(records):
        expected = sorted(map(rollout_digest, rollouts_of(record, groups)))
        final = attempts[step][-1]
        assert sorted(itertools.chain(*final)) == expected, f"step {step}"
        assert len(expected) == GROUPS * GROUP_SIZE
        for earlier in attempts[step][:-1]:  # killed within the step, or trained before a resume at an older checkpoint
            assert earlier == final[: len(earlier)], f"step {step}"
    bodies = {(line["step"], line["body"]) for line in whole.lines() if "body" in line}
    assert sorted(step for step, _ in bodies) == list(range(whole.steps)), "each step has one body, whoever asks"

    uses = Counter(used["group_id"] for record in records for used in record["groups"])
    assert set(uses.values()) == {1}
    counts = state["groups"]
    settled = counts["live"] + counts["in_batches"] + counts["retired"] + counts["dead_lettered"]
    assert counts["stored"] == len(groups) == settled + sum(counts["evicted"].values())
    assert all(math.isfinite(line["loss"]) for line in whole.micro_batches())
    assert change is not None
    reward = window_change([mean_reward(record, groups) for record in records])
    with capsys.disabled():
        repeated = sum(len(of_step) - 1 for of_step in attempts.values())
        print(f"\nkills {dict(whole.kills)}, {repeated} steps begun again in {steps}")
        print(change.describe("accuracy on held-out problems"))
        print(reward.describe("reward of the trained rollouts"))
    assert change.direction == 1 or steps < STEPS_TO_LEARN
