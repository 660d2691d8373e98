"""Send requests with the transport of our clients, so that all sides of a comparison receive bodies alike."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from replaybuf.client.transport import Sending, path_with, transport_to

TIMEOUT_S = 120.0


class Fetcher:
    """A connection to one server, without decompression. Its calls raise `RuntimeError` for an error."""

    def __init__(self, url: str) -> None:
        self._transport = transport_to(url, {"accept-encoding": "identity"})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()

    def get(self, path: str, **query: int) -> bytes:
        """Return a body."""
        return self._send("GET", path_with(path, query), {}, b"")

    def post(self, path: str, value: Any) -> bytes:
        """Post JSON; return the body of the reply."""
        return self._send("POST", path, {"content-type": "application/json"}, msgspec.json.encode(value))

    def _send(self, method: str, path: str, headers: dict[str, str], content: bytes) -> bytes:
        request = Sending(
            method=method, path=path, headers=headers, content=content, connect_s=TIMEOUT_S, read_s=TIMEOUT_S
        )
        reply = self._transport.send(request)
        if not reply.is_success:
            raise RuntimeError(f"{method} {path}: status {reply.status_code}")
        return reply.content
