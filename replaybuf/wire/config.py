"""Configuration of a run: the JSON of `PUT /v1/runs/{run}`, and its check."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from replaybuf.errors import Invalid, counted
from replaybuf.wire.frame import smallest_frame_bytes
from replaybuf.wire.group import LARGEST_ROLLOUTS, hash_name
from replaybuf.wire.metadata import check_metadata
from replaybuf.wire.names import Name
from replaybuf.wire.spill import check_spill_url

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Names have no `/` and `:`, because these end the name in tickets, group ids and counters."""
MIN_TOKENS_PER_ROLLOUT = 2
"""One prompt token and one completion token."""
LONGEST_ROW = 2**24
"""The tensors of one row of this length take 290 MB."""
LARGEST_INTEGER = 2**53 - 1
"""Largest whole number that every JSON reader keeps exactly."""
LONGEST_S = 366 * 86400.0
MAX_RANKS = 4096
MOST_ADAPTERS = 256
"""Bounds the run state, which explains for each adapter why it waits."""
MOST_GROUPS = 2**14
"""Groups of one batch. The ledger record of so many groups with the longest ids has 130 MB; Redis accepts 512 MiB."""
LARGEST_STORED_BYTES = 2**29
"""Redis accepts no longer string."""
LARGEST_OPTIONS_BYTES = 2**16
"""Options are in every batch record."""
LARGEST_COST = 1e30
"""Costs of the longest rollouts stay finite."""

Positive = Annotated[int, Meta(ge=1, le=LARGEST_INTEGER)]
NonNegative = Annotated[int, Meta(ge=0, le=LARGEST_INTEGER)]
RowTokens = Annotated[int, Meta(ge=MIN_TOKENS_PER_ROLLOUT, le=LONGEST_ROW)]
RowMultiple = Annotated[int, Meta(ge=1, le=LONGEST_ROW)]
GroupCount = Annotated[int, Meta(ge=1, le=MOST_GROUPS)]
RolloutCount = Annotated[int, Meta(ge=1, le=LARGEST_ROLLOUTS)]
StoredBytes = Annotated[int, Meta(ge=1, le=LARGEST_STORED_BYTES)]
Coefficient = Annotated[float, Meta(ge=0, le=LARGEST_COST)]
Seconds = Annotated[float, Meta(gt=0, le=LONGEST_S)]
Share = Annotated[float, Meta(ge=0, lt=1)]
"""1 would never be exceeded."""


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of L tokens: `linear`·L + `quadratic`·L², not both 0; only their ratio matters."""

    linear: Coefficient
    quadratic: Coefficient

    def check(self) -> None:
        """Raise `Invalid` for coefficients outside their bounds, and if both are 0."""
        values = (self.linear, self.quadratic)
        if not all(0 <= value <= LARGEST_COST for value in values) or not any(values):
            raise Invalid(
                f"cost is {self.linear}·L + {self.quadratic}·L²; both must be in 0..{LARGEST_COST}, and one > 0",
                name="cost",
                value=list(values),
                bound=LARGEST_COST,
            )


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all parts of the configuration: immutable; unknown fields are errors."""


class StrategySpec(Spec, frozen=True):
    """A strategy or filter by the name of its entry point, with its options."""

    name: Name = "one-step-off-policy"
    options: dict[str, Any] = {}


Filters = Annotated[list[StrategySpec], Meta(max_length=64)]


class AdmissionSpec(Spec, frozen=True):
    """An admission plug-in by the name of its entry point, with its options; `timeout_s` is for one group."""

    name: Name
    options: dict[str, Any] = {}
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 10


Admissions = Annotated[list[AdmissionSpec], Meta(max_length=8)]


class TokensPerRank(Spec, frozen=True):
    """Token budget that follows the layout of the attached trainer: so many tokens for each rank."""

    per_rank: Positive


TokenBudget = Positive | TokensPerRank | None


