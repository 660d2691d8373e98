"""Reading requests: bodies within their limits, shapes, numbers in paths and queries.

Raises `TooLarge`, `UnsupportedMedia`, `Malformed` for what does not decode, `Invalid` for what is out of bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request

from replaybuf.decoding import decode_json
from replaybuf.errors import BrokenFrame, GroupRejected, Invalid, Malformed, TooLarge, UnsupportedMedia
from replaybuf.flow import TICKETS_AT_ONCE
from replaybuf.frame import MEDIA_TYPE, decode_frame, split_frames
from replaybuf.group import GroupJson, group_from_json
from replaybuf.service.judge import Incoming

T = TypeVar("T")

LARGEST_BODY_BYTES = 1 << 30
LARGEST_CONTROL_BODY_BYTES = 1 << 20
LARGEST_PAGE = 1000


class TicketRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A producer asks for leave to generate `count` groups, waiting up to `wait_ms` for the first."""

    producer: str
    count: Annotated[int, msgspec.Meta(description=f"Tickets wanted; one call grants {TICKETS_AT_ONCE} at most.")] = 1
    adapter: str = ""
    wait_ms: int = 0


class AckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer says that a step was trained; `feedback` goes to the strategy."""

    epoch: int
    feedback: dict[str, Any] | None = None


class PolicyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer announces a version that the engines have loaded."""

    epoch: int
    version: int
    weights_uri: str | None = None
    adapter: str = ""


class CheckpointRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer can resume at `step`; the newest `keep` checkpoints stay resumable."""

    epoch: int
    step: int
    keep: int | None = None


class GroupsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several groups in one body."""

    groups: list[GroupJson]


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


def number(request: Request, name: str, default: int | None = None, *, path: bool = False) -> int:
    """Read a whole number from the query, or from the path."""
    raw = request.path_params.get(name) if path else request.query_params.get(name)
    if raw is None and default is not None:
        return default
    try:
        return int(str(raw))
    except ValueError:
        given = "missing" if raw is None else repr(raw)
        raise Malformed(f"{name} is {given}; a whole number is needed", name=name, value=raw, bound="integer") from None


def optional_number(request: Request, name: str) -> int | None:
    """Read a whole number from the query; None where it is not there."""
    return number(request, name) if name in request.query_params else None


def wait_s(request: Request) -> float:
    """Read how long the caller is willing to wait, in seconds."""
    wait_ms = number(request, "wait_ms", 0)
    if wait_ms < 0:
        raise Invalid(f"wait_ms is {wait_ms}; 0 or more is needed", name="wait_ms", value=wait_ms, bound=0)
    return wait_ms / 1000


def page(request: Request) -> tuple[int, int]:
    """Read where a page starts and how long it may be."""
    after, limit = number(request, "after", 0), number(request, "limit", 100)
    if not 1 <= limit <= LARGEST_PAGE:
        raise Invalid(
            f"limit is {limit}; it must be in 1..{LARGEST_PAGE}", name="limit", value=limit, bound=LARGEST_PAGE
        )
    return after, limit


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
        reason = "too_large" if error.name == "max_bytes" else "broken_frame"
        return Incoming(None, rejection=GroupRejected(reason, error.detail, name=error.name))
