"""The policy in training: a model and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from replaybuf.client.cost import ModelShape
from replaybuf_trainer.losses import LossTokens, Row, loss_tokens
from replaybuf_trainer.models.descent import adam, descend
from replaybuf_trainer.models.loading import load_model, shape_of
from replaybuf_trainer.models.packed_forward import packed_logprobs
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.parallel.sharding import ShardedForward
from replaybuf_trainer.parallel.shards import whole
from replaybuf_trainer.weights import save_model


class Policy:
    """A model with AdamW. `tokenizer_dir`: the folder whose tokenizer goes with saved weights.

    With several `ranks` every parameter is sharded over them; all ranks make the same calls.
    """

    def __init__(self, model: Any, learning_rate: float, tokenizer_dir: Path, ranks: Ranks | None = None) -> None:
        self.model = model
        self._ranks = ranks or Ranks()
        self._sharded = ShardedForward(model, self._ranks) if self._ranks.sharded else None
        self.optimizer = adam(model.parameters(), learning_rate)
        self._tokenizer_dir = tokenizer_dir

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model knows."""
        return int(self.model.config.vocab_size)

    @property
    def shape(self) -> ModelShape:
        """The sizes that a rollout's cost depends on."""
        return shape_of(self.model)

    def forward(self, rows: Sequence[Row]) -> LossTokens:
        """Run packed rows and return the columns of their loss tokens, with gradients."""
        logprobs, entropies = self._sharded(rows) if self._sharded else packed_logprobs(self.model, rows)
        return loss_tokens(rows, logprobs, entropies)

    def step(self, learning_rate: float, clip_norm: float, *, finite_loss: bool) -> float:
        """Take an optimizer step with the gradients that have added up, and clear them; return their norm.

        Without a finite loss and norm the weights stay as they are.
        """
        return descend(self.optimizer, learning_rate, clip_norm, finite_loss=finite_loss)

    def weights(self) -> WholeWeights:
        """Return the current weights, which the first rank may write; gather them there if they are sharded."""
        if self._sharded is None:
            return WholeWeights(self.model, None, self._tokenizer_dir)
        return self.copied_weights()

    def copied_weights(self) -> WholeWeights:
        """Return a copy of the weights in CPU memory, on the first rank, which later steps do not change."""
        copies = {}
        for name, value in self.model.state_dict().items():
            gathered = whole(value.detach())
            if self._ranks.is_first:
                copies[name] = gathered.to("cpu", copy=True)
        return WholeWeights(self.model, copies, self._tokenizer_dir)


class WholeWeights:
    """Weights by name, or those of the model as they are."""

    adapter = ""

    def __init__(self, model: Any, weights: dict[str, torch.Tensor] | None, tokenizer_dir: Path) -> None:
        self._model = model
        self._weights = weights
        self._tokenizer_dir = tokenizer_dir

    def save_weights(self, folder: Path) -> None:
        """Write a model folder that engines can load."""
        save_model(self._model, self._tokenizer_dir, folder, self._weights)


def load_policy(folder: Path, learning_rate: float, tokenizer_dir: Path, ranks: Ranks | None = None) -> Policy:
    """Load the policy of a model folder, sharded over several ranks. Raises `Invalid` as `load_model`."""
    return Policy(load_model(folder), learning_rate, tokenizer_dir, ranks)
