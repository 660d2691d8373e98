"""The runs that a chaos run trains, by name: their configuration and what their trainers keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chaos.content import COLUMN, GENERATED, GROUP_SIZE, VOCAB_SIZE

TICKET_TTL_S = 2.0
STAGED, SPILLED = "one-step", "replay"
"""Runs whose groups get a late column from `replaybuf stage`, and whose frames spill."""
CURSOR = "chaos"
GROUP_BYTES = 16_384
"""Largest group of a run that spills, and its frames in memory: about ten groups."""
ADAPTERS = "adapters"
"""The run that several adapters share."""
_ADAPTERS_TOKENS = 128
"""A small budget: it ends the share of an adapter, so the next turn matters."""


def _config(strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "strategy": {"name": strategy, "options": options},
        "batch": {"groups_per_batch": 4, "seq_len": 64},
        "group_size": GROUP_SIZE,
        "vocab_size": VOCAB_SIZE,
        "tickets": {"ttl_s": TICKET_TTL_S, "max_attempts": 3},
    }


REPLAY = {
    "max_uses": 3,
    "max_staleness": 4,
    "order": "prioritized",
    "look_ahead": 1,
    "priority": "feedback",
    "importance": 0.5,
    "cooldown": 1,
    "mix": {"a": 0.5, "b": 0.3, GENERATED: 0.2},
}
"""Everything that makes a group's uses depend on the history: priorities come with acks, and `c` is not in the mix."""
RUNS = {
    STAGED: _config("one-step-off-policy", {"max_staleness": 2, "requires": [COLUMN]}),
    "on-policy": _config("on-policy", {}),
    SPILLED: _config("replay", REPLAY),
}
KEEP = {STAGED: 2, "on-policy": 3, SPILLED: 2, ADAPTERS: 2}
"""Checkpoints that each run's trainer keeps."""


def spill_to(folder: Path) -> dict[str, Any]:
    """Return the fields of a configuration that make frames move to a folder."""
    limits = {"max_group_bytes": GROUP_BYTES, "max_bytes_in_memory": GROUP_BYTES}
    return {"limits": limits, "spill": {"url": f"file://{folder}"}}


def adapters_of(run: str, count: int) -> dict[str, dict[str, int]]:
    """Name the adapters of a run, with own batches and publications of several sizes; none but of `ADAPTERS`."""
    if run != ADAPTERS:
        return {}
    return {f"lora-{n}": {"groups_per_batch": 2 + n % 3, "steps_per_publish": 1 + n % 2} for n in range(count)}


def policies_of(run: str, adapters: int) -> list[str]:
    """Name the policies of a run: its adapters, or "" where it has none."""
    return list(adapters_of(run, adapters)) or [""]


def config_of(run: str, adapters: int, folder: Path | None) -> dict[str, Any]:
    """Return the configuration of a run; `adapters` says how many the run `ADAPTERS` has, `folder` is for frames.

    None = they stay in Redis.
    """
    if run == SPILLED and folder:
        return RUNS[run] | spill_to(folder)
    if run != ADAPTERS:
        return RUNS[run]
    base = _config("one-step-off-policy", {"max_staleness": 2})
    batch = {"tokens_per_batch": _ADAPTERS_TOKENS, "seq_len": 64}
    return base | {"batch": batch, "adapters": adapters_of(run, adapters)}
