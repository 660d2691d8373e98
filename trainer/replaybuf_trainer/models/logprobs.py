"""Logprobs of rollouts by a model folder, several rollouts to a row: `replaybuf generate --ref-model`.

Only their restarting positions separate the rollouts of a row, as in `replaybuf_trainer.loss`. Some architectures of
transformers ignore that, and some change their logits behind the last layer. So a model is tested when it is loaded,
and rejected if packed rows give other logprobs than a plain forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from replaybuf.errors import Invalid
from replaybuf.wire.group import Float32s, Int32s

ROW_TOKENS = 4096
"""Maximum tokens of a row of several rollouts: without flash attention the mask grows with their square."""
HEAD_TOKENS = 1024
"""Logits computed at a time: 1024 x 150,000 float32 are 0.6 GB."""
_TEST_TOKENS = (11, 7)
_TOLERANCE = {torch.float32: 1e-3}
_COARSE_TOLERANCE = 0.25

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
        if not (folder / "config.json").is_file():
            raise Invalid(f"model folder {folder} has no config.json", name="ref_model", value=str(folder))
        transformers_logging.disable_progress_bar()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype: Any = "auto" if self._device.type == "cuda" else torch.float32
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self._model.to(self._device).eval()
        self.max_tokens: int | None = getattr(self._model.config, "max_position_embeddings", None)
        self._test_rows(folder)

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Float32s]:
        """Return the logprob of every completion token, float32 [C] in nats, for each rollout."""
        found: list[Float32s] = []
        row: list[_Tokens] = []
        for rollout in rollouts:
            ids = np.concatenate([rollout.prompt_ids, rollout.completion_ids])
            if row and sum(len(others) for others, _ in row) + len(ids) > ROW_TOKENS:
                found += self._row(row)
                row = []
            row.append((ids, len(rollout.prompt_ids)))
        return found + self._row(row)

    @torch.inference_mode()
    def _row(self, sequences: Sequence[_Tokens]) -> list[Float32s]:
        """Return the completions' logprobs of one packed row of L tokens, K of them completion tokens."""
        ids = self._tensor(np.concatenate([ids for ids, _ in sequences]))  # [L]
        positions = self._tensor(np.concatenate([np.arange(len(ids)) for ids, _ in sequences]))  # [L]
        completion = np.concatenate([np.arange(len(ids)) >= prompt for ids, prompt in sequences])
        at = self._tensor(np.flatnonzero(completion))  # [K]
        hidden = self._model.base_model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state[0]
        head = self._model.get_output_embeddings()
        # The logits of token t stand at t-1; every prompt has a token, so a completion never starts at 0.
        chunks = [at[start : start + HEAD_TOKENS] for start in range(0, len(at), HEAD_TOKENS)]
        parts = [_target_logprobs(head(hidden[places - 1]), ids[places]) for places in chunks]
        ends = np.cumsum([len(ids) - prompt for ids, prompt in sequences])[:-1]
        return np.split(torch.cat(parts).cpu().numpy(), ends)

    def _tensor(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    @torch.inference_mode()
    def _test_rows(self, folder: Path) -> None:
        """Compare a packed row with a forward pass for each rollout. Raises `Invalid` if they differ."""
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        sequences = [(np.arange(tokens, dtype=np.int32) * 7919 % vocabulary, 1) for tokens in _TEST_TOKENS]
        difference = 0.0
        for (ids, _), packed in zip(sequences, self._row(sequences), strict=True):
            whole = self._tensor(ids)
            logits = self._model(input_ids=whole[None], use_cache=False).logits[0, :-1]
            alone = _target_logprobs(logits, whole[1:]).cpu().numpy()
            difference = max(difference, float(np.abs(alone - packed).max()))
        bound = _TOLERANCE.get(self._model.dtype, _COARSE_TOLERANCE)
        if not difference <= bound:  # NaN too
            raise Invalid(
                f"model folder {folder} ({type(self._model).__name__}) computes packed rows wrong: logprobs differ by "
                f"{difference:.3g} from those of single rollouts; the maximum is {bound}. "
                "Serve it by vLLM and use --ref-engine",
                name="ref_model",
                value=difference,
                bound=bound,
            )


def _target_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the logprobs of `targets` [k] under `logits` [k, V], float32 [k]."""
    return torch.log_softmax(logits.float(), -1).gather(1, targets[:, None]).squeeze(1)
