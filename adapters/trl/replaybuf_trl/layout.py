"""Whether TRL can train the batches of a run as they are, checked before the training starts."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec
from trl.experimental.async_grpo import AsyncGRPOConfig

from replaybuf.client.peers import warn_if_untested
from replaybuf.errors import Invalid
from replaybuf.wire.config import RunConfig, TokensPerRank
from replaybuf.wire.run_status import RunStatus

TESTED = ("1.16", "1.17")
"""The first tested version of TRL, and the first one that is not tested. Its async_grpo is experimental and changes."""


def check_version() -> None:
    """Warn of a version of TRL that this adapter was not tested with."""
    warn_if_untested("replaybuf-trl", "trl", *TESTED)


def check_arguments(args: AsyncGRPOConfig) -> None:
    """Check what needs no service, before TRL asks an engine. Raises `Invalid`."""
    if args.token_budget is None or args.token_budget > 0:
        _refuse(
            "token_budget",
            args.token_budget,
            0,
            "TRL would make micro-batches of other sizes, so that its steps are not those of the run; "
            "set AsyncGRPOConfig(token_budget=0)",
        )
    if args.max_steps <= 0:
        _refuse(
            "max_steps",
            args.max_steps,
            1,
            "TRL would count epochs of a dataset that it does not read; set AsyncGRPOConfig(max_steps=...)",
        )
    if args.restore_callback_states_from_checkpoint:
        _refuse(
            "restore_callback_states_from_checkpoint",
            True,
            False,
            "transformers would replace ReplaybufCallback by one without a worker; leave it unset",
        )


def check_layout(args: AsyncGRPOConfig, run: RunStatus) -> None:
    """Check that each batch of the run is exactly one optimizer step of TRL. Raises `Invalid`."""
    try:
        config = msgspec.convert(run.config, RunConfig)
    except msgspec.ValidationError as error:
        raise Invalid(f"the configuration of run {run.run} is of another release: {error}", name="config") from error
    groups, size = config.batch.groups_per_batch, config.group_size
    if config.adapters:
        _refuse("adapters", sorted(config.adapters), [], "TRL trains one policy; use a run without adapters")
    if groups is None or size is None:
        missing = "batch.groups_per_batch" if groups is None else "group_size"
        _refuse(missing, None, 1, f"TRL trains the same number of rollouts in each step; create the run with {missing}")
    if config.min_group_size not in (None, size):
        _refuse("min_group_size", config.min_group_size, size, "TRL needs groups of one size; leave it unset")
    _check_whole_batches(config, groups, size)
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    if samples != groups * size:
        _refuse(
            "groups_per_batch x group_size",
            groups * size,
            samples,
            f"a step of TRL has per_device_train_batch_size {args.per_device_train_batch_size} x "
            f"gradient_accumulation_steps {args.gradient_accumulation_steps} x {args.world_size} processes = {samples} "
            f"rollouts, a batch of run {run.run} has {groups} groups x {size} = {groups * size}; make them equal",
        )
    if config.steps_per_publish != args.weight_sync_steps:
        _refuse(
            "steps_per_publish",
            config.steps_per_publish,
            args.weight_sync_steps,
            f"TRL publishes every weight_sync_steps = {args.weight_sync_steps} steps; make them equal",
        )
    if config.advantage == "process":
        _refuse("advantage", "process", "grpo", "TRL takes one advantage per rollout; use grpo, dr-grpo or rloo")


def _check_whole_batches(config: RunConfig, groups: int, size: int) -> None:
    """Refuse a run whose batches may be shorter than `groups_per_batch`."""
    batch = config.batch
    budget = batch.tokens_per_batch
    tokens = budget.per_rank if isinstance(budget, TokensPerRank) else budget
    largest = groups * size * batch.seq_len
    if tokens is not None and tokens < largest:
        _refuse(
            "tokens_per_batch",
            tokens,
            largest,
            "a batch of long rollouts would have fewer groups than a step of TRL; set it to null, or at least to "
            "groups_per_batch x group_size x seq_len",
        )
    if batch.timeout_s is not None:
        _refuse("batch.timeout_s", batch.timeout_s, None, "a short batch does not fill a step of TRL; leave it unset")
    if config.tickets.prompts is not None and batch.tail == "train":
        _refuse("batch.tail", "train", "drop", "a short last batch does not fill a step of TRL; use drop")


def check_look_ahead(look_ahead: int, strategy: str) -> None:
    """Refuse a strategy without look-ahead. Raises `Invalid`."""
    if look_ahead < 1:
        _refuse(
            "look_ahead",
            look_ahead,
            1,
            f"accelerate fetches the first micro-batch of the next step before this one is trained, and strategy "
            f"{strategy} gives it only afterwards; use one-step-off-policy or replay",
        )


def _refuse(name: str, value: Any, bound: Any, why: str) -> NoReturn:
    raise Invalid(f"{name} is {value}; needed: {bound}. {why[0].upper()}{why[1:]}", name=name, value=value, bound=bound)
