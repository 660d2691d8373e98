"""Groups drawn at random with the lengths of a reasoning run, and the body of a batch of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from replaybuf.packing.pack import pack
from replaybuf.wire.batch import BatchGroup, BatchMeta, BodyExtra, Segment, encode_batch
from replaybuf.wire.column.token_versions import mask_stale, token_versions
from replaybuf.wire.group import Group

PROMPT_TOKENS = 128
VOCABULARY = 150_000


def random_group(
    rng: np.random.Generator, number: int, *, rollouts: int = 8, mean_tokens: int = 1024, longest: int = 8192
) -> Group:
    """Draw a group with lognormal lengths of about `mean_tokens`, prompt and completion together."""
    lengths = np.clip(rng.lognormal(np.log(mean_tokens * 0.85), 0.6, rollouts), PROMPT_TOKENS + 16, longest)
    completion = (lengths - PROMPT_TOKENS).astype(np.int32)
    c = int(completion.sum())
    spans = np.zeros((rollouts, 4), np.int32)
    spans[:, 0], spans[:, 3] = np.arange(rollouts), completion
    return Group(
        group_id=f"g{number}",
        prompt_id=f"p{number}",
        policy_version=0,
        prompt_ids=rng.integers(0, VOCABULARY, PROMPT_TOKENS * rollouts).astype(np.int32),
        prompt_lengths=np.full(rollouts, PROMPT_TOKENS, np.int32),
        completion_ids=rng.integers(0, VOCABULARY, c).astype(np.int32),
        completion_lengths=completion,
        completion_mask=np.ones(c, np.bool_),
        inference_logprobs=-rng.random(c).astype(np.float32),
        rewards=rng.random(rollouts),
        advantages=rng.standard_normal(rollouts),
        version_spans=spans,
        temperatures=np.ones(rollouts, np.float32),
        finish_reasons=("stop",) * rollouts,
    )


def one_rank_body(
    groups: Sequence[Group], step: int, seq_len: int, extras: Collection[BodyExtra] = (), least: int | None = None
) -> memoryview:
    """Pack groups into the body of a batch, as the service does for one rank; `least`: oldest version in the loss."""
    versioned = "token_versions" in extras
    used = [
        BatchGroup(
            group=mask_stale(group, least),
            index=n,
            staleness=step - group.policy_version,
            times_sampled=1,
            token_versions=token_versions(group) if versioned else None,
        )
        for n, group in enumerate(groups)
    ]
    segments = [Segment(entry, n) for entry in used for n in range(entry.group.rollouts)]
    lengths = np.concatenate([group.lengths for group in groups])
    rows = [[segments[item] for item in row] for row in pack(lengths, seq_len, 1)[0]]
    tokens, loss_tokens = int(lengths.sum()), sum(int(group.completion_mask.sum()) for group in groups)
    meta = BatchMeta(
        run="bench",
        step=step,
        generation=0,
        batch_id=str(step),
        digest="",
        dp_rank=0,
        dp_world_size=1,
        version=step,
        strategy="",
        options={},
        micro_batches=len(rows),
        adapters=[""] * len(rows),
        group_ids=[str(n) for n in range(len(groups))],
        tokens=tokens,
        padding=0,
        loss_tokens=loss_tokens,
        rollouts=len(segments),
        batch_tokens=tokens,
        batch_loss_tokens=loss_tokens,
        batch_rollouts=len(segments),
        batch_groups=len(groups),
    )
    return encode_batch(meta, rows, extras=extras)
