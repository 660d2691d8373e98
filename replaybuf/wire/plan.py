"""The plan of a batch body: the rollouts of each micro-batch of one rank, and the payload keys of their groups.

A body is a pure function of its plan and the frames: `build_body`. The service calls it, and so does a rank that reads
its frames from Redis (`replaybuf.client.direct`). Both get the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from replaybuf.errors import BrokenFrame, Invalid
from replaybuf.wire.batch import BatchGroup, BatchMeta, BodyExtra, Segment, encode_batch
from replaybuf.wire.column.token_versions import mask_stale, token_versions
from replaybuf.wire.drop_reasons import DeadLetterReason, broken_payload
from replaybuf.wire.frame import decode_frame, stored_checksum
from replaybuf.wire.group import Group
from replaybuf.wire.group_check import truncate
from replaybuf.wire.late_columns import add_columns, check_columns, decode_columns

T = TypeVar("T")

Body: TypeAlias = bytes | memoryview
"""A batch body, as it came or as it was built."""
MEDIA_TYPE = "application/vnd.replaybuf.plan+json"


class PlannedColumn(msgspec.Struct, frozen=True, gc=False):
    """A late column of a group: key, checksum and size of its frame."""

    name: str
    payload_key: str
    crc32c: int
    frame_bytes: int


class PlannedGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group of a batch: key, checksum and size of its frame, and the ledger's facts about this use.

    `sampling_weight` comes from the strategy; null if it gave none. `late_columns`: absent without any.
    """

    group_id: str
    payload_key: str
    crc32c: int
    frame_bytes: int
    staleness: int
    times_sampled: int
    sampling_weight: float | None = None
    late_columns: list[PlannedColumn] | msgspec.UnsetType = msgspec.UNSET


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything a body is built from, except the frames.

    - `meta`: the metadata of the body
    - `rows`: the rollouts of each micro-batch in order, as pairs: position in `groups`, number in that group
    - `groups`: the groups of this rank, in the order of `meta.group_ids`
    - `seq_len`: longer rollouts are cut to this length (`replaybuf.wire.group_check.truncate`)
    - `release`: the replaybuf release that planned; another release may write other bytes
    - `least_versions`: by adapter; tokens of older versions leave the loss mask
    - `extras`: tensors that the trainer asked for
    """

    meta: BatchMeta
    rows: list[list[tuple[int, int]]]
    groups: list[PlannedGroup]
    seq_len: int
    pad_to_multiple_of: int
    release: str
    least_versions: dict[str, int] = {}
    extras: tuple[BodyExtra, ...] = ()


def build_body(plan: Plan, groups: Sequence[Group]) -> memoryview:
    """Build the body of a plan from its groups in the plan's order, as stored or already truncated."""
    versioned = "token_versions" in plan.extras
    placed = []
    for index, (planned, stored) in enumerate(zip(plan.groups, groups, strict=True)):
        group = truncate(stored, plan.seq_len)
        used = BatchGroup(
            group=mask_stale(group, plan.least_versions.get(group.adapter)),
            index=index,
            staleness=planned.staleness,
            times_sampled=planned.times_sampled,
            sampling_weight=planned.sampling_weight,
            token_versions=token_versions(group) if versioned else None,
        )
        placed.append(used)
    rows = [[Segment(placed[position], rollout) for position, rollout in row] for row in plan.rows]
    return encode_batch(plan.meta, rows, pad_to_multiple_of=plan.pad_to_multiple_of, extras=plan.extras)


def decode_payload(payload_key: str, frame: bytes | None, crc32c: int) -> Group:
    """Decode the payload of a group and compare its checksum.

    Raises `BrokenFrame`; its name is the reason: `missing_payload`, `bad_checksum` or `broken_frame`.
    """
    present = _present(payload_key, frame)
    group = _opened(payload_key, present, decode_frame)
    if stored_checksum(present) != crc32c:
        raise broken_payload("bad_checksum", f"payload {payload_key} is not the frame of its index entry")
    return group


def decode_late(group: Group, frames: Mapping[str, bytes | None], payload_key: str) -> Group:
    """Return the group with its late columns, from a frame of each. Raises `BrokenFrame` as `decode_payload` does."""
    for name, frame in frames.items():
        late = _opened(payload_key, _present(f"{payload_key}:{name}", frame), decode_columns)
        try:
            check_columns(group, late)
        except Invalid as error:
            raise broken_payload("broken_frame", f"payload {payload_key}: {error.detail}") from error
        group = add_columns(group, late.columns)
    return group


def _present(payload_key: str, frame: bytes | None) -> bytes:
    if frame is None:
        raise broken_payload("missing_payload", f"payload {payload_key} is missing")
    return frame


def _opened(payload_key: str, frame: bytes, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(frame)
    except BrokenFrame as error:
        reason: DeadLetterReason = "bad_checksum" if error.name == "crc32c" else "broken_frame"
        raise broken_payload(reason, f"payload {payload_key}: {error.detail}") from error
