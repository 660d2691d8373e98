"""The configuration of a run, as `PUT /v1/runs/{run}` takes it."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from replaybuf.errors import Invalid
from replaybuf.wire.columns import LARGEST_ROLLOUTS
from replaybuf.wire.frame import smallest_frame_bytes
from replaybuf.wire.group import hash_name

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Without `/` and `:`, which end an adapter's name in tickets, group ids and counters."""
MIN_TOKENS_PER_ROLLOUT = 2
"""One prompt token and one completion token: no rollout is shorter."""
LONGEST_ROW = 2**31 - 1
"""Positions in a row are 32-bit."""

LARGEST_INTEGER = 2**53 - 1
"""Largest whole number that every JSON reader keeps exactly; it also fits every column and record."""
LONGEST_S = 366 * 86400.0
MOST_ADAPTERS = 256
"""The state of a run explains why each adapter waits; all together take about a millisecond."""

Positive = Annotated[int, Meta(ge=1, le=LARGEST_INTEGER)]
NonNegative = Annotated[int, Meta(ge=0, le=LARGEST_INTEGER)]
RowTokens = Annotated[int, Meta(ge=MIN_TOKENS_PER_ROLLOUT, le=LONGEST_ROW)]
Seconds = Annotated[float, Meta(gt=0, le=LONGEST_S)]


MAX_RANKS = 4096


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`linear` per token, `quadratic` per token squared; only their ratio matters. Both >= 0, finite, not both 0."""

    linear: float
    quadratic: float

    def check(self) -> None:
        """Raise `Invalid` where the coefficients order nothing."""
        values = (self.linear, self.quadratic)
        if not all(math.isfinite(value) and value >= 0 for value in values) or not any(values):
            raise Invalid(
                f"cost is {self.linear}·L + {self.quadratic}·L²; both must be finite and >= 0, one of them above",
                name="cost",
                value=list(values),
                bound=0,
            )


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all parts: immutable; unknown fields are errors."""


class StrategySpec(Spec, frozen=True):
    """A strategy or filter by the name of its entry point, with its options."""

    name: str = "one-step-off-policy"
    options: dict[str, Any] = {}


class BatchSpec(Spec, frozen=True):
    """What makes a batch full. A batch never exceeds `tokens_per_batch` and never splits a group.

    `seq_len` is the room of one micro-batch in tokens; a longer rollout goes by the rule `overlong`.
    """

    tokens_per_batch: Positive | None = 65536
    groups_per_batch: Positive | None = None
    seq_len: RowTokens = 4096
    pad_to_multiple_of: Positive = 1
    overlong: Literal["reject", "truncate"] = "reject"


class TicketSpec(Spec, frozen=True):
    """Tickets: lifetime, tries per prompt, size of a finite supply of prompts (None = endless)."""

    ttl_s: Seconds = 600
    max_attempts: Positive = 3
    prompts: Positive | None = None


class Limits(Spec, frozen=True):
    """Bounds on what the buffer holds: tokens and bytes (of frames) of live groups, bytes of one group's frame."""

    max_tokens_live: Positive | None = None
    max_bytes_live: Positive | None = None
    max_group_bytes: Positive = 67108864


class AdapterSpec(Spec, frozen=True):
    """A LoRA tenant: groups of its own batch, size of its own prompt supply (None = endless), steps per version.

    `steps_per_publish` None = that of the run, in steps of the adapter.
    """

    groups_per_batch: Positive
    prompts: Positive | None = None
    steps_per_publish: Positive | None = None


