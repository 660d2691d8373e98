"""Logprobs of given rollouts by a model folder, several rollouts to a row: `replaybuf generate --ref-model`.

Rows are packed as the trainer's are, and kept apart by their restarting positions alone (`replaybuf_trainer.loss`). Not
every architecture of transformers keeps them apart so, and some change their logits behind the last layer; a folder is
tried when it is loaded and refused where packed rows give other logprobs than a plain forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from replaybuf.errors import Invalid
from replaybuf.generator.stages import Rollout
from replaybuf.packing.pack import best_fit_decreasing
from replaybuf.wire.group import Float32s

ROW_TOKENS = 4096
"""Tokens of a row, or of its longest rollout: without flash attention the mask grows with their square."""
HEAD_TOKENS = 1024
"""Logits of so many tokens at a time: 1024 x 150,000 float32 are 0.6 GB."""
_TRIAL_TOKENS = (11, 7)
_TOLERANCE = {torch.float32: 1e-3}
_COARSE_TOLERANCE = 0.25


class PackedLogprobs:
    """A causal language model, float32 on the CPU, else on the first GPU in the type of the folder's weights.

    `max_tokens`: longest rollout it has positions for.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `Invalid` where the folder is no model, or one that cannot compute packed rows."""
        if not (folder / "config.json").is_file():
            raise Invalid(f"model folder {folder} has no config.json", name="ref_model", value=str(folder))
        transformers_logging.disable_progress_bar()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype: Any = "auto" if self._device.type == "cuda" else torch.float32
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self._model.to(self._device).eval()
        self.max_tokens: int | None = getattr(self._model.config, "max_position_embeddings", None)
        self._try_rows(folder)

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Float32s]:
        """Return the logprob of every completion token, float32 [C] in nats, for each rollout."""
        lengths = np.array([len(rollout) for rollout in rollouts], np.int32)
        row_tokens = max(ROW_TOKENS, int(lengths.max()))
        found: dict[int, Float32s] = {}
        for row in best_fit_decreasing(lengths, row_tokens):
            packed = [rollouts[number] for number in row]
            found |= zip(row, self._row(packed), strict=True)
        return [found[number] for number in range(len(rollouts))]

    @torch.inference_mode()
    def _row(self, rollouts: Sequence[Rollout]) -> list[Float32s]:
        ids = self._tensor(np.concatenate([rollout.token_ids for rollout in rollouts]))
        positions = self._tensor(np.concatenate([np.arange(len(rollout)) for rollout in rollouts]))
        completion = np.concatenate([np.arange(len(rollout)) >= len(rollout.prompt_ids) for rollout in rollouts])
        at = self._tensor(np.flatnonzero(completion))
        hidden = self._model.base_model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state[0]
        head = self._model.get_output_embeddings()
        # The logits for the token at t stand at t-1; prompts have a token, so a completion never starts at 0.
        some = [at[start : start + HEAD_TOKENS] for start in range(0, len(at), HEAD_TOKENS)]
        parts = [_picked(head(hidden[places - 1]), ids[places]) for places in some]
        ends = np.cumsum([len(rollout.completion_ids) for rollout in rollouts])[:-1]
        logprobs: Float32s = torch.cat(parts).cpu().numpy()
        return np.split(logprobs, ends)

    def _tensor(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    @torch.inference_mode()
    def _try_rows(self, folder: Path) -> None:
        """Compare packed rollouts with each in a forward pass of its own. Raises `Invalid` where they differ."""
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        ids = [np.arange(tokens, dtype=np.int32) * 7919 % vocabulary for tokens in _TRIAL_TOKENS]
        rollouts = [Rollout(one[:1], one[1:], np.ones(len(one) - 1, np.bool_)) for one in ids]
        differ = 0.0
        for rollout, packed in zip(rollouts, self._row(rollouts), strict=True):
            whole = self._tensor(rollout.token_ids)
            alone = _picked(self._model(input_ids=whole[None], use_cache=False).logits[0, :-1], whole[1:])
            differ = max(differ, float(np.abs(alone.cpu().numpy() - packed).max()))
        bound = _TOLERANCE.get(self._model.dtype, _COARSE_TOLERANCE)
        if not differ <= bound:
            raise Invalid(
                f"model folder {folder} ({type(self._model).__name__}) computes packed rows wrong: logprobs differ by "
                f"{differ:.3g} from those of single rollouts, allowed is {bound}; serve it by vLLM for --ref-engine",
                name="ref_model",
                value=differ,
                bound=bound,
            )


def _picked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the logprobs of `targets` [k] by `logits` [k, V], float32 [k]."""
    return torch.log_softmax(logits.float(), -1).gather(1, targets[:, None]).squeeze(1)
