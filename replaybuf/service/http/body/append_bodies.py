"""Readers of large bodies: the groups in an append, one JSON body or frames as they arrive, and an ack.

No body holds the event loop: small JSON is decoded here, large JSON in a process of its own (`decoders`), a large frame
in a thread, whose work releases Python's lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from starlette.requests import Request

from replaybuf.errors import BrokenFrame, GroupRejected, counted
from replaybuf.service.http.body.decoder_process import Failure, Job, Outcome, too_many_groups
from replaybuf.service.http.body.decoders import DecoderPool
from replaybuf.service.http.body.frame_stream import FrameStream, GrowingBytes
from replaybuf.service.http.body.requests import MAX_CONTROL_BODY_BYTES, BodyParts, media_type
from replaybuf.service.run.append.group_check import LARGE_GROUP_BYTES, Incoming
from replaybuf.service.turns import Turn
from replaybuf.store.chunks import CHUNK_BYTES
from replaybuf.wire.contract import AckRequest
from replaybuf.wire.decoding import decode_request
from replaybuf.wire.frame import MEDIA_TYPE, decode_frame
from replaybuf.wire.group_json import Body, decode_json_groups

MAX_JSON_BYTES = 64 << 20
MAX_FRAMES_BYTES = 1 << 30
MAX_GROUPS = 10_000
"""Groups in one body; their results must fit one answer."""
DECODED_HERE_BYTES = 256 << 10
"""JSON that is decoded on the event loop: at most 13 ms, 1 ms for groups that are right."""
MAX_FEEDBACK_BODY_BYTES = 1 << 20
"""An ack brings feedback for each group of a batch."""


def read_groups(request: Request, max_group_bytes: int, decoders: DecoderPool) -> AsyncIterator[Incoming]:
    """Read the groups of an append; other calls are served between two groups.

    Raises `Malformed`, `Invalid` or `TooLarge` for the body as a whole; the frames before the fault are yielded.
    """
    if media_type(request, {"application/json", MEDIA_TYPE}) == MEDIA_TYPE:
        return _read_frames(request, max_group_bytes)
    return _read_json(request, max_group_bytes, decoders)


async def _read_json(request: Request, max_group_bytes: int, decoders: DecoderPool) -> AsyncIterator[Incoming]:
    """Read a JSON body. Nothing is yielded unless the whole body decodes."""
    growing = GrowingBytes(DECODED_HERE_BYTES)
    async for part in BodyParts(request, MAX_JSON_BYTES, MAX_JSON_BYTES):
        growing.append(part)
    body = growing.collected()
    turn = Turn()
    if isinstance(body, bytes):
        decoded: list[Incoming] = []
        for incoming in decode_small_json(body, max_group_bytes):
            if len(decoded) == MAX_GROUPS:
                raise too_many_groups(MAX_GROUPS)
            decoded.append(incoming)
            await turn.pause()
        for incoming in decoded:
            yield incoming
        return
    frames, outcomes = await decoders.decode_groups(body, Job(max_group_bytes, MAX_GROUPS))
    del body, growing  # the bytes of the body: storing its frames takes memory too
    start = 0
    for outcome in outcomes:
        yield await _from_outcome(outcome, frames[start : start + outcome.frame_bytes])
        start += outcome.frame_bytes
        await turn.pause()


def decode_small_json(body: Body, max_group_bytes: int) -> Iterator[Incoming]:
    """Decode the groups of a JSON body one by one. Raises what `decode_json_groups` raises."""
    for decoded in decode_json_groups(body, max_group_bytes):
        yield Incoming(decoded.group, None, decoded.rejection, decoded.group_id, decoded.ticket)


async def _from_outcome(outcome: Outcome, frame: memoryview) -> Incoming:
    if outcome.rejection is None:
        return await _from_frame(frame, len(frame))
    return Incoming(None, None, _rejection(outcome.rejection), outcome.group_id, outcome.ticket)


def _rejection(failure: Failure) -> GroupRejected:
    return GroupRejected(failure.kind, failure.detail, name=failure.name, value=failure.value, bound=failure.bound)


async def _read_frames(request: Request, max_group_bytes: int) -> AsyncIterator[Incoming]:
    """Read frames as they arrive: memory holds one of them, and those that are being stored."""
    stream, turn, number = FrameStream(max_group_bytes), Turn(), 0
    async for part in BodyParts(request, MAX_FRAMES_BYTES, CHUNK_BYTES + max_group_bytes):
        for frame in stream.feed(part):
            number += 1
            if number > MAX_GROUPS:
                raise too_many_groups(MAX_GROUPS)
            if isinstance(frame, int):
                yield _too_large(frame, max_group_bytes)
            else:
                yield await _from_frame(frame, max_group_bytes)
            await turn.pause()
    stream.end()


def _too_large(length: int, max_bytes: int) -> Incoming:
    detail = f"the frame has {counted(length, 'byte')}; the maximum is {max_bytes}"
    rejection = GroupRejected("too_large", detail, name="limits.max_group_bytes", value=length, bound=max_bytes)
    return Incoming(None, rejection=rejection)


async def _from_frame(frame: memoryview, max_bytes: int) -> Incoming:
    if len(frame) <= LARGE_GROUP_BYTES:
        incoming = decode_incoming(frame, min(max_bytes, LARGE_GROUP_BYTES))
        rejection = incoming.rejection
        if rejection is None or rejection.reason != "too_large" or max_bytes <= LARGE_GROUP_BYTES:
            return incoming  # else it is large when it is decompressed
    return await asyncio.to_thread(decode_incoming, frame, max_bytes)


def decode_incoming(frame: memoryview, max_bytes: int) -> Incoming:
    """Decode a frame of at most `max_bytes` decompressed; a broken or larger one gives its rejection."""
    try:
        return Incoming(decode_frame(frame, max_bytes=max_bytes), frame)
    except BrokenFrame as error:
        large = error.name == "max_bytes"
        reason, name = ("too_large", "limits.max_group_bytes") if large else ("broken_frame", error.name)
        rejection = GroupRejected(reason, error.detail, name=name, value=error.value, bound=error.bound)
        return Incoming(None, rejection=rejection)


async def read_ack(request: Request, decoders: DecoderPool) -> AckRequest:
    """Read an ack; a process decodes one that is larger than other bodies may be.

    On the event loop 1 MiB of `[],` with an error at its end would take 94 ms.
    """
    media_type(request, {"application/json"})
    growing = GrowingBytes(MAX_CONTROL_BODY_BYTES)
    async for part in BodyParts(request, MAX_FEEDBACK_BODY_BYTES, MAX_FEEDBACK_BODY_BYTES):
        growing.append(part)
    body = growing.collected()
    return decode_request(body, AckRequest) if isinstance(body, bytes) else await decoders.decode_ack(body)
