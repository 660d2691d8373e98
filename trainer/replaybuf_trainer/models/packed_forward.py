"""Forward pass of packed rows: the columns of their loss tokens for a loss.

Only their restarting positions separate the rollouts of a packed row: `use_cache=False` and no attention mask. With a
mask of ones, or with the default cache, they would attend to each other without any warning.

Eager and sdpa attention get a mask that transformers derives from the positions. Attention functions of variable
length (flash) get no mask but the bounds of the rollouts, and all rows as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from replaybuf_trainer.losses import LossTokens, Row, loss_tokens
from replaybuf_trainer.models.chunked_head import target_logprobs
from replaybuf_trainer.models.output_head import output_head

MASKED_ATTENTION = ("eager", "sdpa")
"""Attention functions of transformers that need a mask [B, 1, L, L]."""


def packed_forward(model: Any, rows: Sequence[Row]) -> LossTokens:
    """Run B packed rows and return the columns of all their loss tokens, row by row."""
    return loss_tokens(rows, *packed_logprobs(model, rows))


def packed_logprobs(model: Any, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run B packed rows; return the logprobs of all k loss tokens and the entropies of their distributions, both [k].

    The logprobs are raw, before temperature, as those of the engine are.
    """
    targets, hidden = loss_token_states(model, rows)
    return target_logprobs(hidden, output_head(model), targets)


def loss_token_states(model: Any, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run B packed rows; return the targets [k] of all loss tokens and the last hidden states [k, H] that predict them.

    The first token of a rollout has no state before it and is never a loss token (prompts have at least one token).
    """
    ids, positions, masks = ([row[name] for row in rows] for name in ("input_ids", "position_ids", "loss_mask"))
    return torch.cat(ids)[torch.cat(masks)].long(), predicting_states(model, ids, positions, masks)


def predicting_states(
    model: Any, ids: Sequence[torch.Tensor], positions: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Run B packed rows of [L] tokens; return the last hidden states [k, H] that predict the tokens of the masks.

    Position t holds token t, so the state that predicts it stands at t-1. A mask must be false at 0.
    """
    decoder = model.base_model
    if attention_of(model) in MASKED_ATTENTION:
        # [B, longest L]; padding has position 0 at every token, so each padding token is a segment of its own
        padded, places, mask = (pad_sequence(list(each), batch_first=True) for each in (ids, positions, masks))
        hidden: torch.Tensor = decoder(
            input_ids=padded.long(), position_ids=places.long(), use_cache=False
        ).last_hidden_state
        return hidden[:, :-1][mask[:, 1:]]
    whole = torch.cat(list(positions)).long()
    flat = torch.cat(list(ids)).long()[None]
    result = decoder(input_ids=flat, position_ids=whole[None], use_cache=False, **segment_bounds(whole))
    hidden = result.last_hidden_state
    return hidden[0, :-1][torch.cat(list(masks))[1:]]


def segment_bounds(positions: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of attention functions of variable length, from the positions [T] of all rows.

    A segment starts at every position 0: a rollout, or one token of padding.
    """
    starts = torch.nonzero(positions == 0).flatten()
    bounds = torch.cat([starts, starts.new_tensor([len(positions)])]).to(torch.int32)  # [segments + 1]
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def attention_of(model: Any) -> str:
    """Return the name of the attention function in transformers."""
    return str(model.config._attn_implementation)