class BatchSpec(Spec, frozen=True):
    """Bounds of a batch, which never exceeds `tokens_per_batch` and never splits a group.

    `seq_len`: tokens of one micro-batch; `overlong`: what happens to a longer rollout. `tail`: what happens to groups
    that fill no batch when no prompt is left. After `timeout_s` at least `min_groups` make a short batch.
    """

    tokens_per_batch: TokenBudget = 65536
    groups_per_batch: GroupCount | None = None
    seq_len: RowTokens = 4096
    pad_to_multiple_of: RowMultiple = 1
    overlong: Literal["reject", "truncate"] = "reject"
    tail: Literal["train", "drop"] = "train"
    timeout_s: Seconds | None = None
    min_groups: GroupCount = 1

    def token_budget(self, ranks: int) -> int | None:
        """Return the tokens of a batch for so many ranks."""
        budget = self.tokens_per_batch
        return min(budget.per_rank * ranks, LARGEST_INTEGER) if isinstance(budget, TokensPerRank) else budget


class TicketSpec(Spec, frozen=True):
    """Tickets: lifetime, tries per prompt, number of prompts (None = endless).

    A producer that sends heartbeats and is silent for `heartbeat_s` loses its tickets. If more than `max_failed_share`
    of the newest prompts failed, `on_failed_share` happens (None = no such rule).
    """

    ttl_s: Seconds = 600
    max_attempts: Positive = 3
    prompts: Positive | None = None
    heartbeat_s: Seconds = 15
    max_failed_share: Share | None = None
    on_failed_share: Literal["alarm", "pause", "finish"] = "alarm"


class Limits(Spec, frozen=True):
    """Bounds of the buffer: tokens and frame bytes of live groups, frame bytes in Redis, frame bytes of one group.

    Frames beyond `max_bytes_in_memory` move to the spill folder.
    """

    max_tokens_live: Positive | None = None
    max_bytes_live: Positive | None = None
    max_bytes_in_memory: Positive | None = None
    max_group_bytes: StoredBytes = 67108864


class SpillSpec(Spec, frozen=True):
    """Where frames beyond `limits.max_bytes_in_memory` are stored: `file:///FOLDER`, or an object store by fsspec."""

    url: Annotated[str, Meta(min_length=1, max_length=1024)]


class AdapterSpec(Spec, frozen=True):
    """A LoRA adapter: groups per step, number of prompts (None = endless), own steps per version (None = the run's).

    `paused`: it has no share of batches and gets no tickets. `removed`: for good, and its live groups are evicted.
    """

    groups_per_batch: GroupCount
    prompts: Positive | None = None
    steps_per_publish: Positive | None = None
    paused: bool = False
    removed: bool = False


class RunConfig(Spec, frozen=True):
    """Configuration of one run. `check_run_config` checks what the types cannot.

    `stale_token_mask`: tokens of versions so many below that of the batch leave its loss mask; None = no token does.
    """

    batch: BatchSpec
    strategy: StrategySpec = StrategySpec()
    filters: Filters = []
    admissions: Admissions = []
    group_size: RolloutCount | None = None
    min_group_size: RolloutCount | None = None
    vocab_size: Positive | None = None
    steps_per_publish: Positive = 1
    max_steps: Positive | None = None
    stale_token_mask: NonNegative | None = None
    seed: NonNegative = 0
    advantage: Name = "grpo"
    tickets: TicketSpec = TicketSpec()
    limits: Limits = Limits()
    adapters: Annotated[dict[Name, AdapterSpec], Meta(max_length=MOST_ADAPTERS)] = {}
    spill: SpillSpec | None = None

    @property
    def least_rollouts(self) -> int | None:
        """Return the fewest rollouts of a group; None = any number."""
        return self.min_group_size or self.group_size

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Return the adapters in order; a run without adapters has the one adapter `""`."""
        return tuple(sorted(self.adapters)) or ("",)

    @property
    def kept_adapters(self) -> tuple[str, ...]:
        """Return those of `adapter_names` that are not removed."""
        return tuple(name for name in self.adapter_names if self.phase_of(name) != "finished")

    @property
    def active_adapters(self) -> tuple[str, ...]:
        """Return those of `adapter_names` that share batches: neither removed nor paused."""
        return tuple(name for name in self.adapter_names if self.phase_of(name) == "running")

    def phase_of(self, adapter: str) -> Literal["running", "paused", "finished"]:
        """Return whether an adapter shares batches, is paused, or was removed (`finished`)."""
        spec = self.adapters.get(adapter)
        if spec and spec.removed:
            return "finished"
        return "paused" if spec and spec.paused else "running"

    @property
    def supplies(self) -> dict[str, int | None]:
        """Return the number of prompts of each of `adapter_names`; None = endless."""
        return {name: spec.prompts for name, spec in self.adapters.items()} or {"": self.tickets.prompts}

    def steps_per_publish_of(self, adapter: str = "") -> int:
        """Return how many steps of an adapter make one version of it."""
        spec = self.adapters.get(adapter)
        return spec.steps_per_publish if spec and spec.steps_per_publish else self.steps_per_publish

    def groups_per_batch_of(self, adapter: str = "") -> int | None:
        """Return the groups per step of an adapter; `""`: per batch of the run."""
        spec = self.adapters.get(adapter)
        return spec.groups_per_batch if spec else self.batch.groups_per_batch

    def version_of(self, step: int, adapter: str = "") -> int:
        """Return the version of an adapter's policy that its `step` trains: step // steps_per_publish."""
        return step // self.steps_per_publish_of(adapter)


