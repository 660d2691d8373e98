"""The policy in training: a model and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replaybuf.client.cost import ModelShape
from replaybuf_trainer.losses import LossTokens, Row
from replaybuf_trainer.models.descent import adam, descend
from replaybuf_trainer.models.loading import load_model, shape_of
from replaybuf_trainer.models.packed_forward import packed_forward
from replaybuf_trainer.weights import save_model


class Policy:
    """A model with AdamW. `tokenizer_dir`: the folder whose tokenizer goes with saved weights."""

    def __init__(self, model: Any, learning_rate: float, tokenizer_dir: Path) -> None:
        self.model = model
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
        return packed_forward(self.model, rows)

    def step(self, learning_rate: float, clip_norm: float, *, finite_loss: bool) -> float:
        """Take an optimizer step with the gradients that have added up, and clear them; return their norm.

        Without a finite loss and norm the weights stay as they are.
        """
        return descend(self.optimizer, learning_rate, clip_norm, finite_loss=finite_loss)

    def save_weights(self, folder: Path) -> None:
        """Write a model folder that engines can load."""
        save_model(self.model, self._tokenizer_dir, folder)


def load_policy(folder: Path, learning_rate: float, tokenizer_dir: Path) -> Policy:
    """Load the policy of a model folder. Raises `Invalid` as `load_model`."""
    return Policy(load_model(folder), learning_rate, tokenizer_dir)
