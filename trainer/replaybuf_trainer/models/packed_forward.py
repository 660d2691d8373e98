"""Forward pass of packed rows: the columns of their loss tokens for a loss.

Only their restarting positions separate the rollouts of a packed row: `use_cache=False` and no attention mask. With a
mask of ones, or with the default cache, they would attend to each other without any warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from replaybuf_trainer.losses import LossTokens, Row, loss_tokens
from replaybuf_trainer.models.chunked_head import target_logprobs


def packed_forward(model: Any, rows: Sequence[Row]) -> LossTokens:
    """Run B packed rows and return the columns of all their loss tokens, row by row."""
    return loss_tokens(rows, *packed_logprobs(model, rows))


def packed_logprobs(model: Any, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run B packed rows; return the logprobs of all k loss tokens and the entropies of their distributions, both [k].

    The logprobs are raw, before temperature, as those of the engine are.
    """
    targets, hidden = loss_token_states(model, rows)
    return target_logprobs(hidden, model.lm_head.weight, targets)


def loss_token_states(model: Any, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run B packed rows; return the targets [k] of all loss tokens and the last hidden states [k, H] that predict them.

    Position t holds token t, so the state that predicts it stands at t-1. The first token of a rollout has no state
    before it and is never a loss token (prompts have at least one token).
    """
    # [B, longest L]; padding has position 0 at every token, so each padding token is a segment of its own
    ids, positions, mask = (
        pad_sequence([row[name] for row in rows], batch_first=True)
        for name in ("input_ids", "position_ids", "loss_mask")
    )
    hidden = model.model(input_ids=ids.long(), position_ids=positions.long(), use_cache=False).last_hidden_state
    return ids[mask].long(), hidden[:, :-1][mask[:, 1:]]
