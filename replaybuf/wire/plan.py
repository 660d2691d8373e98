"""The plan of a body: which rollouts stand in which micro-batch of one rank, and where the frames of their groups lie.

A body is a pure function of its plan and those frames, `build_body`. The service calls it, and so does a rank that
fetches its frames from Redis itself (`replaybuf.client.direct`): the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from replaybuf.errors import BrokenFrame
from replaybuf.wire.batch import BatchGroup, BatchMeta, Segment, encode_batch
from replaybuf.wire.frame import decode_frame, stored_checksum
from replaybuf.wire.group import Group
from replaybuf.wire.group_check import truncate

MEDIA_TYPE = "application/vnd.replaybuf.plan+json"


class PlannedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of a batch: where its frame lies, how to know it, and what the ledger says of this use.

    `sampling_weight` is what the strategy gave, null where it gave none.
    """

    group_id: str
    payload_key: str
    crc32c: int
    frame_bytes: int
    staleness: int
    times_sampled: int
    sampling_weight: float | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a body is made from, but for the frames.

    - `meta`: what the body says about itself
    - `rows`: of each micro-batch its rollouts in order, as pairs: position in `groups`, number in that group
    - `groups`: the groups of this rank, in the order of `meta.group_ids`
    - `seq_len`: rollouts that are longer are cut to so many tokens (`replaybuf.wire.group_check.truncate`)
    - `release`: of replaybuf that planned; another one may lay the same tokens out in other bytes
    """

    meta: BatchMeta
    rows: list[list[tuple[int, int]]]
    groups: list[PlannedGroup]
    seq_len: int
    pad_to_multiple_of: int
    release: str


def build_body(plan: Plan, groups: Sequence[Group]) -> memoryview:
    """Write the body of a plan from its groups, as they were stored or truncated already, in the plan's order."""
    placed = [
        BatchGroup(
            group=truncate(group, plan.seq_len),
            index=index,
            staleness=planned.staleness,
            times_sampled=planned.times_sampled,
            sampling_weight=planned.sampling_weight,
        )
        for index, (planned, group) in enumerate(zip(plan.groups, groups, strict=True))
    ]
    rows = [[Segment(placed[position], rollout) for position, rollout in row] for row in plan.rows]
    return encode_batch(plan.meta, rows, pad_to_multiple_of=plan.pad_to_multiple_of)


def decode_payload(payload_key: str, frame: bytes | None, crc32c: int) -> Group:
    """Decode the payload of a group, which must be the frame with this checksum.

    Raises `BrokenFrame`, with the reason as its name: `missing_payload`, `bad_checksum`, `broken_frame`.
    """
    if frame is None:
        raise BrokenFrame(f"payload {payload_key} is missing", name="missing_payload")
    try:
        group = decode_frame(frame)
    except BrokenFrame as error:
        reason = "bad_checksum" if error.name == "crc32c" else "broken_frame"
        raise BrokenFrame(f"payload {payload_key}: {error.detail}", name=reason) from error
    if stored_checksum(frame) != crc32c:
        raise BrokenFrame(f"payload {payload_key} is not the frame of its index entry", name="bad_checksum")
    return group
