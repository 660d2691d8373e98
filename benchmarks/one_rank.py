"""The body of a batch of groups, as the service packs it for one rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from replaybuf.packing.pack import pack
from replaybuf.wire.batch import BatchGroup, BatchMeta, BodyExtra, Segment, encode_batch
from replaybuf.wire.column.token_versions import mask_stale, token_versions
from replaybuf.wire.group import Group


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
