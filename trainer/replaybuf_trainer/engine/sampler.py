"""Batched sampling with a key-value cache, one token per call.

Shapes: R rows (one per completion), P distinct pairs of adapter and prompt with at most T tokens, H hidden size,
V vocabulary. A `Wave` is one batch of rows from prefill to its last token; between two tokens the caller may stop, load
other weights or abort.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from replaybuf_trainer.engine.lora import adapted
from replaybuf_trainer.engine.served_models import ServedModel


@dataclasses.dataclass(slots=True)
class Row:
    """One completion while it is sampled, from the present weights of `served`.

    `versions`: version of the weights per token; `uniforms`: one random number per token, so that a seeded row does
    not depend on the other rows of its wave; `prompt_logprobs`: with `score_prompt`, the logprob in nats of every
    prompt token but the first.
    """

    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    stop_ids: frozenset[int]
    uniforms: np.ndarray[Any, np.dtype[np.float64]]
    served: ServedModel = dataclasses.field(default_factory=ServedModel)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    score_prompt: bool = False
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)


class _Recorder:
    """Cache that records the keys and values of a prefill, one entry per layer."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.append(keys)
        self.values.append(values)
        return keys, values


class _Slots:
    """Cache of all rows, [R, heads, capacity, head size] per layer; each step writes one position per row."""

    def __init__(self, recorded: _Recorder, prompt_of_row: torch.Tensor, capacity: int) -> None:
        self.keys, self.values = (
            [self._spread(layer, prompt_of_row, capacity) for layer in layers]
            for layers in (recorded.keys, recorded.values)
        )
        self.rows = torch.arange(len(prompt_of_row))
        self.positions = self.rows
        self.width = 0

    @staticmethod
    def _spread(layer: torch.Tensor, prompt_of_row: torch.Tensor, capacity: int) -> torch.Tensor:
        _, heads, tokens, size = layer.shape
        slots = torch.zeros(len(prompt_of_row), heads, capacity, size, dtype=layer.dtype)
        slots[:, :, :tokens] = layer[prompt_of_row]
        return slots

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[layer][self.rows, :, self.positions] = keys[:, :, 0]
        self.values[layer][self.rows, :, self.positions] = values[:, :, 0]
        return self.keys[layer][:, :, : self.width], self.values[layer][:, :, : self.width]

    def keep(self, rows: torch.Tensor) -> None:
        self.keys = [layer[rows] for layer in self.keys]
        self.values = [layer[rows] for layer in self.values]
        self.rows = torch.arange(len(rows))


class Wave:
    """One batch of rows; `active` are the unfinished ones."""

    def __init__(self, model: Any, rows: list[Row]) -> None:
        self.active = sorted(rows, key=lambda row: row.served.name)  # rows of one adapter become neighbours
        self._model = model
        self._slots: _Slots | None = None
        self._positions = torch.empty(0)

    @property
    def done(self) -> bool:
        """Whether every row is finished."""
        return not self.active

    def _prefill(self) -> torch.Tensor:
        """Run the prompts; return the logits [R, V] of the first token of every row."""
        rows = self.active
        keys = [(row.served.lora, tuple(row.prompt_ids)) for row in rows]
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        prompts = [list(prompt) for _, prompt in number]
        prompt_of_row = torch.tensor([number[key] for key in keys])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = torch.tensor(prompt)
        causal = torch.ones(width, width, dtype=torch.bool).tril()[None, None]
        recorded = _Recorder()
        with adapted(self._model, [lora for lora, _ in number]):
            hidden = self._model.model(
                input_ids=ids,
                attention_mask=causal,
                position_ids=torch.arange(width)[None].expand(len(prompts), -1),
                past_key_values=recorded,
                use_cache=False,
            ).last_hidden_state
        self._score_prompts(hidden, ids, prompt_of_row)
        last = hidden[torch.arange(len(prompts)), lengths - 1]
        self._positions = lengths[prompt_of_row].clone()
        self._slots = _Slots(recorded, prompt_of_row, width + max(row.max_tokens for row in rows))
        logits: torch.Tensor = self._model.lm_head(last)[prompt_of_row]
        return logits

    def _score_prompts(self, hidden: torch.Tensor, ids: torch.Tensor, prompt_of_row: torch.Tensor) -> None:
        """Set `prompt_logprobs` of rows with `score_prompt`, from `hidden` [P, T, H] and `ids` [P, T]."""
        for row, prompt in zip(self.active, prompt_of_row.tolist(), strict=True):
            if row.score_prompt:
                length = len(row.prompt_ids)
                logprobs = torch.log_softmax(self._model.lm_head(hidden[prompt, : length - 1]).float(), -1)
                row.prompt_logprobs = logprobs.gather(1, ids[prompt, 1:length, None]).squeeze(1).tolist()

    def step(self) -> None:
        """Sample one token per active row with the present weights of its model.

        The logits are computed at the start of a step, so that weights loaded between two steps take effect.
        """
        with torch.inference_mode():
            logits = self._prefill() if self._slots is None else self._forward(self._slots)
            tokens, logprobs = self._sample(logits)
        keep: list[int] = []
        for i, (row, token, logprob) in enumerate(zip(self.active, tokens, logprobs, strict=True)):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(row.served.version)
            if token in row.stop_ids:
                row.finish_reason = "stop"
            elif len(row.token_ids) >= row.max_tokens:
                row.finish_reason = "length"
            else:
                keep.append(i)
        self._keep(keep)

    def _sample(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        logprobs = torch.log_softmax(logits.float(), -1)
        temperatures = torch.tensor([row.temperature for row in self.active])[:, None]
        uniforms = torch.tensor([row.uniforms[len(row.token_ids)] for row in self.active], dtype=torch.float64)[:, None]
        # The reported logprob is raw; only the choice uses the row's temperature.
        scaled = torch.softmax(logprobs.double() / temperatures.clamp(min=1e-6), -1)
        cumulative = scaled.cumsum(-1)
        drawn = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True).squeeze(1)
        tokens = drawn.clamp(max=logprobs.shape[-1] - 1)
        tokens = torch.where(temperatures.squeeze(1) == 0, logprobs.argmax(-1), tokens)
        return tokens.tolist(), logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()

    def _forward(self, slots: _Slots) -> torch.Tensor:
        """Run the last token of every row; return the logits [R, V] of the next."""
        positions = self._positions
        slots.positions = positions
        slots.width = int(positions.max()) + 1
        visible = (torch.arange(slots.width)[None] <= positions[:, None])[:, None, None]
        with adapted(self._model, [row.served.lora for row in self.active]):
            hidden = self._model.model(
                input_ids=torch.tensor([row.token_ids[-1] for row in self.active])[:, None],
                attention_mask=visible,
                position_ids=positions[:, None],
                past_key_values=slots,
                use_cache=False,
            ).last_hidden_state
        self._positions = positions + 1
        logits: torch.Tensor = self._model.lm_head(hidden[:, 0])
        return logits

    def drop_finished(self) -> None:
        """Drop the rows that the caller has ended."""
        kept = [i for i, row in enumerate(self.active) if row.finish_reason is None]
        if self._slots is None:
            self.active = [self.active[i] for i in kept]
        else:
            self._keep(kept)

    def _keep(self, rows: list[int]) -> None:
        """Drop all rows but these from the wave."""
        if len(rows) < len(self.active) and self._slots is not None:
            chosen = torch.tensor(rows, dtype=torch.long)
            with torch.inference_mode():
                self._slots.keep(chosen)
                self._positions = self._positions[chosen]
            self.active = [self.active[i] for i in rows]
