"""The simulation: known seeds hold, a seed is always the same schedule, and broken guarantees are found."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.broken import redis_of, simulate_broken
from tests.simulation.mix import CLUSTER, SENTINEL, SINGLE
from tests.simulation.plan import Plan
from tests.simulation.schedule import digest, simulate

FOUND = {
    14: "a follower served a batch that a rewind took back",
    102: "a follower showed the ticket of a stored prompt",
    1042: "a server that began to lead rejected groups by the tickets of before",
    1044: "a ticket was issued again for a prompt whose group another server had stored",
    202000: "a leader that stood still kept an old state after another one had led and handed the run back",
    910045: "a server that answered its last calls had closed its spill folder, and stored groups became dead letters",
    1049: "groups that came during a takeover kept their tickets",
    5001146: "an append was stored in a run after its deletion",
    5006676: "a server that had lost the lead refused to attach at a checkpoint of its successor",
    6000194: "the removal of a ticket overtook the late write that issued it",
    7040307: "the first write of a connection did not wait for the disk, and a crash lost a stored group",
    31697045: "a leader kept the deadline of a ticket whose issue never reached Redis, and issued it again too early",
    5002003: "a server opened a run that was deleted and restored meanwhile, and knew no ends of it",
}
"""Seeds that found a bug, and which. A change of the load changes what a seed does: each bug has its own test too."""
FOUND_ON_CLUSTER = {
    4: "a server that did not know a lost payload wrote to its bucket, and hid the loss",
    700061: "a suspended server wrote to a bucket that had lost a payload, got an error, and did not look for the loss",
    900034: "an append was published in a newer round than that of its notes, after its payloads had been deleted",
    20200: "a primary that became a replica meanwhile refused WAITAOF, and no write waited for the disk any more",
    5005893: "a ticket passed its deadline after its group was stored, and before the leader heard of it",
    7033298: "a call was answered 500, because its run was dropped before it was forwarded to the leader",
    7055341: "a leader without a token kept its lease for ever, and nobody led",
    7032905: "a new leader did not read groups that others had just stored, and exact slots took later prompts",
    7058697: "a full node counted a payload, with the number of a lost one, and refused it: the sweep hid the loss",
    7000665: "the payload of a suspended append had the number of a lost one, and was deleted before anybody noticed",
}
FOUND_ON_SENTINEL = {
    7036985: "a former leader returned a page of a cursor that was recorded as done at its successor",
    7032462: "a task cancelled itself as it noticed another primary, and the loop that reads tickets ended for good",
    7034261: "the server that knew more asked a promoted replica again after the second in which nobody writes",
    7010394: "a leader wrote to a promoted replica before the server that knew more could show it",
}
FOUND_WHEN_BROKEN = (
    "deduplication",
    "handover",
    "rewind-order",
    "shorter-history",
    "rules",
    "bucket",
    "token",
    "bucket-suspended",
    "late-reply",
    "early-answer",
)
"""Guarantees that each take at most a few dozen schedules; docs/how-this-is-tested.md has the numbers of all."""
MOST_SCHEDULES = 150
"""Which seed finds a broken guarantee changes with the code of the service."""


@pytest.mark.parametrize(
    ("seed", "redis"),
    [
        (seed, redis)
        for seeds, redis in ((FOUND, SINGLE), (FOUND_ON_CLUSTER, CLUSTER), (FOUND_ON_SENTINEL, SENTINEL))
        for seed in seeds
    ],
)
def test_a_schedule_that_once_failed_holds(seed: int, redis: str) -> None:
    """Every guarantee of the checker of chaos, and progress after the last fault."""
    assert simulate(Plan(seed, redis=redis)).violations == []


def test_a_seed_is_one_schedule_under_any_hash_seed() -> None:
    """Else a failure could not be replayed: sets and dicts of other processes have another order.

    The seed has producers by HTTP, on a cluster.
    """
    command = [sys.executable, "-m", "tests.simulation", "--seed", "9", "--faults-s", "1", "--redis", CLUSTER]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONHASHSEED": "1"}, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outcome = simulate(Plan(9, faults_s=1.0, redis=CLUSTER), traced=True)  # this process has another hash seed
    assert digest(outcome.trace) in ended.stdout.splitlines()[-1]


@pytest.mark.parametrize("broken", FOUND_WHEN_BROKEN)
def test_a_broken_guarantee_is_found(broken: str) -> None:
    """A simulation that finds nothing when a guarantee is gone proves nothing when it is there."""
    plans = (Plan(seed, broken, redis=redis_of(broken)) for seed in range(MOST_SCHEDULES))
    assert any(simulate_broken(plan).violations for plan in plans)
