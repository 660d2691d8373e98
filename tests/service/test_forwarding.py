"""Calls that a follower sends on to the leader: what it makes of a leader that fails."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from replaybuf.errors import ServiceUnavailable
from replaybuf.service.http.forwarding import Forwarding

SCOPE = {
    "type": "http",
    "method": "GET",
    "path": "/v1/runs/r",
    "raw_path": b"/v1/runs/r",
    "query_string": b"",
    "headers": [],
}


class FailingForwarding(Forwarding):
    """Sends calls to a leader that fails in one way."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def _open(self, leader: str) -> httpx.AsyncClient:
        def fail(request: httpx.Request) -> httpx.Response:
            raise self._error

        return httpx.AsyncClient(transport=httpx.MockTransport(fail))


def forward(error: Exception) -> object:
    """Forward a call; return the answer."""

    async def stay() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("the caller stays")

    async def main() -> object:
        return await FailingForwarding(error).forward(Request(SCOPE, stay), "http://leader:1", lambda: True, b"")

    return asyncio.run(main())


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("late"),
        AttributeError("'NoneType' object has no getpeername"),
    ],
    ids=["refused", "late", "reset as it was made"],
)
def test_a_leader_that_cannot_be_reached_answers_nothing(error: Exception) -> None:
    """The third is how anyio reports a socket that the peer has reset before the first byte."""
    assert forward(error) is None


def test_a_leader_that_breaks_off_may_have_done_what_was_asked() -> None:
    with pytest.raises(ServiceUnavailable):
        forward(httpx.ReadError("reset"))
