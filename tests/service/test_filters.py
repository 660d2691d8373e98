"""The built-in filters in a real service, with every built-in strategy: what they drop is replaced and counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from replaybuf.plugins.entry_points import STRATEGIES, names
from replaybuf.wire.batch import read_batch
from tests.conftest import RunClient, group

FILTERS = [
    {"name": "zero-variance"},
    {"name": "reward-window", "options": {"low": 0.2, "high": 0.8}},
    {"name": "overlong", "options": {"max_truncated": 0.25}},
]
KINDS = {
    "good": ((0, 1, 0, 1), 0),
    "flat": ((1, 1, 1, 1), 0),
    "easy": ((1, 1, 1, 0.9), 0),
    "hard": ((0, 0, 0, 0.1), 0),
    "cut": ((0, 1, 0, 1), 2),
}
"""Rewards of the rollouts, and how many of them ended at their token limit."""
REASONS = {"flat": "zero_variance", "easy": "too_easy", "hard": "too_hard", "cut": "truncated_rollouts"}


def made(kind: str, ticket: str) -> dict[str, Any]:
    """Build the group of a ticket."""
    rewards, cut = KINDS[kind]
    built = group(None, rollouts=len(rewards), ticket=ticket) | {"prompt_id": kind}
    for number, (rollout, reward) in enumerate(zip(built["rollouts"], rewards, strict=True)):
        rollout |= {"reward": reward, "finish_reason": "length" if number < cut else "stop"}
    return built


@pytest.mark.parametrize("strategy", sorted({*names(STRATEGIES)} - {"recorded"}))  # it gives no tickets
def test_a_batch_is_as_large_with_filters_as_without(run: RunClient, strategy: str) -> None:
    """Admission lets others come for those that were dropped, until there are enough good ones."""
    assert run.put(batch={"groups_per_batch": 3}, strategy={"name": strategy}, filters=FILTERS).status_code == 201
    epoch, kinds = run.attach(), list(KINDS)
    sent: Counter[str] = Counter()
    while (answer := run.batch(0, epoch)).status_code == 202:
        tickets = run.post("tickets", producer="p", count=4).json()["tickets"]
        assert tickets and sent.total() < 60, run.state()
        for ticket in tickets:
            kind = kinds[ticket["prompt_index"] % len(kinds)]
            run.append(made(kind, ticket["ticket"]))
            sent[kind] += 1
    assert read_batch(answer.content).meta.batch_groups == 3
    assert {used["prompt_id"] for used in run.get("batches/0/record").json()["groups"]} == {"good"}
    assert run.state()["groups"]["evicted"] == {reason: sent[kind] for kind, reason in REASONS.items()}
