"""Run configurations as the ledger holds them."""

from __future__ import annotations

from typing import Any

import msgspec

from replaybuf.errors import Unreadable
from replaybuf.wire.config import RunConfig
from replaybuf.wire.prepared_types import prepared


def recorded(config: RunConfig) -> dict[str, Any]:
    """Render a configuration for the ledger."""
    fields: dict[str, Any] = msgspec.to_builtins(config)
    return fields


def read_config(fields: dict[str, Any], where: str) -> RunConfig:
    """Read what `recorded` rendered; `where` names its place. Raises `Unreadable`."""
    try:
        return msgspec.convert(fields, prepared(RunConfig))
    except msgspec.ValidationError as error:
        raise Unreadable(f"the configuration in {where} does not decode: {error}") from error
