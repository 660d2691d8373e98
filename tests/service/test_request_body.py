"""A request's body passes from the parser to the handler without being copied again."""

from __future__ import annotations

from replaybuf.service.http.guard.connection import RequestBody


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
