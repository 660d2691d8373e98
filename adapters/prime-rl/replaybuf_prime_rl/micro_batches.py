"""Micro-batches of prime-rl's transport, as of commit 559b447 (0.8.0): msgpack arrays in the order of its fields.

prime-rl shifts logprobs of the trainer to the position of their token, as bodies have them. A sequence is a rollout;
padding is a sequence of its own with the mask 0.
"""

from __future__ import annotations

import msgspec
import numpy as np

from replaybuf.client.unpack import check_unweighted
from replaybuf.wire.batch import Batch, MicroBatch

SHORTEST_ROW = 2
"""prime-rl squeezes a row to one dimension before it splits it into sequences: a row of one token would have none."""


class PrimeMicroBatch(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """`MicroBatch` of prime_rl.transports.rollouts.types; its later fields are absent."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None = None


def encode(batch: Batch) -> bytes:
    """Return the file of one rank. Raises `Invalid` for sampling weights, which prime-rl has no place for."""
    check_unweighted(batch, "prime-rl")
    return msgspec.msgpack.encode([_converted(row, batch) for row in batch.micro_batches])


def _converted(row: MicroBatch, batch: Batch) -> PrimeMicroBatch:
    added = max(0, SHORTEST_ROW - len(row.input_ids))
    lengths = np.diff(row.cu_seqlens)
    lengths[-1] += added
    temperatures = np.ones(len(row.input_ids) + added, np.float32)
    sampled = int(row.cu_seqlens[len(row.temperatures)])
    temperatures[:sampled] = np.repeat(row.temperatures, lengths[: len(row.temperatures)])
    # Sequences, and so metrics, are of one environment: a body does not name those of its groups.
    return PrimeMicroBatch(
        input_ids=[*row.input_ids.tolist(), *[0] * added],
        loss_mask=[*row.loss_mask.tolist(), *[False] * added],
        advantages=[*row.advantages.tolist(), *[0.0] * added],
        inference_logprobs=[*row.inference_logprobs.tolist(), *[0.0] * added],
        position_ids=[*row.position_ids.tolist(), *range(len(row.input_ids), len(row.input_ids) + added)],
        sequence_lengths=lengths.tolist(),
        temperatures=temperatures.tolist(),
        env_names=[batch.meta.run] * (len(row.input_ids) + added),
        seq_lens=lengths.tolist(),
        ref_logprobs=None if row.ref_logprobs is None else [*row.ref_logprobs.tolist(), *[0.0] * added],
    )
