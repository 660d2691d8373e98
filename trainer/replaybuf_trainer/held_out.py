"""Figures of the policy on held-out groups: the loss without a step, beside the figures of training.

It says whether a policy moves on data that it does not train on. What the policy can do says `replaybuf generate
--eval-prompts`, which samples.
"""

from __future__ import annotations

import itertools
import logging

import msgspec
import torch

from replaybuf.client.exports.reader import ExportReader
from replaybuf.client.exports.steps import configured_layout, stored_groups
from replaybuf.client.offline import batch_of_groups
from replaybuf.errors import Invalid
from replaybuf_trainer.losses import BatchTotals, Objective, Tally
from replaybuf_trainer.models.policy import Policy
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.reading import TensorBatch, read_tensors

logger = logging.getLogger(__name__)


class HeldOut(msgspec.Struct, frozen=True):
    """The first groups of an export, packed once as one batch.

    `figures` makes a forward pass over them, on all ranks; `rows_per_forward` as in training.
    """

    batch: TensorBatch
    objective: Objective
    ranks: Ranks
    rows_per_forward: int

    @torch.no_grad()
    def figures(self, policy: Policy) -> dict[str, float]:
        """Return the figures of the loss, with the prefix `eval_`, over the batches of all ranks."""
        tally = Tally()
        totals = BatchTotals(self.batch.meta.batch_loss_tokens, self.batch.meta.batch_rollouts)
        for adapter, rows in self.batch.parts(self.rows_per_forward):
            self.objective.value(policy.forward(rows, adapter), totals, tally)
        tally.add_ranks(self.ranks.sum)
        figures = tally.figures()
        logger.info("evaluated loss=%(loss).4f kl=%(kl).4f entropy=%(entropy).3f", figures)
        return {f"eval_{name}": value for name, value in figures.items()}


def open_held_out(options: TrainOptions, objective: Objective, ranks: Ranks) -> HeldOut | None:
    """Read the groups of `--eval-from`; None without it. Raises `Invalid` for a folder without rollouts."""
    if options.eval_from is None:
        return None
    reader = ExportReader(options.eval_from)
    groups = list(itertools.islice(stored_groups(reader), options.eval_options.groups))
    if not groups:
        raise Invalid(
            f"{options.eval_from} has no rollouts to evaluate on: a checkpoint had freed them before the export",
            name="eval_from",
            value=str(options.eval_from),
        )
    body = batch_of_groups(
        reader.manifest.run,
        groups,
        configured_layout(reader, ranks.size),
        step=0,
        version=max(group.policy_version for group in groups),
        dp_rank=ranks.rank,
    )
    return HeldOut(read_tensors(body), objective, ranks, options.rows_per_forward)
