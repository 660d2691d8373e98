"""Changes of the configuration of a live run: the JSON of `PATCH /v1/runs/{run}`, and how two configurations differ."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from replaybuf.wire.config import (
    MOST_ADAPTERS,
    Admissions,
    BatchSpec,
    Filters,
    GroupCount,
    Limits,
    Positive,
    RunConfig,
    Seconds,
    Spec,
    StoredBytes,
    TokenBudget,
)
from replaybuf.wire.names import Name


class StrategyChange(Spec, frozen=True):
    """New strategy (None = the run's own) with all its options; an absent option gets its default."""

    name: Name | None = None
    options: dict[str, Any] = field(default_factory=dict)


class LimitsChange(Spec, frozen=True):
    """New limits: an absent limit stays, null restores its default."""

    max_tokens_live: Positive | UnsetType | None = UNSET
    max_bytes_live: Positive | UnsetType | None = UNSET
    max_bytes_in_memory: Positive | UnsetType | None = UNSET
    max_group_bytes: StoredBytes | UnsetType | None = UNSET

    def of(self, limits: Limits) -> Limits:
        """Return `limits` with these changes."""
        bounds = msgspec.structs.asdict(limits)
        bounds |= {name: bound for name, bound in msgspec.structs.asdict(self).items() if bound is not UNSET}
        return Limits(**{name: bound for name, bound in bounds.items() if bound is not None})


class AdapterChange(Spec, frozen=True):
    """A new adapter, which needs `groups_per_batch`, or a change of `paused`; an absent field stays."""

    groups_per_batch: GroupCount | UnsetType = UNSET
    prompts: Positive | UnsetType | None = UNSET
    steps_per_publish: Positive | UnsetType | None = UNSET
    paused: bool | UnsetType = UNSET


class BatchChange(Spec, frozen=True):
    """New budgets and rules of batches, from the next unassembled step on: an absent field stays."""

    tokens_per_batch: TokenBudget | UnsetType = UNSET
    groups_per_batch: GroupCount | UnsetType | None = UNSET
    tail: Literal["train", "drop"] | UnsetType = UNSET
    timeout_s: Seconds | UnsetType | None = UNSET
    min_groups: GroupCount | UnsetType = UNSET

    def of(self, batch: BatchSpec) -> BatchSpec:
        """Return `batch` with these changes."""
        changes = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not UNSET}
        return msgspec.structs.replace(batch, **changes)


class ConfigPatch(Spec, frozen=True):
    """JSON of `PATCH /v1/runs/{run}`: changes of a live run; an absent or null part stays.

    `adapters`: by name; null removes an adapter.
    """

    strategy: StrategyChange | None = None
    filters: Filters | None = None
    admissions: Admissions | None = None
    limits: LimitsChange | None = None
    batch: BatchChange | None = None
    state: Literal["running", "paused", "finished"] | None = None
    adapters: Annotated[dict[Name, AdapterChange | None], Meta(max_length=MOST_ADAPTERS)] | None = None


def differing_fields(old: RunConfig, new: RunConfig) -> list[str]:
    """List the dotted names of the fields in which two configurations differ."""

    def walk(prefix: str, left: Any, right: Any) -> list[str]:
        if isinstance(left, dict) and isinstance(right, dict) and prefix.count(".") < 2:
            keys = sorted(left.keys() | right.keys())
            return [path for key in keys for path in walk(f"{prefix}{key}.", left.get(key), right.get(key))]
        return [] if left == right else [prefix.removesuffix(".")]

    return walk("", msgspec.to_builtins(old), msgspec.to_builtins(new))
