"""Decide each CONFIG record: create a run, change it and its adapters, pause and finish it.

A removed adapter stays in the configuration, marked: its batches may come again after a rewind, and its prompts and
group ids are used. So a name that is added again continues where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from replaybuf.errors import Conflict, Invalid, NotFound, counted
from replaybuf.kernel.decide.eviction import PIECE
from replaybuf.kernel.rows.index import IN_BATCHES, LIVE
from replaybuf.kernel.state.lookups import explain_failed_share
from replaybuf.kernel.state.run_state import RunPhase, RunState
from replaybuf.kernel.strategy.plugin_set import Bounds, resolve_config
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.kernel.strategy.usability import bounded_versions
from replaybuf.wire.config import AdapterSpec, BatchSpec, RunConfig, StrategySpec, recorded
from replaybuf.wire.config_patch import FIXED_OF_ADAPTER, AdapterChange, ConfigPatch
from replaybuf.wire.ledger import AnyRecord, ConfigRecord, EvictRecord

_MERGED = {"strategy", "limits", "batch", "adapters", "state"}
"""Fields of a PATCH that change a part of theirs; the others replace the field of the configuration."""


def config_of(state: RunState) -> RunConfig:
    """Return the configuration in force. Raises `NotFound` before the first record."""
    if state.config is None:
        raise NotFound("the run has no configuration yet; create it with PUT", name="config")
    return state.config


def decide_create(config: RunConfig, now_s: float) -> ConfigRecord:
    """Decide the first record of a run. Raises `Invalid` for a configuration that cannot work."""
    for name in {*config.adapter_names} - {*config.kept_adapters}:
        field = f"adapters.{name}.removed"
        raise Invalid(f"{field} is true; a new run has no removed adapters", name=field, value=True, bound=False)
    resolved, bounds = resolve_config(config)
    return ConfigRecord(config=recorded(resolved), max_uses=bounds.max_uses, at_s=now_s)


def decide_phase(state: RunState, phase: RunPhase, reason: str | None, now_s: float) -> ConfigRecord:
    """Decide that the run is running, paused or finished from here on."""
    config = recorded(config_of(state))
    return ConfigRecord(config=config, max_uses=state.max_uses, state=phase, reason=reason, at_s=now_s)


def decide_failed_share(state: RunState, now_s: float) -> ConfigRecord | None:
    """Decide to pause or finish a running run whose share is exceeded, as `tickets.on_failed_share` says."""
    rule, why = config_of(state).tickets.on_failed_share, explain_failed_share(state)
    if why is None or state.phase != "running" or rule == "alarm":
        return None
    return decide_phase(state, "paused" if rule == "pause" else "finished", why, now_s)


def decide_end(state: RunState, selector: Selector, now_s: float) -> Iterator[AnyRecord]:
    """Yield the records that finish a run which waits for groups, if no more can come and no batch is in training.

    The groups that are left are evicted first. A crash in between leaves fewer of them, and the run ends all the same.
    """
    if state.next_step > state.step or not selector.batches_exhausted():
        return
    live = state.index["number"][state.index.live()]
    for start in range(0, len(live), PIECE):
        numbers = live[start : start + PIECE].tolist()
        yield EvictRecord(step=state.next_step, numbers={"tail": numbers}, at_s=now_s)
    yield decide_phase(state, "finished", "prompts", now_s)


def decide_patch(state: RunState, patch: ConfigPatch, now_s: float) -> ConfigRecord | None:
    """Decide a change of what `PATCH` takes. Raises `Conflict` and `Invalid`."""
    config, max_uses = config_of(state), state.max_uses
    changed = _patched(config, patch)
    if changed != config or patch.state == "running":  # else a run whose plug-in is missing could not be paused
        ranks = state.attachment.dp_world_size if state.attachment else 1
        changed, bounds = resolve_config(changed, ranks)
        max_uses = bounds.max_uses
        if changed.batch != config.batch:
            _check_not_fixed(state, config.batch, changed.batch)
            check_live_groups(state, changed, ranks)
        if patch.strategy or changed.on_stale != config.on_stale:
            _check_unacked_batches(state, changed, bounds)
    phase: Any = patch.state or state.config_phase
    if state.phase == "finished" and state.config_phase != "finished" and patch.state not in (None, "finished"):
        detail = (
            f"the run is finished for good, because it reached max_steps = {config.max_steps}; it cannot be {phase}"
        )
        raise Conflict(detail, name="state", value=phase, bound="finished")
    reason = "operator" if patch.state else state.phase_reason
    reason = None if phase == "running" else reason
    if (changed, max_uses, phase, reason) == (config, state.max_uses, state.config_phase, state.phase_reason):
        return None
    return ConfigRecord(config=recorded(changed), max_uses=max_uses, state=phase, reason=reason, at_s=now_s)


def check_revision(state: RunState, revision: int | None) -> None:
    """Raise `Conflict` if the run was changed after the `revision` that the caller has seen; None = any."""
    changes = state.figures.changes
    if revision is not None and revision != changes.revision:
        detail = (
            f"if_revision is {revision}; the run has revision {changes.revision} and nothing was changed: read it "
            f"again. Changed meanwhile: {changes.describe_since(revision) or 'unknown'}"
        )
        raise Conflict(detail, name="if_revision", value=revision, bound=changes.revision)


def check_deletable(state: RunState, run: str) -> None:
    """Raise `Conflict` unless a run is finished."""
    if state.phase != "finished":
        detail = (
            f'run {run} is {state.phase}; only a finished run can be deleted: send PATCH {{"state": "finished"}} first'
        )
        raise Conflict(detail, name="state", value=state.phase, bound="finished")


def _patched(config: RunConfig, patch: ConfigPatch) -> RunConfig:
    fields: dict[str, Any] = {}
    for name in {*ConfigPatch.__struct_fields__} - _MERGED:
        value = getattr(patch, name)
        if value is not None:
            fields[name] = value
    if patch.limits:
        fields["limits"] = patch.limits.of(config.limits)
    if patch.batch:
        fields["batch"] = patch.batch.of(config.batch)
    if patch.strategy:
        named = patch.strategy.name or config.strategy.name
        fields["strategy"] = StrategySpec(name=named, options=patch.strategy.options)
    changed = msgspec.structs.replace(config, **fields)
    return change_adapters(changed, patch.adapters) if patch.adapters else changed


def check_live_groups(state: RunState, config: RunConfig, ranks: int) -> None:
    """Raise `Conflict` for a token budget that a group exceeds which is live, or may be live after a resume."""
    budget, index = config.batch.token_budget(ranks), state.index
    kept = np.isin(index["state"], (LIVE, IN_BATCHES))
    largest = int(index["tokens"][kept].max(initial=0))
    if budget is not None and largest > budget:
        detail = (
            f"a batch would hold {counted(budget, 'token')} on {counted(ranks, 'rank')}; the largest live group "
            f"has {largest}, and no batch could ever hold it: set a larger batch.tokens_per_batch"
        )
        raise Conflict(detail, name="batch.tokens_per_batch", value=budget, bound=largest)


def _check_not_fixed(state: RunState, before: BatchSpec, after: BatchSpec) -> None:
    """Raise `Conflict` if the attached trainer needs equal batches, which it trains wrongly at another size."""
    if state.attachment is None or not state.attachment.fixed:
        return
    old, new = msgspec.to_builtins(before), msgspec.to_builtins(after)
    names = [name for name in new if new[name] != old[name]]
    changes = ", ".join(f"batch.{name} from {old[name]} to {new[name]}" for name in names)
    detail = (
        f"the trainer of epoch {state.epoch} attached with fixed: true, because it needs equal batches, so {changes} "
        "is refused. Stop it, attach without fixed, change the batches, and start the trainer with its new size"
    )
    raise Conflict(detail, name="fixed", value=names, bound=[])


def _check_unacked_batches(state: RunState, config: RunConfig, bounds: Bounds) -> None:
    """Raise `Conflict` for bounds that a batch in training breaks."""
    for step, batch in state.batches.items():
        if batch.acked:
            continue
        rows = state.index.rows_of(batch.numbers)
        ages = state.versions_at(step, rows) - bounded_versions(config, state.index, rows)
        for name, bound, largest in (
            ("max_staleness", bounds.max_staleness, int(ages.max())),
            ("max_uses", bounds.max_uses, int(state.index["times_sampled"][rows].max())),
        ):
            if bound is not None and largest > bound:
                detail = f"{name} would be {bound}; batch {step} is not acked yet and has {largest}: ack it first"
                raise Conflict(detail, name=name, value=bound, bound=largest)


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
    for fixed in FIXED_OF_ADAPTER:
        if before and getattr(spec, fixed) != getattr(before, fixed):
            field, old, new = f"adapters.{name}.{fixed}", getattr(before, fixed), getattr(spec, fixed)
            detail = (
                f"{field} is {old} and cannot change to {new}, also after the adapter was removed; PATCH changes "
                "`paused` of an adapter. For other sizes add an adapter with another name"
            )
            raise Conflict(detail, name=field, value=new, bound=old)
    return spec
