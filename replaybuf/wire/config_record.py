"""Run configurations as the ledger holds them."""

from __future__ import annotations

from typing import Any

import msgspec

from replaybuf.errors import Unreadable
from replaybuf.wire.config import BatchSpec, RunConfig
from replaybuf.wire.shapes import prepared

LATER_FIELDS = (
    "min_group_size",
    "stale_token_mask",
    "tickets.heartbeat_s",
    "tickets.max_failed_share",
    "tickets.on_failed_share",
    "batch.tail",
    "batch.timeout_s",
    "batch.min_groups",
    "limits.max_bytes_in_memory",
    "spill",
)
"""Fields added since format 1. The ledger has them only where they differ from their default."""
LATER_ADAPTER_FIELDS = ("paused", "removed")
"""The same of each adapter; the default is False."""


def recorded(config: RunConfig) -> dict[str, Any]:
    """Render a configuration for the ledger: without the fields of `LATER_FIELDS` that have their default."""
    fields, defaults = msgspec.to_builtins(config), msgspec.to_builtins(RunConfig(batch=BatchSpec()))
    for path in LATER_FIELDS:
        section, _, name = path.rpartition(".")
        part, default = (fields[section], defaults[section]) if section else (fields, defaults)
        if part[name] == default[name]:
            del part[name]
    for spec in fields["adapters"].values():
        for name in LATER_ADAPTER_FIELDS:
            if not spec[name]:
                del spec[name]
    return dict(fields)


def read_config(fields: dict[str, Any], where: str) -> RunConfig:
    """Read what `recorded` rendered; `where` names its place. Raises `Unreadable`."""
    try:
        return msgspec.convert(fields, prepared(RunConfig))
    except msgspec.ValidationError as error:
        raise Unreadable(f"the configuration in {where} does not decode: {error}") from error
