"""Decode groups in JSON in little memory: group by group, and the lists of a rollout in pieces.

A Python number takes 32 bytes, a number in a column 1 to 8. So each list of numbers is cut at its commas, and a piece
becomes an array before the next one is decoded. Decoding stops as soon as a group exceeds its limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import GroupRejected
from replaybuf.wire.contract import GroupsRequest
from replaybuf.wire.decoding import decode_json, prepared
from replaybuf.wire.frame import LARGEST_HEADER_BYTES
from replaybuf.wire.group import Group, GroupJson, RolloutJson, check_rollouts, group_from_json
from replaybuf.wire.names import Name

Body: TypeAlias = bytes | memoryview
Numbers: TypeAlias = npt.NDArray[Any]

JSON_PER_FRAME_BYTE = 16
"""A group with more bytes of JSON per byte of its limit is rejected without decoding it.

A completion token takes 9 bytes in a frame. In JSON it takes at most 40, and 67 if each number has a line of its own.
"""
_SMALL_BYTES = 1 << 20
"""A smaller group is decoded in one piece, which is faster."""
_PIECE_BYTES = 64 << 10
_COMMA = re.compile(rb",")
_GROUPS = re.compile(rb'"groups"')
_NULL = msgspec.Raw(b"null")
_WHOLE = {"prompt_ids": np.int32, "completion_ids": np.int32, "completion_mask": np.int8, "prompt_mask": np.int8}
"""Lists of whole numbers, with the type of their column; other lists hold float32."""


class DecodedGroup(msgspec.Struct, frozen=True):
    """One group of a body, or why it is rejected; `group_id` and `ticket` as far as they are known."""

    group: Group | None = None
    rejection: GroupRejected | None = None
    group_id: str | None = None
    ticket: str | None = None


class _RawGroup(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`GroupJson` whose rollouts and metadata are not decoded."""

    prompt_id: Name
    policy_version: int
    rollouts: list[msgspec.Raw]
    group_id: Name | None = None
    ticket: Name | None = None
    prompt_index: int | None = None
    adapter: Name = ""
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


class _RawGroups(msgspec.Struct, forbid_unknown_fields=True):
    """`GroupsRequest` whose groups are not decoded."""

    groups: list[msgspec.Raw]


_FIELDS = {field.name: field for field in msgspec.structs.fields(RolloutJson)}
_LISTS = [name for name, field in _FIELDS.items() if {field.type, *get_args(field.type)} & {list[int], list[float]}]
_RawRollout = msgspec.defstruct(
    "_RawRollout",
    [(name, msgspec.Raw) if _FIELDS[name].required else (name, msgspec.Raw, _NULL) for name in _LISTS],
    bases=(RolloutJson,),
    kw_only=True,
)
"""`RolloutJson` whose lists of numbers are not decoded."""


def decode_json_groups(body: Body, max_group_bytes: int) -> Iterator[DecodedGroup]:
    """Decode the groups of a JSON body one by one: one group, or `{"groups": [...]}`.

    Raises `Malformed` or `Invalid` if a group does not have the declared shape; the groups before it are yielded.
    """
    try:
        several = "groups" in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, ValueError, RecursionError):
        # Not an object, not JSON, or JSON with NaN, which is decoded as a whole.
        wires = decode_json(body, GroupsRequest).groups if _GROUPS.search(body) else [decode_json(body, GroupJson)]
        yield from map(_from_wire, wires)
        return
    if not several:
        yield _decode_group(msgspec.Raw(body), "", max_group_bytes)
        return
    for number, raw in enumerate(decode_json(body, _RawGroups).groups):
        yield _decode_group(raw, f"groups[{number}]", max_group_bytes)


def _from_wire(wire: GroupJson) -> DecodedGroup:
    try:
        return DecodedGroup(group_from_json(wire))
    except GroupRejected as rejection:
        return DecodedGroup(None, rejection, wire.group_id, wire.ticket)