def check_run_name(run: str) -> str:
    """Return `run` if it is a valid name. Raises `Invalid`."""
    if not RUN_NAME.fullmatch(run):
        bound = RUN_NAME.pattern
        raise Invalid(f"run is {run!r}; it must match {bound}", name="run", value=run, bound=bound)
    return run


def check_run_config(config: RunConfig, ranks: int = 1) -> None:
    """Reject a configuration with which a run would wait for ever. Raises `Invalid` with the reason.

    `ranks`: of the attached trainer, for a token budget that follows it.
    """
    batch = config.batch
    _check_options("strategy.options", config.strategy.options)
    for part in ("filters", "admissions"):
        for number, spec in enumerate(getattr(config, part)):
            _check_options(f"{part}[{number}].options", spec.options)
    if config.adapters:
        _check_adapters(config)
    elif batch.tokens_per_batch is None and batch.groups_per_batch is None:
        raise Invalid(
            "batch.tokens_per_batch and batch.groups_per_batch are both null; a batch would never be full",
            name="batch.tokens_per_batch",
            value=None,
            bound="one of the two set",
        )
    _check_sizes(config, batch.token_budget(ranks))
    _check_short_batches(config)
    _check_partial_groups(config)
    _check_failed_share(config.tickets)
    if batch.pad_to_multiple_of > batch.seq_len or batch.seq_len % batch.pad_to_multiple_of:
        why = f"it must divide batch.seq_len, {batch.seq_len}"
        raise _invalid("batch.pad_to_multiple_of", batch.pad_to_multiple_of, why, batch.seq_len)


def _check_options(name: str, options: dict[str, Any]) -> None:
    check_metadata(name, options)
    size = len(msgspec.json.encode(options))
    if size > LARGEST_OPTIONS_BYTES:
        detail = f"{name} has {size} bytes as JSON; the maximum is {LARGEST_OPTIONS_BYTES}"
        raise Invalid(detail, name=name, value=size, bound=LARGEST_OPTIONS_BYTES)


def _invalid(name: str, value: int, why: str, bound: int | None) -> Invalid:
    return Invalid(f"{name} is {value}; {why}", name=name, value=value, bound=bound)


def _check_sizes(config: RunConfig, budget: int | None) -> None:
    """Reject a batch that cannot hold one group, and a buffer that cannot hold one batch."""
    most = config.limits.max_tokens_live
    smallest_group = (config.least_rollouts or 1) * MIN_TOKENS_PER_ROLLOUT
    if budget is not None and budget < smallest_group:
        why = f"one group has at least {counted(smallest_group, 'token')}, so no batch could ever hold one"
        raise _invalid("batch.tokens_per_batch", budget, why, smallest_group)
    for adapter in config.adapter_names:
        groups = config.groups_per_batch_of(adapter)
        smallest_batch = max(smallest_group * (groups or 1), budget if groups is None and budget else 0)
        if adapter and budget is not None:
            smallest_batch = min(smallest_batch, budget)  # one step of an adapter may take several batches
        if most is not None and most < smallest_batch:
            owner = f"of adapter {adapter} " if adapter else ""
            why = f"one batch {owner}needs {counted(smallest_batch, 'token')} live, so no batch would ever be full"
            raise _invalid("limits.max_tokens_live", most, why, smallest_batch)
    _check_spill(config)
    _check_bytes(config.limits, config.group_size or 1)


