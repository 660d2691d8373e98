"""Reading requests: bodies within their limits, shapes, what stands in paths and queries.

Raises `TooLarge`, `UnsupportedMedia`, `Malformed` for what does not decode, `Invalid` for what is out of bounds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TypeVar

import msgspec
from starlette.requests import Request

from replaybuf.errors import BrokenFrame, GroupRejected, Invalid, Malformed, TooLarge, UnsupportedMedia
from replaybuf.kernel.state_view import GROUP_STATES
from replaybuf.service.run.admission import Incoming
from replaybuf.wire.config import LARGEST_INTEGER
from replaybuf.wire.contract import GroupsRequest
from replaybuf.wire.decoding import decode_json
from replaybuf.wire.frame import MEDIA_TYPE, decode_frame, split_frames
from replaybuf.wire.group import GroupJson, group_from_json

T = TypeVar("T")

LARGEST_BODY_BYTES = 1 << 30
LARGEST_CONTROL_BODY_BYTES = 1 << 20
LARGEST_PAGE = 1000

_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
_MOST_DIGITS = len(str(LARGEST_INTEGER))


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A whole number in a path or a query, from `low` to `high`; `default` stands for one that is left out."""

    name: str
    default: int | None = None
    low: int = 0
    high: int = LARGEST_INTEGER
    required: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A text in a query, one of `choices` where there are any."""

    name: str
    choices: tuple[str, ...] = ()


STEP = Number("step", required=True)
EPOCH = Number("epoch", required=True)
DP_RANK = Number("dp_rank", 0)
WAIT_MS = Number("wait_ms", 0)
NEWER_THAN = Number("after")
AFTER = Number("after", 0)
LIMIT = Number("limit", 100, 1, LARGEST_PAGE)
GENERATION = Number("generation")
ADAPTER = Text("adapter")
REASON = Text("reason")
STATE = Text("state", tuple(GROUP_STATES))


async def read_body(request: Request, limit: int) -> bytes:
    """Read a body; it is refused as soon as it is known to be above `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"body has {declared} bytes; at most {limit}", name="body", value=int(declared), bound=limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise TooLarge(f"body has more than {limit} bytes", name="body", value=size, bound=limit)
        parts.append(part)
    return b"".join(parts)


async def read_json(request: Request, shape: type[T]) -> T:
    """Read a JSON body of a declared shape."""
    media_type(request, {"application/json"})
    return decode_json(await read_body(request, LARGEST_CONTROL_BODY_BYTES), shape)


def media_type(request: Request, known: set[str]) -> str:
    """Return the media type of the body if the call takes it."""
    given = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if given not in known:
        raise UnsupportedMedia(
            f"media type is {given!r}; this call takes {', '.join(sorted(known))}",
            name="content-type",
            value=given,
            bound=sorted(known),
        )
    return given


def check_query(request: Request, known: Sequence[Number | Text]) -> None:
    """Refuse a parameter that the call does not take: a typing error would go unnoticed. Raises `Malformed`."""
    if not request.scope["query_string"]:
        return
    names = [parameter.name for parameter in known]
    for given, value in request.query_params.items():
        if given not in names:
            close = get_close_matches(given, names, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise Malformed(
                f"query parameter {given!r} is unknown; this call takes {', '.join(names) or 'none'}{hint}",
                name=given,
                value=value,
                bound=names,
            )


def number(request: Request, asked: Number) -> int:
    """Read a whole number that is needed, or has a default."""
    found = optional_number(request, asked)
    if found is None:
        raise Malformed(f"{asked.name} is missing; a whole number is needed", name=asked.name, bound="integer")
    return found


def optional_number(request: Request, asked: Number) -> int | None:
    """Read a whole number; its default where it is not there."""
    name = asked.name
    raw = request.path_params.get(name) or request.query_params.get(name)
    if raw is None:
        return asked.default
    if not _WHOLE_NUMBER.fullmatch(raw):
        raise Malformed(f"{name} is {raw!r}; a whole number is needed", name=name, value=raw, bound="integer")
    value = int(raw) if len(raw.lstrip("-")) <= _MOST_DIGITS else raw  # thousands of digits are no number to Python
    if isinstance(value, str) or not asked.low <= value <= asked.high:
        raise Invalid(
            f"{name} is {value}; it must be in {asked.low}..{asked.high}",
            name=name,
            value=value,
            bound=[asked.low, asked.high],
        )
    return value


def wait_s(request: Request) -> float:
    """Read how long the caller is willing to wait, in seconds."""
    return number(request, WAIT_MS) / 1000


def page(request: Request) -> tuple[int, int]:
    """Read where a page starts and how long it may be."""
    return number(request, AFTER), number(request, LIMIT)


async def read_groups(request: Request, max_group_bytes: int) -> list[Incoming]:
    """Read the groups of an append, as JSON or as frames; `decode_groups` tells the limits.

    Others have the event loop between two groups, however many there are.
    """
    kind = media_type(request, {"application/json", MEDIA_TYPE})
    incoming = []
    for item in decode_groups(kind, await read_body(request, LARGEST_BODY_BYTES), max_group_bytes):
        incoming.append(item)
        await asyncio.sleep(0)
    return incoming


def decode_groups(kind: str, body: bytes, max_group_bytes: int) -> Iterator[Incoming]:
    """Decode the groups in a body of media type `kind`, one by one; one that cannot be is told by its rejection.

    A frame that would have more than `max_group_bytes` with all columns raw is too large, and so is one that, with
    those before it, would have more than a body may. Raises `Malformed` where the body falls apart.
    """
    if kind != MEDIA_TYPE:
        yield from map(_from_json, _groups_in(body))
        return
    room = LARGEST_BODY_BYTES
    for frame in list(split_frames(body)):
        item = _from_frame(frame, min(max_group_bytes, room))
        room -= item.group.nbytes if item.group else 0
        yield item


def _groups_in(body: bytes) -> Iterator[GroupJson]:
    """Decode one group after the other; where one does not decode, decoding all in full tells what is wrong."""
    done = 0
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        several = "groups" in fields
        if fields.keys() == {"groups"}:
            for piece in msgspec.json.decode(fields["groups"], type=list[msgspec.Raw]):
                yield msgspec.json.decode(piece, type=GroupJson)
                done += 1
            return
    except (msgspec.DecodeError, ValueError, RecursionError):
        several = b'"groups"' in body  # it may not be strict JSON (NaN)
    if several:
        yield from decode_json(body, GroupsRequest).groups[done:]
    else:
        yield decode_json(body, GroupJson)


def _from_json(wire: GroupJson) -> Incoming:
    try:
        return Incoming(group_from_json(wire))
    except GroupRejected as rejection:
        return Incoming(None, rejection=rejection)


def _from_frame(frame: memoryview, max_bytes: int) -> Incoming:
    try:
        return Incoming(decode_frame(frame, max_bytes=max_bytes), frame)
    except BrokenFrame as error:
        large = error.name == "max_bytes"
        reason, name = ("too_large", "limits.max_group_bytes") if large else ("broken_frame", error.name)
        rejection = GroupRejected(reason, error.detail, name=name, value=error.value, bound=error.bound)
        return Incoming(None, rejection=rejection)
