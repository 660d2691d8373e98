"""A request's body passes from the parser to the handler, and its frames to the decoder, without further copies."""

from __future__ import annotations

from replaybuf.service.http.body.frame_stream import FrameStream
from replaybuf.service.http.guard.connection import RequestBody
from replaybuf.wire.frame import encode_frame
from replaybuf.wire.group import group_from_json
from tests.builders import rollout, wire_group


def test_a_body_of_one_piece_is_that_piece() -> None:
    """A `bytearray` in its place would copy it twice."""
    body, piece = RequestBody(), bytes(1000)
    assert not body
    body += piece
    assert bytes(body) is piece
    assert len(body) == 1000


def test_pieces_are_joined_in_order() -> None:
    body = RequestBody()
    for piece in (b"ab", b"", b"c"):
        body += piece
    assert (len(body), bytes(body)) == (3, b"abc")


def test_a_frame_that_arrived_whole_is_not_copied() -> None:
    """Only one that is cut between two parts is joined."""
    frame, stream = encode_frame(group_from_json(wire_group(rollout()))), FrameStream(1 << 20)
    part = frame + frame + frame[:40]
    first, second = stream.feed(part)
    assert isinstance(first, memoryview) and isinstance(second, memoryview)
    assert first.obj is part and second.obj is part
    (joined,) = stream.feed(frame[40:])
    assert isinstance(joined, memoryview)
    stream.end()
    assert list(map(bytes, (first, second, joined))) == [frame] * 3


def test_a_whole_frame_above_the_limit_is_skipped() -> None:
    frame = encode_frame(group_from_json(wire_group(rollout())))
    stream = FrameStream(len(frame) - 1)
    assert list(stream.feed(frame + frame)) == [len(frame)] * 2
    stream.end()
