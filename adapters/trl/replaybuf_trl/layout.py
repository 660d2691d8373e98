"""Whether TRL can train the batches of a run as they are, checked before the training starts."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from transformers.trainer_utils import SaveStrategy
from trl.experimental.async_grpo import AsyncGRPOConfig

from replaybuf.client.peers import warn_if_untested
from replaybuf.errors import Invalid
from replaybuf.wire.config import RunConfig, TokensPerRank
from replaybuf.wire.run_status import RunStatus

TESTED = ("1.16", "1.17")
"""The first tested version of TRL, and the first one that is not tested. Its async_grpo is experimental and changes."""


class Rule(NamedTuple):
    """A value that must be `needed`; `why` it must, and the way out."""

    kept: bool
    name: str
    value: Any
    needed: Any
    why: str


def check_version() -> None:
    """Warn of a version of TRL that this adapter was not tested with."""
    warn_if_untested("replaybuf-trl", "trl", *TESTED)


def check_arguments(args: AsyncGRPOConfig) -> None:
    """Check what needs no service, before TRL asks an engine. Raises `Invalid`."""
    budget, restores = args.token_budget, args.restore_callback_states_from_checkpoint
    searches, saves = args.auto_find_batch_size, args.save_strategy != SaveStrategy.NO
    _check(
        Rule(budget == 0, "token_budget", budget, 0, "TRL's steps would not be those of the run"),
        Rule(args.max_steps > 0, "max_steps", args.max_steps, 1, "TRL would count epochs of data it does not read"),
        Rule(
            not restores,
            "restore_callback_states_from_checkpoint",
            restores,
            False,
            "transformers would replace ReplaybufCallback by one without a worker",
        ),
        Rule(not searches, "auto_find_batch_size", searches, False, "a smaller batch size is not a batch of the run"),
        Rule(
            not (saves and args.save_only_model),
            "save_only_model",
            args.save_only_model,
            False,
            "a resume needs the optimizer; or set save_strategy='no'",
        ),
    )


def check_layout(args: AsyncGRPOConfig, run: RunStatus) -> None:
    """Check that each batch of the run is exactly one optimizer step of TRL. Raises `Invalid`."""
    try:
        config = msgspec.convert(run.config, RunConfig)
    except msgspec.ValidationError as error:
        raise Invalid(f"the configuration of run {run.run} is of another release: {error}", name="config") from error
    groups, size, tail = config.batch.groups_per_batch, config.group_size, config.batch.tail
    same = "TRL trains the same number of rollouts in each step"
    _check(
        Rule(not config.adapters, "adapters", sorted(config.adapters), [], "TRL trains one policy"),
        Rule(groups is not None, "batch.groups_per_batch", groups, "a number", same),
        Rule(size is not None, "group_size", size, "a number", same),
        Rule(config.min_group_size in (None, size), "min_group_size", config.min_group_size, None, same),
        Rule(config.batch.timeout_s is None, "batch.timeout_s", config.batch.timeout_s, None, same),
        Rule(config.tickets.prompts is None or tail == "drop", "batch.tail", tail, "drop", same),
        Rule(config.advantage != "process", "advantage", "process", "grpo", "TRL takes one advantage per rollout"),
        Rule(
            config.steps_per_publish == args.weight_sync_steps,
            "steps_per_publish",
            config.steps_per_publish,
            args.weight_sync_steps,
            "it must be AsyncGRPOConfig(weight_sync_steps=...), after which TRL publishes",
        ),
    )
    _check_size(args, config, (groups or 0) * (size or 0))


def _check_size(args: AsyncGRPOConfig, config: RunConfig, rollouts: int) -> None:
    """Compare the rollouts of a step and of a batch, which no token budget may cut."""
    micro_batch, accumulation, processes = (
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.world_size,
    )
    budget = config.batch.tokens_per_batch
    tokens = budget.per_rank if isinstance(budget, TokensPerRank) else budget
    largest = rollouts * config.batch.seq_len
    _check(
        Rule(
            micro_batch * accumulation * processes == rollouts,
            "groups_per_batch x group_size",
            rollouts,
            micro_batch * accumulation * processes,
            f"a step of TRL has per_device_train_batch_size {micro_batch} x gradient_accumulation_steps {accumulation} "
            f"x {processes} processes; make them equal",
        ),
        Rule(
            tokens is None or tokens >= largest,
            "tokens_per_batch",
            tokens,
            largest,
            "a batch of long rollouts would have fewer groups; use null, or groups_per_batch x group_size x seq_len",
        ),
    )


def check_look_ahead(look_ahead: int, strategy: str) -> None:
    """Refuse a strategy without look-ahead. Raises `Invalid`."""
    why = "accelerate fetches the first micro-batch of the next step before this one is trained; use another strategy"
    _check(Rule(look_ahead >= 1, f"look_ahead of strategy {strategy}", look_ahead, 1, why))


def _check(*rules: Rule) -> None:
    for kept, name, value, needed, why in rules:
        if not kept:
            raise Invalid(f"{name} is {value}; needed: {needed}, because {why}", name=name, value=value, bound=needed)
