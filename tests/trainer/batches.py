"""Batches for the trainer's tests: rollouts with random tokens, packed as the service packs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from replaybuf.wire.batch import BatchGroup, Segment, encode_batch
from replaybuf.wire.group import Group, RolloutJson
from replaybuf_trainer.reading import TensorBatch, read_tensors
from tests import builders

VOCABULARY = 98


@dataclasses.dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout: prompt and completion ids, and what was recorded of the completion."""

    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    inference_logprobs: list[float]
    ref_logprobs: list[float]
    advantage: float


def rollouts(count: int, seed: int, *, longest: int = 9) -> list[Rollout]:
    """Draw rollouts of 1 to `longest` prompt and as many completion tokens, some of them masked."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(count):
        prompt, completion = (int(n) for n in rng.integers(1, longest + 1, 2))
        mask = (rng.random(completion) < 0.8).astype(int)
        drawn.append(
            Rollout(
                prompt_ids=rng.integers(3, VOCABULARY, prompt).tolist(),
                completion_ids=rng.integers(3, VOCABULARY, completion).tolist(),
                completion_mask=mask.tolist(),
                # Around log(1/98), what random weights give: ratios on both sides of the clip.
                inference_logprobs=(-4.6 + 0.4 * rng.standard_normal(completion)).tolist(),
                ref_logprobs=(-4.6 + 0.4 * rng.standard_normal(completion)).tolist(),
                advantage=float(rng.standard_normal()),
            )
        )
    return drawn


def group_of(members: Sequence[Rollout], *, with_ref: bool = True, **fields: Any) -> Group:
    """Make one group of rollouts."""
    return builders.group(
        *(
            RolloutJson(
                prompt_ids=rollout.prompt_ids,
                completion_ids=rollout.completion_ids,
                completion_mask=rollout.completion_mask,
                inference_logprobs=rollout.inference_logprobs,
                ref_logprobs=rollout.ref_logprobs if with_ref else None,
                advantage=rollout.advantage,
                reward=float(number % 2),
            )
            for number, rollout in enumerate(members)
        ),
        **fields,
    )


def packed_body(
    members: Sequence[Rollout],
    rows: Sequence[Sequence[int]],
    *,
    pad_to_multiple_of: int = 1,
    sampling_weight: float | None = None,
    with_ref: bool = True,
    step: int = 0,
) -> bytes:
    """Pack rollouts as one group: `rows[i]` are the rollouts of micro-batch `i`; an empty row is a filler."""
    entry = BatchGroup(
        group=group_of(members, with_ref=with_ref),
        index=0,
        staleness=1,
        times_sampled=1,
        sampling_weight=sampling_weight,
    )
    tokens = sum(len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in members)
    meta = builders.batch_meta(
        step=step,
        version=step,
        micro_batches=len(rows),
        adapters=[""] * len(rows),
        rollouts=len(members),
        batch_rollouts=len(members),
        tokens=tokens,
        batch_tokens=tokens,
        batch_loss_tokens=sum(sum(rollout.completion_mask) for rollout in members),
    )
    segments = [[Segment(entry, number) for number in row] for row in rows]
    return bytes(encode_batch(meta, segments, pad_to_multiple_of=pad_to_multiple_of))


def packed(members: Sequence[Rollout], rows: Sequence[Sequence[int]], **fields: Any) -> TensorBatch:
    """Pack rollouts as `packed_body` does, and read them."""
    return read_tensors(packed_body(members, rows, **fields))


def logprobs_alone(model: Any, rollout: Rollout) -> torch.Tensor:
    """Return the log-softmax [C, V] at every completion token, from a forward pass of this rollout alone."""
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(rollout.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits.float(), -1)


def trained_rows(batch: TensorBatch) -> list[dict[str, torch.Tensor]]:
    """Return the micro-batches that hold rollouts."""
    return [row for row in batch.micro_batches if len(row["rewards"])]
