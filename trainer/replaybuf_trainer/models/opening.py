"""The policy of a training, by its options."""

from __future__ import annotations

from pathlib import Path

from replaybuf.errors import Invalid
from replaybuf_trainer.losses.normalisation import Normalisation
from replaybuf_trainer.models.lora import LoraOptions, LoraPolicy
from replaybuf_trainer.models.policy import Policy, dtype_of, load_policy, load_trained_model
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.parallel.ranks import Ranks


def open_policy(folder: Path, options: TrainOptions, mean: Normalisation, ranks: Ranks) -> Policy:
    """Load the policy of a model folder; with `--lora-rank` that of the adapters, on the frozen model of `--model`.

    `mean`: what the loss is divided by. Raises `Invalid` as `load_policy` and `LoraPolicy`, and `MissingExtra`.
    """
    if options.lora_rank is None:
        return load_policy(folder, options, ranks)
    if ranks.sharded:
        detail = "--lora-rank needs a single process; start it without torchrun and --fsdp"
        raise Invalid(detail, name="lora_rank", value=options.lora_rank)
    lora = LoraOptions(
        rank=options.lora_rank,
        alpha=options.lora_options.alpha or 2.0 * options.lora_rank,
        targets=options.lora_options.targets,
        learning_rate=options.learning_rate,
        warm_up_steps=options.warm_up_steps,
        mean=mean,
        seed=options.seed,
    )
    return LoraPolicy(load_trained_model(options.model, options), lora, options.model, dtype_of(options))
