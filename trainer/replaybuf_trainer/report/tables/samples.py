"""Rollouts of a step, drawn at random, with the values of each of their completion tokens, kept in the forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from replaybuf.errors import counted
from replaybuf.wire.batch import MicroBatch
from replaybuf.wire.group import TokenIds
from replaybuf_trainer.losses.statistics import Tally
from replaybuf_trainer.losses.surrogates import PolicyTerm
from replaybuf_trainer.losses.tokens import LossTokens
from replaybuf_trainer.reading import TensorBatch

Column: TypeAlias = npt.NDArray[Any]
TextOf: TypeAlias = Callable[[TokenIds], str]
"""Text of some token ids, with special tokens."""

RECORDED = ("trainer_logprob", "ratio", "clipped", "entropy", "loss_share")
LOGPROBS = ("engine_logprob", "old_logprob", "ref_logprob")
TOKEN_COLUMNS = (*LOGPROBS, *RECORDED, "difference", "token_advantage")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One rollout of a batch. `tokens`: a value for each of the C completion tokens by name, [C].

    float32, NaN where a token has no loss or the batch no such column: `TOKEN_COLUMNS`. `difference`: logprob of the
    trainer - of the engine. `loss_share`: part of the loss of the batch. `token_id` int32; `loss_mask` bool.
    """

    group_id: str
    rollout: int
    adapter: str
    policy_version: int
    staleness: int
    times_sampled: int
    reward: float
    advantage: float
    prompt_ids: Column
    prompt: str
    completion: str
    token_texts: list[str]
    tokens: dict[str, Column]
    reward_parts: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSamples:
    """The samples of one step. `reward_parts`: means over the whole batch by part; those of a sample are its own."""

    run: str
    step: int
    version: int
    loss: str
    reward_parts: dict[str, float]
    samples: list[Sample]


def draw_samples(batch: TensorBatch, record: TokenRecord, count: int, seed: int, text_of: TextOf) -> list[Sample]:
    """Return at most `count` rollouts of this rank, the same ones for the same seed and step.

    Raises `ValueError` if the record is not of this batch.
    """
    values = {name: column.numpy() for name, column in record.values().items()}
    rows = _rows_in_order(batch)
    loss_tokens = sum(int(row.loss_mask.sum()) for _, row in rows)
    if loss_tokens != len(values["ratio"]):
        raise ValueError(f"the batch has {counted(loss_tokens, 'loss token')}, the record {len(values['ratio'])}")
    places = list(_rollouts(rows))
    generator = np.random.default_rng((seed, batch.meta.step))
    chosen = np.sort(generator.choice(len(places), min(count, len(places)), replace=False))
    return [_sample(batch, places[place], values, text_of) for place in chosen]


def _rows_in_order(batch: TensorBatch) -> list[tuple[str, MicroBatch]]:
    """Return adapter and micro-batch in the order of the forward passes, see `TensorBatch.parts`."""
    return sorted(zip(batch.meta.adapters, batch.host.micro_batches, strict=True), key=lambda pair: pair[0])


def _rollouts(rows: Sequence[tuple[str, MicroBatch]]) -> Iterator[tuple[str, MicroBatch, int, int]]:
    """Yield adapter, micro-batch and number of each rollout, and the number of loss tokens before it."""
    before = 0
    for adapter, row in rows:
        for number in range(len(row.rewards)):
            yield adapter, row, number, before
            before += int(row.loss_mask[row.cu_seqlens[number] : row.cu_seqlens[number + 1]].sum())


def _sample(
    batch: TensorBatch, place: tuple[str, MicroBatch, int, int], values: dict[str, Column], text_of: TextOf
) -> Sample:
    adapter, row, number, before = place
    first, end = int(row.cu_seqlens[number]), int(row.cu_seqlens[number + 1])
    middle = first + _prompt_length(row, number, first, end)
    ids, mask = row.input_ids[middle:end], row.loss_mask[middle:end]
    before += int(row.loss_mask[first:middle].sum())  # prompt tokens in the loss
    tokens: dict[str, Column] = {"token_id": ids, "loss_mask": mask}
    for name in RECORDED:
        tokens[name] = _at(mask, values[name][before : before + int(mask.sum())])
    columns = (row.inference_logprobs, row.old_logprobs, row.ref_logprobs)
    for name, column in zip(LOGPROBS, columns, strict=True):
        tokens[name] = _at(mask, None if column is None else column[middle:end][mask])
    tokens["difference"] = tokens["trainer_logprob"] - tokens["engine_logprob"]
    tokens["token_advantage"] = _at(mask, row.advantages[middle:end][mask])
    return Sample(
        group_id=batch.meta.group_ids[row.group_index[number]],
        rollout=int(row.rollout_index[number]),
        adapter=adapter,
        policy_version=int(row.policy_versions[number]),
        staleness=int(row.staleness[number]),
        times_sampled=int(row.times_sampled[number]),
        reward=float(row.rewards[number]),
        advantage=float(tokens["token_advantage"][mask].mean()) if mask.any() else 0.0,
        prompt_ids=row.input_ids[first:middle],
        prompt=text_of(row.input_ids[first:middle]),
        completion=text_of(ids),
        token_texts=[text_of(ids[place : place + 1]) for place in range(len(ids))],
        tokens=tokens,
    )


def _prompt_length(row: MicroBatch, number: int, first: int, end: int) -> int:
    """Return the tokens of the prompt; those before the first loss token if the body has no lengths."""
    if row.prompt_lengths is not None:
        return int(row.prompt_lengths[number])
    mask = row.loss_mask[first:end]
    return int(mask.argmax()) if mask.any() else len(mask)


def _at(mask: Column, values: Column | None) -> Column:
    """Return `values` at the places of a mask [C], NaN elsewhere."""
    spread = np.full(len(mask), np.nan, np.float32)
    if values is not None:
        spread[mask] = values
    return spread


class TokenRecord(Tally):
    """Values of the loss tokens in the order of the forward passes: 20 bytes per token, on the device of the model."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[torch.Tensor] = []

    @torch.no_grad()
    def keep_tokens(self, tokens: LossTokens, term: PolicyTerm, shares: torch.Tensor) -> None:
        """Keep the values of k loss tokens; `shares` [k]: their parts of the loss of the batch."""
        columns = (tokens.logprobs, term.ratio, term.clipped, tokens.entropies, shares)
        self._parts.append(torch.stack([column.detach().float() for column in columns]))

    def values(self) -> dict[str, torch.Tensor]:
        """Return the columns `RECORDED` on the CPU, float32 [K] for the K loss tokens of the step."""
        whole = torch.cat(self._parts, 1).cpu() if self._parts else torch.empty(len(RECORDED), 0)
        return dict(zip(RECORDED, whole, strict=True))
