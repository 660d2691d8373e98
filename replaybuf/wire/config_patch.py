"""Changes of the configuration of a live run: the JSON of `PATCH /v1/runs/{run}`, and how two configurations differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import NODEFAULT, UNSET, Meta, UnsetType, field

from replaybuf.wire.config import (
    MOST_ADAPTERS,
    AdapterSpec,
    Admissions,
    BatchSpec,
    Filters,
    Limits,
    OnStale,
    ReissueCount,
    RunConfig,
    Spec,
)
from replaybuf.wire.names import Name

S = TypeVar("S", bound=Spec)


class Change(Spec, frozen=True):
    """Base of the changes of one part: an absent field stays; null is the default where the field takes no null."""

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields that change, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}

    def of(self, part: S) -> S:
        """Return the part with these changes."""
        defaults = {known.name: known.default for known in msgspec.structs.fields(part) if not _takes_null(known.type)}
        changes = {name: defaults.get(name) if value is None else value for name, value in self.fields.items()}
        return msgspec.structs.replace(part, **changes)


def _takes_null(hint: Any) -> bool:
    return NoneType in get_args(get_args(hint)[0])


def _change_of(part: type[Spec], *fixed: str) -> type[Change]:
    """Derive the struct of changes of a part, without the fields that are `fixed` in a live run."""
    hints = get_type_hints(part, include_extras=True)
    fields = [
        (known.name, hints[known.name] | UnsetType | (UnsetType if known.default is NODEFAULT else None), UNSET)
        for known in msgspec.structs.fields(part)
        if known.name not in fixed
    ]
    name = f"{part.__name__.removesuffix('Spec')}Change"
    doc = f"New values of fields of `{part.__name__}`; an absent field stays."
    derived: type[Change] = msgspec.defstruct(
        name, fields, bases=(Change,), module=__name__, namespace={"__doc__": doc}, frozen=True
    )  # type: ignore[assignment]
    return derived


if TYPE_CHECKING:
    LimitsChange: TypeAlias = Change
    AdapterChange: TypeAlias = Change
    BatchChange: TypeAlias = Change
else:
    LimitsChange = _change_of(Limits)
    AdapterChange = _change_of(AdapterSpec, "removed")
    BatchChange = _change_of(BatchSpec, "seq_len", "pad_to_multiple_of", "overlong")

FIXED_OF_ADAPTER = ("groups_per_batch", "prompts", "steps_per_publish")
"""Fields of `AdapterChange` that only the change which adds an adapter sets."""


class StrategyChange(Spec, frozen=True):
    """New strategy (None = the run's own) with all its options; an absent option gets its default."""

    name: Name | None = None
    options: dict[str, Any] = field(default_factory=dict)


class ConfigPatch(Spec, frozen=True):
    """JSON of `PATCH /v1/runs/{run}`: changes of a live run; an absent or null part stays."""

    strategy: StrategyChange | None = None
    filters: Filters | None = None
    admissions: Admissions | None = None
    limits: LimitsChange | None = None
    batch: Annotated[
        BatchChange | None, Meta(description="New budgets and rules of batches, from the next unassembled step on.")
    ] = None
    on_stale: OnStale | None = None
    max_reissues: ReissueCount | None = None
    state: Literal["running", "paused", "finished"] | None = None
    adapters: (
        Annotated[
            dict[Name, AdapterChange | None],
            Meta(
                max_length=MOST_ADAPTERS,
                description="By name: a new adapter needs groups_per_batch; of others `paused` changes; null removes.",
            ),
        ]
        | None
    ) = None


def differing_fields(old: RunConfig, new: RunConfig) -> list[str]:
    """List the dotted names of the fields in which two configurations differ, of at most two parts."""
    return [name for name, _, _ in find_changes(msgspec.to_builtins(old), msgspec.to_builtins(new), depth=2)]


def find_changes(before: Any, after: Any, depth: float = math.inf, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted names, of at most `depth` parts, at which two trees differ, with both values; None = missing."""
    if isinstance(before, dict) and isinstance(after, dict) and depth:
        for key in sorted(before.keys() | after.keys()):
            inner = f"{name}.{key}" if name else key
            yield from find_changes(before.get(key), after.get(key), depth - 1, inner)
    elif before != after:
        yield name, before, after
