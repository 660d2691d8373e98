"""Batches without a service: the bodies that it would send, from groups at hand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from replaybuf.packing.batches import Layout, PackedGroups, write_body
from replaybuf.wire.group import Group
from replaybuf.wire.ledger import BatchEntry, BatchRecord
from replaybuf.wire.plan import PlannedGroup

__all__ = ["Layout", "batch_of_groups", "recorded_batch"]

STRATEGY = "offline"


def batch_of_groups(
    run: str, groups: Sequence[Group], layout: Layout, *, step: int, version: int, dp_rank: int = 0
) -> memoryview:
    """Return the body of one rank with groups that no ledger has put into a batch; `version`: trained at this step.

    Each group is used for the first time, and its staleness is `version` minus its policy version. Raises `Invalid` if
    a rollout is longer than `seq_len` and cannot be cut.
    """
    entries = [
        BatchEntry(
            number=number,
            group_id=group.group_id or f"{step}-{number}",
            prompt_id=group.prompt_id,
            prompt_index=group.prompt_index,
            adapter=group.adapter,
            policy_version=group.policy_version,
            staleness=version - group.policy_version,
            times_sampled=1,
            tokens=group.tokens,
            payload_key="",
        )
        for number, group in enumerate(groups, 1)
    ]
    names = "/".join(entry.group_id for entry in entries)
    record = BatchRecord(
        step=step,
        generation=0,
        batch_id=f"{STRATEGY}-{step}",
        digest=hashlib.blake2b(names.encode(), digest_size=16).hexdigest(),
        version=version,
        strategy=STRATEGY,
        options={},
        seed=[],
        tokens=sum(group.tokens for group in groups),
        rollouts=sum(group.rollouts for group in groups),
        groups=entries,
    )
    return recorded_batch(run, record, groups, layout, dp_rank)


def recorded_batch(
    run: str, record: BatchRecord, groups: Sequence[Group], layout: Layout, dp_rank: int = 0
) -> memoryview:
    """Return the body of one rank with the batch of a ledger record: the bytes of the service, for the same layout.

    `groups`: those of the record, in its order, as they were stored.
    """
    planned = [
        PlannedGroup(
            group_id=entry.group_id,
            payload_key=entry.payload_key,
            crc32c=0,
            frame_bytes=0,
            staleness=entry.staleness,
            times_sampled=entry.times_sampled,
            sampling_weight=entry.weight,
        )
        for entry in record.groups
    ]
    return write_body(run, PackedGroups.pack(record, planned, groups, layout), dp_rank)