def _decode_group(raw: msgspec.Raw, at: str, max_group_bytes: int) -> DecodedGroup:
    size_bytes, limit_bytes = memoryview(raw).nbytes, JSON_PER_FRAME_BYTE * max_group_bytes
    if size_bytes > limit_bytes:
        return DecodedGroup(None, _too_large("the group has {} bytes of JSON", size_bytes, limit_bytes))
    if size_bytes <= _SMALL_BYTES:
        return _from_wire(decode_json(raw, GroupJson, at))
    fields = decode_json(raw, _RawGroup, at)
    try:
        return DecodedGroup(_group(fields, at, max_group_bytes))
    except GroupRejected as rejection:
        return DecodedGroup(None, rejection, fields.group_id, fields.ticket)


def _group(fields: _RawGroup, at: str, max_group_bytes: int) -> Group:
    """Decode what is raw in a group. Raises `GroupRejected`, `Malformed` or `Invalid`."""
    metadata_bytes, limit_bytes = memoryview(fields.metadata).nbytes, JSON_PER_FRAME_BYTE * LARGEST_HEADER_BYTES
    if metadata_bytes > limit_bytes:
        raise _too_large("metadata has {} bytes of JSON", metadata_bytes, limit_bytes)
    check_rollouts(len(fields.rollouts))
    prefix, room = f"{at}." if at else "", _Room(max_group_bytes)
    rollouts = [_rollout(raw, f"{prefix}rollouts[{number}]", room) for number, raw in enumerate(fields.rollouts)]
    metadata = decode_json(fields.metadata, dict[str, Any], f"{prefix}metadata")
    other = {name: getattr(fields, name) for name in fields.__struct_fields__ if name not in ("rollouts", "metadata")}
    return group_from_json(GroupJson(rollouts=rollouts, metadata=metadata, **other))


class _Room:
    """The bytes that the columns of a group may take."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0

    def take(self, nbytes: int) -> None:
        """Take bytes. Raises `GroupRejected` if the group is too large."""
        self._taken_bytes += nbytes
        if self._taken_bytes > self._limit_bytes:
            raise _too_large("the columns of the group have at least {} bytes", self._taken_bytes, self._limit_bytes)


def _rollout(raw: msgspec.Raw, at: str, room: _Room) -> RolloutJson:
    """Decode one rollout, with arrays instead of lists of numbers."""
    fields = msgspec.structs.asdict(decode_json(raw, _RawRollout, at))
    room.take(len(fields["proof"] or b""))
    try:
        for name in _LISTS:
            fields[name] = _numbers(name, fields[name], room)
    except (msgspec.DecodeError, ValueError):
        decode_json(raw, RolloutJson, at)  # raises, with the path of the value
        raise
    return RolloutJson(**fields)


def _numbers(name: str, raw: msgspec.Raw, room: _Room) -> Numbers | None:
    """Decode a list of numbers in pieces; None for null.

    A list of anything else has a quote or a bracket in one of its pieces, so that piece does not decode.
    """
    text = memoryview(raw)
    if len(text) == len(b"null") and text.tobytes() == b"null" and not _FIELDS[name].required:
        return None
    if text[:1].tobytes() != b"[":
        raise ValueError(name)
    shape, dtype = (list[int], _WHOLE[name]) if name in _WHOLE else (list[float], np.float32)
    parts, start, end = [], 1, len(text) - 1
    while start < end:
        comma = _COMMA.search(text, min(start + _PIECE_BYTES, end), end)
        stop = comma.start() if comma else end
        piece = b"".join((b"[", text[start:stop], b"]"))
        column = _column(msgspec.json.decode(piece, type=prepared(shape)), dtype)
        room.take(column.nbytes)
        parts.append(column)
        start = stop + 1
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, dtype)


def _column(values: list[Any], dtype: Any) -> Numbers:
    """Convert numbers to an array; whole numbers that do not fit stay Python numbers, which a later check names."""
    try:
        return np.array(values, dtype)
    except OverflowError:
        return np.array(values, object)


def _too_large(what: str, value: int, bound: int) -> GroupRejected:
    detail = f"{what.format(value)}; the maximum is {bound}"
    return GroupRejected("too_large", detail, name="limits.max_group_bytes", value=value, bound=bound)