def _check_short_batches(config: RunConfig) -> None:
    """Reject rules for short batches that contradict each other, or that no batch could meet."""
    batch = config.batch
    if batch.timeout_s is not None and batch.tail == "drop":
        raise Invalid(
            f"batch.tail is 'drop' and batch.timeout_s is {batch.timeout_s:g}; the time-out trains short batches and "
            "the tail drops them: set tail to 'train', or timeout_s to null",
            name="batch.tail",
            value="drop",
            bound="train",
        )
    sizes = [config.groups_per_batch_of(adapter) for adapter in config.kept_adapters]
    most = sum(size for size in sizes if size) if sizes and all(sizes) else None
    if most is not None and batch.min_groups > most:
        why = f"a full batch has at most {counted(most, 'group')}, so the time-out would never make one"
        raise _invalid("batch.min_groups", batch.min_groups, why, most)


def _check_partial_groups(config: RunConfig) -> None:
    """Reject a `min_group_size` without `group_size` or above it."""
    least, size = config.min_group_size, config.group_size
    if least is not None and (size is None or least > size):
        bound = "not set: set it too" if size is None else f"{size}, the maximum"
        raise _invalid("min_group_size", least, f"group_size is {bound}", size)


def _check_failed_share(tickets: TicketSpec) -> None:
    """Reject a rule for failed prompts without a share that would start it."""
    if tickets.max_failed_share is None and tickets.on_failed_share != "alarm":
        raise Invalid(
            f"tickets.on_failed_share is {tickets.on_failed_share!r} and tickets.max_failed_share is null, so the rule "
            "would never act; set max_failed_share, such as 0.2",
            name="tickets.on_failed_share",
            value=tickets.on_failed_share,
            bound="max_failed_share set",
        )


def _check_bytes(limits: Limits, rollouts: int) -> None:
    """Reject a buffer that cannot hold the largest group, and a limit below the smallest frame."""
    if limits.max_bytes_live is not None and limits.max_bytes_live < limits.max_group_bytes:
        raise _invalid("limits.max_bytes_live", limits.max_bytes_live, _no_group(limits), limits.max_group_bytes)
    smallest = smallest_frame_bytes(rollouts)
    if limits.max_group_bytes < smallest:
        why = f"the smallest frame of {counted(rollouts, 'rollout')} has {smallest} bytes, so no group could ever enter"
        raise _invalid("limits.max_group_bytes", limits.max_group_bytes, why, smallest)


def _no_group(limits: Limits) -> str:
    return f"one group may have limits.max_group_bytes, {limits.max_group_bytes}, so it could never enter"


def _check_spill(config: RunConfig) -> None:
    """Reject a bound without a folder, a bound below the largest group, and folders that cannot hold frames."""
    most, limits = config.limits.max_bytes_in_memory, config.limits
    if most is not None and most < limits.max_group_bytes:
        raise _invalid("limits.max_bytes_in_memory", most, _no_group(limits), limits.max_group_bytes)
    if most is not None and config.spill is None:
        raise _invalid("limits.max_bytes_in_memory", most, "it needs a folder for the rest: set spill.url too", None)
    if config.spill:
        check_spill_url(config.spill.url)


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
    groups = sum(config.adapters[name].groups_per_batch for name in config.kept_adapters)
    if len(config.adapters) > MOST_ADAPTERS:  # a PATCH added some
        raise _invalid("adapters", len(config.adapters), "removed ones count too", MOST_ADAPTERS)
    if groups > MOST_GROUPS:
        why = f"one batch may hold the groups of all adapters, and at most {MOST_GROUPS}"
        raise _invalid("adapters.*.groups_per_batch", groups, why, MOST_GROUPS)
    for field, value, instead in (
        ("batch.groups_per_batch", config.batch.groups_per_batch, "groups_per_batch"),
        ("tickets.prompts", config.tickets.prompts, "prompts"),
    ):
        if value is not None:
            raise _invalid(field, value, f"in a run with adapters each has its own: set adapters.NAME.{instead}", None)
