"""Reader of an ack: its feedback may be large, and may have any shape."""

from __future__ import annotations

from starlette.requests import Request

from replaybuf.service.http.body.decoders import DecoderPool
from replaybuf.service.http.body.frame_stream import GrowingBytes
from replaybuf.service.http.body.requests import MAX_CONTROL_BODY_BYTES, BodyParts, media_type
from replaybuf.wire.contract import AckRequest
from replaybuf.wire.decoding import decode_request

MAX_FEEDBACK_BODY_BYTES = 1 << 20
"""An ack brings feedback for each group of a batch."""


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