class RunConfig(Spec, frozen=True):
    """Configuration of one run. All parts but `batch` have defaults; `check_run_config` checks the whole."""

    batch: BatchSpec
    strategy: StrategySpec = StrategySpec()
    filters: list[StrategySpec] = []
    group_size: Annotated[int, Meta(ge=1, le=LARGEST_ROLLOUTS)] | None = None
    vocab_size: Positive | None = None
    steps_per_publish: Positive = 1
    max_steps: Positive | None = None
    seed: NonNegative = 0
    advantage: str = "grpo"
    tickets: TicketSpec = TicketSpec()
    limits: Limits = Limits()
    adapters: Annotated[dict[str, AdapterSpec], Meta(max_length=MOST_ADAPTERS)] = {}

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Name the adapter_names that are trained: the adapters in order, or `""` for the one of a run without."""
        return tuple(sorted(self.adapters)) or ("",)

    @property
    def supplies(self) -> dict[str, int | None]:
        """Prompts of each of `adapter_names`; None = endless."""
        return {name: spec.prompts for name, spec in self.adapters.items()} or {"": self.tickets.prompts}

    def steps_per_publish_of(self, adapter: str = "") -> int:
        """Return the own steps of an adapter that make one version of it."""
        spec = self.adapters.get(adapter)
        return spec.steps_per_publish if spec and spec.steps_per_publish else self.steps_per_publish

    def groups_per_batch_of(self, adapter: str = "") -> int | None:
        """Return the groups of an adapter's own batch; `""`: of the run's batch."""
        spec = self.adapters.get(adapter)
        return spec.groups_per_batch if spec else self.batch.groups_per_batch

    def version_of(self, step: int, adapter: str = "") -> int:
        """Version of the policy trained at `step` of its own: version(step) = step // steps_per_publish."""
        return step // self.steps_per_publish_of(adapter)


class StrategyChange(Spec, frozen=True):
    """The strategy from here on: without `name` the run's own, options left out at their defaults."""

    name: str | None = None
    options: dict[str, Any] = {}


class LimitsChange(Spec, frozen=True):
    """Bounds from here on: what is left out stays as it is, null takes the default again."""

    max_tokens_live: Positive | UnsetType | None = UNSET
    max_bytes_live: Positive | UnsetType | None = UNSET
    max_group_bytes: Positive | UnsetType | None = UNSET

    def of(self, limits: Limits) -> Limits:
        """Put what it names in place of what `limits` has."""
        bounds = msgspec.structs.asdict(limits)
        bounds |= {name: bound for name, bound in msgspec.structs.asdict(self).items() if bound is not UNSET}
        return Limits(**{name: bound for name, bound in bounds.items() if bound is not None})


class ConfigPatch(Spec, frozen=True):
    """What `PATCH /v1/runs/{run}` may change while the run goes on; a part that is left out, or null, stays."""

    strategy: StrategyChange | None = None
    filters: list[StrategySpec] | None = None
    limits: LimitsChange | None = None
    state: Literal["running", "paused", "finished"] | None = None


def check_run_name(run: str) -> str:
    """Return `run` if it is a valid name. Raises `Invalid`."""
    if not RUN_NAME.fullmatch(run):
        raise Invalid(
            f"run is {run!r}; it must match {RUN_NAME.pattern}", name="run", value=run, bound=RUN_NAME.pattern
        )
    return run


def check_run_config(config: RunConfig) -> None:
    """Reject configurations that would deadlock or starve (guarantee 12). Raises `Invalid` with the reason."""
    batch = config.batch
    if config.adapters:
        _check_adapters(config)
    elif batch.tokens_per_batch is None and batch.groups_per_batch is None:
        raise Invalid(
            "batch.tokens_per_batch and batch.groups_per_batch are both null; a batch would never be full",
            name="batch.tokens_per_batch",
            value=None,
            bound="one of the two set",
        )
    _check_sizes(config)
    if batch.pad_to_multiple_of > batch.seq_len or batch.seq_len % batch.pad_to_multiple_of:
        raise Invalid(
            f"batch.pad_to_multiple_of is {batch.pad_to_multiple_of}; it must divide batch.seq_len, {batch.seq_len}",
            name="batch.pad_to_multiple_of",
            value=batch.pad_to_multiple_of,
            bound=batch.seq_len,
        )


