"""Whether TRL can train the batches of a run as they are, checked before the training starts.

That each batch has the rollouts of a step is checked batch by batch, because it may change: see `peers.check_size`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

from transformers.trainer_utils import SaveStrategy
from trl.experimental.async_grpo import AsyncGRPOConfig, packing

from replaybuf.client.peers import Needed, warn_if_untested
from replaybuf.errors import Invalid
from replaybuf.wire.answer.run_status import RunStatus

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


def check_attention() -> None:
    """Raise `Invalid` on a GPU without `kernels`, which TRL imports when it attends for the first time."""
    loads = packing._flash_attn.__module__ == packing.__name__  # `allow_cpu` has not replaced it
    if loads and find_spec("kernels") is None:
        raise Invalid(
            "TRL attends with FlashAttention, which the package kernels loads, and it is not installed. "
            "pip install 'trl[kernels]'. On a CPU call replaybuf_trl.allow_cpu() instead",
            name="kernels",
        )


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


def check_run(args: AsyncGRPOConfig, run: RunStatus) -> None:
    """Check what no batch shows before it is too late. Raises `Invalid`."""
    facts, tail = run.facts(), run.config["batch"]["tail"]
    _check(
        Rule(not facts.adapters, "adapters", sorted(facts.adapters), [], "TRL trains one policy"),
        Rule(
            run.config["tickets"]["prompts"] is None or tail == "drop",
            "batch.tail",
            tail,
            "drop",
            "TRL trains the same number of rollouts in each step, and the last one could have fewer",
        ),
        Rule(
            facts.steps_per_publish == args.weight_sync_steps,
            "steps_per_publish",
            facts.steps_per_publish,
            args.weight_sync_steps,
            "it must be AsyncGRPOConfig(weight_sync_steps=...), after which TRL publishes",
        ),
    )


def step_rollouts(args: AsyncGRPOConfig) -> Needed:
    """Return how many rollouts a step of TRL trains, and why."""
    micro_batch, accumulation, processes = (
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.world_size,
    )
    parts = f"{micro_batch} per_device_train_batch_size x {accumulation} gradient_accumulation_steps x {processes}"
    return Needed(micro_batch * accumulation * processes, f"a step of TRL: {parts} processes")


def _check(*rules: Rule) -> None:
    for kept, name, value, needed, why in rules:
        if not kept:
            raise Invalid(f"{name} is {value}; needed: {needed}, because {why}", name=name, value=value, bound=needed)
