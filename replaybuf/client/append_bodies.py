"""Bodies of an append, and the results that come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from replaybuf.client.http_reply import Reply
from replaybuf.client.replies import answer_of, error_of
from replaybuf.errors import InvalidGroups, Malformed, counted
from replaybuf.wire.contract import AppendResult, AppendResults
from replaybuf.wire.frame import encode_frame
from replaybuf.wire.group import Group
from replaybuf.wire.group_check import GroupLimits, check_group

APPEND_BODY_BYTES = 32 << 20
"""Approximate maximum of one append body. A group is never split."""


def reject(group: Group, bounds: GroupLimits | None) -> AppendResult | None:
    """Return why a group cannot be stored, None if nothing is wrong. Raises `TypeError` for another object."""
    if not isinstance(group, Group):
        needed = "group_from_json(msgspec.convert(it, GroupJson)), both of replaybuf.wire.group"
        raise TypeError(f"group is a {type(group).__name__}; needed: {needed}")
    # The service checks the published version: the one that this client saw last may be old.
    rejection = check_group(group, bounds or GroupLimits(adapters=frozenset({group.adapter})))
    if rejection is None:
        return None
    return AppendResult(group_id=group.group_id, status="rejected", reason=rejection.reason, detail=rejection.detail)


def split_frames(groups: Sequence[Group], positions: list[int], compress: bool) -> Iterator[dict[int, bytes]]:
    """Encode the groups at these positions; yield frames by position, about `APPEND_BODY_BYTES` at a time."""
    chunk: dict[int, bytes] = {}
    size_bytes = 0
    for position in positions:
        frame = encode_frame(groups[position], compress=compress)
        if chunk and size_bytes + len(frame) > APPEND_BODY_BYTES:
            yield chunk
            chunk, size_bytes = {}, 0
        chunk[position] = frame
        size_bytes += len(frame)
    if chunk:
        yield chunk


def read_results(reply: Reply, sent: int) -> list[AppendResult]:
    """Return the result of each of `sent` groups. Raises the error of an answer without results, `Malformed`."""
    if reply.status_code == InvalidGroups.status and not isinstance(error := error_of(reply), InvalidGroups):
        raise error
    results = answer_of(reply, AppendResults).results
    if len(results) != sent:
        raise Malformed(
            f"the answer to an append of {counted(sent, 'group')} has {counted(len(results), 'result')}",
            name="results",
            value=sent,
        )
    return results
