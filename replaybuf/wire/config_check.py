"""Check of what the types of a run's configuration cannot: values that contradict each other."""

from __future__ import annotations

from typing import Any

import msgspec

from replaybuf.errors import Invalid, counted
from replaybuf.wire.column.metadata import check_metadata
from replaybuf.wire.config import (
    ADAPTER_NAME,
    LARGEST_OPTIONS_BYTES,
    MIN_TOKENS_PER_ROLLOUT,
    MOST_ADAPTERS,
    MOST_GROUPS,
    Limits,
    RunConfig,
    TicketSpec,
)
from replaybuf.wire.frame import smallest_frame_bytes
from replaybuf.wire.group import hash_name
from replaybuf.wire.spill import check_spill_url


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
        detail = "batch.tokens_per_batch and batch.groups_per_batch are both null; a batch would never be full"
        raise Invalid(detail, name="batch.tokens_per_batch", value=None, bound="one of the two set")
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
        detail = (
            f"batch.tail is 'drop' and batch.timeout_s is {batch.timeout_s:g}; the time-out trains short batches and "
            "the tail drops them: set tail to 'train', or timeout_s to null"
        )
        raise Invalid(detail, name="batch.tail", value="drop", bound="train")
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
            detail = f"adapters {other!r} and {name!r} have the same code, {hash_name(name)}; rename one of them"
            raise Invalid(detail, name="adapters", value=name, bound=other)
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
