"""The columns that a loss reads: one value per loss token, of some packed rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

import torch
from msgspec import Meta

from replaybuf.errors import Invalid

Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]
Positive: TypeAlias = Annotated[float, Meta(gt=0)]
Row: TypeAlias = Mapping[str, torch.Tensor]
"""One micro-batch, see `replaybuf_trainer.reading.TensorBatch`: L tokens of n rollouts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTokens:
    """The k loss tokens of n rollouts, row by row; float columns are [k].

    - `logprobs`, `entropies`: of the policy that is trained, with gradient, in nats
    - `inference_logprobs`: of the engine when it sampled; `old_logprobs`: of the trainer's code with the weights before
      this step; `ref_logprobs`: of a reference model; None = the batch has no such column
    - `rollout`: number of the token's rollout, int64 [k], from 0 to n - 1
    - `sampling_weights` [n], `staleness` int32 [n]: one value per rollout
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    inference_logprobs: torch.Tensor
    advantages: torch.Tensor
    rollout: torch.Tensor
    sampling_weights: torch.Tensor
    staleness: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """Return the number of loss tokens of each rollout, int64 [n]."""
        return torch.bincount(self.rollout, minlength=len(self.staleness))

    def column(self, name: str) -> torch.Tensor:
        """Return a column by name. Raises `Invalid` if the batch has no such column."""
        values = getattr(self, name)
        if values is None:
            raise missing_column(name)
        return values  # type: ignore[no-any-return]

    def rollout_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` [k] over the loss tokens of each rollout, [n]."""
        return values.new_zeros(len(self.staleness)).index_add(0, self.rollout, values)

    def rollout_means(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of `values` [k] over the loss tokens of each rollout, [n]; 0 without loss tokens."""
        return self.rollout_sums(values) / self.lengths.clamp(min=1)


def loss_tokens(rows: Sequence[Row], logprobs: torch.Tensor, entropies: torch.Tensor) -> LossTokens:
    """Collect the columns of all loss tokens of some rows; `logprobs` and `entropies` [k] are in the same order."""
    rollouts, first = [], 0
    for row in rows:
        n = len(row["rewards"])
        of_token = torch.arange(first, first + n, device=logprobs.device)
        of_token = of_token.repeat_interleave(row["cu_seqlens"][: n + 1].diff())  # [L without padding]
        rollouts.append(of_token[row["loss_mask"][: len(of_token)]])
        first += n
    weights = [row.get("sampling_weights", torch.ones(len(row["rewards"]), device=logprobs.device)) for row in rows]
    optional = {
        name: _of_loss_tokens(rows, name)
        for name in ("old_logprobs", "ref_logprobs")
        if all(name in row for row in rows)
    }
    return LossTokens(
        logprobs=logprobs,
        entropies=entropies,
        inference_logprobs=_of_loss_tokens(rows, "inference_logprobs"),
        advantages=_of_loss_tokens(rows, "advantages"),
        rollout=torch.cat(rollouts),
        sampling_weights=torch.cat(weights),
        staleness=torch.cat([row["staleness"] for row in rows]),
        **optional,
    )


def missing_column(name: str) -> Invalid:
    """Return the error for a column that the loss needs and the batch lacks."""
    return Invalid(
        f"the batch has no {name}, which the loss needs; have every generator of the run send it "
        "(see replaybuf generate --help), or change --loss and --loss-options",
        name=name,
    )


def _of_loss_tokens(rows: Sequence[Row], name: str) -> torch.Tensor:
    return torch.cat([row[name][row["loss_mask"]] for row in rows])
