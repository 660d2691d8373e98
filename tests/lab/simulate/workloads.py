"""Small workloads for tests of the simulator: seconds of virtual time, fractions of a second to run."""

from __future__ import annotations

from typing import Any

from replaybuf.lab.simulate.workload import Workload
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec, TicketSpec


def workload(**fields: Any) -> Workload:
    """Build a workload of 8 slots whose groups take about as long as a step."""
    small: dict[str, Any] = {
        "slots": 8,
        "group_s": 1.0,
        "token_s": 0.01,
        "prompt_tokens": 10,
        "length_mean": 100.0,
        "length_max": 1000,
        "train_s": 2.0,
        "publish_s": 0.5,
        "ranks": 2,
    }
    return Workload(**small | fields)


def config(strategy: str = "one-step-off-policy", options: dict[str, Any] | None = None, **fields: Any) -> RunConfig:
    """Build a run of 4 groups per batch, 4 rollouts per group."""
    small: dict[str, Any] = {
        "strategy": StrategySpec(name=strategy, options=options or {}),
        "batch": BatchSpec(tokens_per_batch=None, groups_per_batch=4),
        "group_size": 4,
        "tickets": TicketSpec(ttl_s=30.0),
    }
    return RunConfig(**small | fields)
