"""Clients of a service: calls, batch readers, builders of groups, direct mode, values per rollout of packed rows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replaybuf.client.async_session import AsyncBatchReader, AsyncTrainerSession
    from replaybuf.client.client import AsyncClient, Client
    from replaybuf.client.direct import DirectBodies
    from replaybuf.client.producers import group_builder
    from replaybuf.client.reader import BatchReader, ReaderOptions, StepReader
    from replaybuf.client.resume import attach_at, confirm_trainer, settle_at
    from replaybuf.client.retries import Backoff
    from replaybuf.client.session import TrainerSession
    from replaybuf.client.unpack import GroupSum, RolloutKey, merge_sums, per_group, per_rollout, rollout_keys

__all__ = [
    "AsyncBatchReader",
    "AsyncClient",
    "AsyncTrainerSession",
    "Backoff",
    "BatchReader",
    "Client",
    "DirectBodies",
    "GroupSum",
    "ReaderOptions",
    "RolloutKey",
    "StepReader",
    "TrainerSession",
    "attach_at",
    "confirm_trainer",
    "group_builder",
    "merge_sums",
    "per_group",
    "per_rollout",
    "rollout_keys",
    "settle_at",
]

_MODULES = {
    "async_session": ("AsyncBatchReader", "AsyncTrainerSession"),
    "client": ("AsyncClient", "Client"),
    "direct": ("DirectBodies",),
    "producers": ("group_builder",),
    "reader": ("BatchReader", "ReaderOptions", "StepReader"),
    "resume": ("attach_at", "confirm_trainer", "settle_at"),
    "retries": ("Backoff",),
    "session": ("TrainerSession",),
    "unpack": ("GroupSum", "RolloutKey", "merge_sums", "per_group", "per_rollout", "rollout_keys"),
}


def __getattr__(name: str) -> Any:
    # Loaded at first use: importing redis for the direct mode takes as long as everything else together.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
