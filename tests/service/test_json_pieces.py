"""Answers in JSON: in pieces of which none is large, or in one write."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.service.http.reply import json_pieces
from replaybuf.service.http.reply.json_pieces import CYCLE, JsonResponse, encode_pieces

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=3), values, max_size=4))
def test_pieces_join_to_the_same_json(value: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_pieces, "PIECE_ITEMS", 2)
        assert json.loads(b"".join(encode_pieces(value))) == value


@pytest.mark.parametrize("shape", [(0,), (5,), (4096,), (100_000,), (5000, 3)], ids=str)
def test_arrays_become_lists(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    assert json.loads(b"".join(encode_pieces({"x": array}))) == {"x": array.tolist()}


def test_no_piece_is_large() -> None:
    """The encoder holds the event loop for one piece."""
    value = {
        "array": np.zeros(1_000_000, np.float32),
        "structs": [{"numbers": list(range(100_000))} for _ in range(3)],
        "raw": msgspec.Raw(b"[1]"),
    }
    assert max(map(len, encode_pieces(value))) < 64 * 1024


class Written:
    """A transport that remembers what is written to it, and whether it was closed."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        """Remember bytes."""
        self.pieces.append(data)

    def close(self) -> None:
        """Remember the end."""
        self.closed = True


def answered(method: str = "GET", *, keep_alive: bool = True, paused: bool = False) -> tuple[Written, list[Any], int]:
    """Send an answer on a connection of ours; return what was written, sent by uvicorn, and how often it ended."""
    transport, sent, ends = Written(), list[Any](), list[None]()
    cycle = SimpleNamespace(
        scope={"method": method},
        transport=transport,
        flow=SimpleNamespace(write_paused=paused),
        default_headers=[(b"date", b"now")],
        keep_alive=keep_alive,
        disconnected=False,
        message_event=asyncio.Event(),
        on_response=lambda: ends.append(None),
    )
    scope = {"type": "http", "method": method, "state": {CYCLE: cycle}}

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise RuntimeError("the body was read before")

    asyncio.run(JsonResponse(b'{"a":1}', 200, None)(scope, receive, send))
    return transport, sent, len(ends)


HEAD = b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-length: 7\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("method", "keep_alive", "written"),
    [
        ("GET", True, HEAD + b'\r\n{"a":1}'),
        ("HEAD", True, HEAD + b"\r\n"),
        ("POST", False, HEAD + b'connection: close\r\n\r\n{"a":1}'),
    ],
)
def test_an_answer_is_one_write_and_ends_its_request(method: str, keep_alive: bool, written: bytes) -> None:
    transport, sent, ends = answered(method, keep_alive=keep_alive)
    assert transport.pieces == [written] and not sent
    assert (ends, transport.closed) == (1, not keep_alive)


def test_an_answer_to_a_client_that_does_not_keep_up_waits_with_uvicorn() -> None:
    """Its buffer is full: uvicorn's own way waits until it is not."""
    transport, sent, _ = answered(paused=True)
    assert not transport.pieces
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
