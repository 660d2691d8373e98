"""Change the adapters of a live run: add, pause, continue, remove. Pure.

A removed adapter stays in the configuration, marked: its batches may come again after a rewind, and its prompts and
group ids are used. So a name that is added again continues where it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from replaybuf.errors import Conflict, Invalid
from replaybuf.wire.config import AdapterSpec, RunConfig
from replaybuf.wire.config_patch import AdapterChange


def change_adapters(config: RunConfig, changes: Mapping[str, AdapterChange | None]) -> RunConfig:
    """Return the configuration with these changes; None removes an adapter. Raises `Conflict` and `Invalid`."""
    if not config.adapters:
        detail = "the run has no adapters, and its groups have none; create a run with adapters under another name"
        raise Conflict(detail, name="adapters", value=sorted(changes))
    adapters = dict(config.adapters)
    for name, change in changes.items():
        adapters[name] = _remove(name, adapters) if change is None else _add_or_change(name, change, adapters)
    changed = msgspec.structs.replace(config, adapters=adapters)
    if not changed.kept_adapters:
        detail = "the change removes the last adapter; pause it, or finish the run"
        raise Conflict(detail, name="adapters", value=sorted(changes), bound="one adapter left")
    return changed


def _remove(name: str, adapters: Mapping[str, AdapterSpec]) -> AdapterSpec:
    if name not in adapters:
        names = sorted(adapters)
        detail = f"adapters.{name} is null, but the run has no such adapter; it has {names}"
        raise Invalid(detail, name=f"adapters.{name}", value=None, bound=names)
    return msgspec.structs.replace(adapters[name], removed=True, paused=False)


def _add_or_change(name: str, change: AdapterChange, adapters: Mapping[str, AdapterSpec]) -> AdapterSpec:
    field = f"adapters.{name}.groups_per_batch"
    before = adapters.get(name)
    if before is None and "groups_per_batch" not in change.fields:
        raise Invalid(f"{field} is missing; a new adapter needs it", name=field, value=None, bound=1)
    spec = msgspec.structs.replace(change.of(before or AdapterSpec(groups_per_batch=1)), removed=False)
    for fixed in ("groups_per_batch", "prompts", "steps_per_publish"):
        if before and getattr(spec, fixed) != getattr(before, fixed):
            field, old, new = f"adapters.{name}.{fixed}", getattr(before, fixed), getattr(spec, fixed)
            detail = (
                f"{field} is {old} and cannot change to {new}, also after the adapter was removed; PATCH changes "
                "`paused` of an adapter. For other sizes add an adapter with another name"
            )
            raise Conflict(detail, name=field, value=new, bound=old)
    return spec
