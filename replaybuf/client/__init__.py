"""Clients of a service: calls, batch readers, builders of groups, direct mode, values per rollout of packed rows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replaybuf.client.client import AsyncClient, Backoff, Client
    from replaybuf.client.direct import DirectBodies
    from replaybuf.client.producers import group_builder
    from replaybuf.client.reader import BatchReader, ReaderOptions, StepReader
    from replaybuf.client.resume import attach_at
    from replaybuf.client.unpack import GroupSum, RolloutKey, merge_sums, per_group, per_rollout, rollout_keys

__all__ = [
    "AsyncClient",
    "Backoff",
    "BatchReader",
    "Client",
    "DirectBodies",
    "GroupSum",
    "ReaderOptions",
    "RolloutKey",
    "StepReader",
    "attach_at",
    "group_builder",
    "merge_sums",
    "per_group",
    "per_rollout",
    "rollout_keys",
]

_MODULES = {
    "client": ("AsyncClient", "Backoff", "Client"),
    "direct": ("DirectBodies",),
    "producers": ("group_builder",),
    "reader": ("BatchReader", "ReaderOptions", "StepReader"),
    "resume": ("attach_at",),
    "unpack": ("GroupSum", "RolloutKey", "merge_sums", "per_group", "per_rollout", "rollout_keys"),
}


def __getattr__(name: str) -> Any:
    # Loaded at first use: importing redis for the direct mode takes as long as everything else together.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
