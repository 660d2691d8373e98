"""Bodies of an append, and the results that come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import httpx

from replaybuf.client.replies import answer_of, error_of
from replaybuf.errors import InvalidGroups, Malformed, counted
from replaybuf.wire.contract import AppendResult, AppendResults
from replaybuf.wire.frame import encode_frame
from replaybuf.wire.group import Group

APPEND_BODY_BYTES = 32 << 20
"""Approximate maximum of one append body. A group is never split."""


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


def read_results(reply: httpx.Response, sent: int) -> list[AppendResult]:
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