def _check_sizes(config: RunConfig) -> None:
    """Reject a batch that can hold no group, and a buffer that can hold no batch."""
    budget, most = config.batch.tokens_per_batch, config.limits.max_tokens_live
    smallest_group = (config.group_size or 1) * MIN_TOKENS_PER_ROLLOUT
    if budget is not None and budget < smallest_group:
        raise Invalid(
            f"batch.tokens_per_batch is {budget}; one group has at least {smallest_group} tokens, "
            "so no batch could ever hold one",
            name="batch.tokens_per_batch",
            value=budget,
            bound=smallest_group,
        )
    for adapter in config.adapter_names:
        groups = config.groups_per_batch_of(adapter)
        smallest_batch = max(smallest_group * (groups or 1), budget if groups is None and budget else 0)
        if adapter and budget is not None:
            smallest_batch = min(smallest_batch, budget)  # its own batch may take several batches of the run
        if most is not None and most < smallest_batch:
            raise Invalid(
                f"limits.max_tokens_live is {most}; one batch {f'of adapter {adapter} ' if adapter else ''}needs "
                f"{smallest_batch} tokens live, so no batch would ever be full",
                name="limits.max_tokens_live",
                value=most,
                bound=smallest_batch,
            )
    _check_bytes(config.limits, config.group_size or 1)


def _check_bytes(limits: Limits, rollouts: int) -> None:
    """Reject a buffer that cannot hold one group, and a limit below the smallest frame."""
    if limits.max_bytes_live is not None and limits.max_bytes_live < limits.max_group_bytes:
        raise Invalid(
            f"limits.max_bytes_live is {limits.max_bytes_live}; one group may have limits.max_group_bytes, "
            f"{limits.max_group_bytes}, so it could never enter",
            name="limits.max_bytes_live",
            value=limits.max_bytes_live,
            bound=limits.max_group_bytes,
        )
    smallest = smallest_frame_bytes(rollouts)
    if limits.max_group_bytes < smallest:
        raise Invalid(
            f"limits.max_group_bytes is {limits.max_group_bytes}; the smallest frame of {rollouts} rollouts has "
            f"{smallest} bytes, so no group could ever enter",
            name="limits.max_group_bytes",
            value=limits.max_group_bytes,
            bound=smallest,
        )


def _check_adapters(config: RunConfig) -> None:
    """Reject names with equal hashes, and fields that only a run without named adapters may set."""
    coded: dict[int, str] = {hash_name(""): ""}
    for name in config.adapter_names:
        if not ADAPTER_NAME.fullmatch(name):
            bound = ADAPTER_NAME.pattern
            raise Invalid(f"adapters has {name!r}; a name must match {bound}", name="adapters", value=name, bound=bound)
        other = coded.setdefault(hash_name(name), name)
        if other != name:
            raise Invalid(
                f"adapters {other!r} and {name!r} have the same code, {hash_name(name)}; rename one of them",
                name="adapters",
                value=name,
                bound=other,
            )
    for field, value, instead in (
        ("batch.groups_per_batch", config.batch.groups_per_batch, "groups_per_batch"),
        ("tickets.prompts", config.tickets.prompts, "prompts"),
    ):
        if value is not None:
            raise Invalid(
                f"{field} is {value}; in a run with adapters each has its own: set adapters.NAME.{instead}",
                name=field,
                value=value,
                bound=None,
            )


def differing_fields(old: RunConfig, new: RunConfig) -> list[str]:
    """List the fields, dotted, in which two configurations differ."""

    def walk(prefix: str, left: Any, right: Any) -> list[str]:
        if isinstance(left, dict) and isinstance(right, dict) and prefix.count(".") < 2:
            keys = sorted(left.keys() | right.keys())
            return [path for key in keys for path in walk(f"{prefix}{key}.", left.get(key), right.get(key))]
        return [] if left == right else [prefix.removesuffix(".")]

    return walk("", msgspec.to_builtins(old), msgspec.to_builtins(new))
