"""Logprobs of rollouts by a model folder, several rollouts to a row: `replaybuf generate --ref-model`.

The model is tested when it is loaded, see `isolation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from replaybuf.wire.group import Float32s, Int32s
from replaybuf_trainer.models.chunked_head import target_logprobs
from replaybuf_trainer.models.isolation import check_isolation
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.models.output_head import output_head
from replaybuf_trainer.models.packed_forward import predicting_states

ROW_TOKENS = 4096
"""Maximum tokens of a row of several rollouts: without flash attention the mask grows with their square."""
_Tokens: TypeAlias = tuple[Int32s, int]
"""Token ids [P + C] of prompt and completion, and P."""


class Rollout(Protocol):
    """One rollout of P prompt tokens and C completion tokens."""

    @property
    def prompt_ids(self) -> Int32s:
        """Token ids of the prompt, int32 [P]."""

    @property
    def completion_ids(self) -> Int32s:
        """Token ids of the completion, int32 [C]."""


class PackedLogprobs:
    """A causal language model: float32 on the CPU, or on the first GPU in the type of the folder's weights.

    `max_tokens`: number of positions, the longest rollout it accepts.
    """

    def __init__(self, folder: Path) -> None:
        """Load a model folder. Raises `Invalid` if it is not a model, or one that cannot compute packed rows."""
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype: Any = "auto" if self._device.type == "cuda" else torch.float32
        self._model = load_model(folder, device=self._device, dtype=dtype, name="ref_model")
        self.max_tokens: int | None = getattr(self._model.config, "max_position_embeddings", None)
        what = f"model folder {folder} ({type(self._model).__name__})"
        with torch.inference_mode():
            check_isolation(self._model, what, "Serve it by vLLM and use --ref-engine", "ref_model")

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Float32s]:
        """Return the logprob of every completion token, float32 [C] in nats, for each rollout."""
        parts: list[Float32s] = []
        row: list[_Tokens] = []
        for rollout in rollouts:
            ids = np.concatenate([rollout.prompt_ids, rollout.completion_ids])
            if row and sum(len(others) for others, _ in row) + len(ids) > ROW_TOKENS:
                parts += self._row(row)
                row = []
            row.append((ids, len(rollout.prompt_ids)))
        return parts + self._row(row)

    @torch.inference_mode()
    def _row(self, sequences: Sequence[_Tokens]) -> list[Float32s]:
        """Return the completions' logprobs of one packed row of L tokens, K of them completion tokens."""
        ids = self._tensor(np.concatenate([ids for ids, _ in sequences]))  # [L]
        positions = self._tensor(np.concatenate([np.arange(len(ids)) for ids, _ in sequences]))  # [L]
        completion = self._tensor(
            np.concatenate([np.arange(len(ids)) >= prompt for ids, prompt in sequences])
        ).bool()  # [L], K are true
        # Every prompt has a token, so a completion never starts at 0.
        hidden = predicting_states(self._model, [ids], [positions], [completion])
        logprobs, _ = target_logprobs(hidden, output_head(self._model), ids[completion])
        ends = np.cumsum([len(ids) - prompt for ids, prompt in sequences])[:-1]
        return np.split(logprobs.cpu().numpy(), ends)

    def _tensor(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)
