"""Decoding of replies: the answer of the contract, or the error that a problem document describes."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from replaybuf.client.http_reply import Reply
from replaybuf.errors import Malformed, ReplaybufError, ServiceUnavailable, from_problem
from replaybuf.wire.decoding import prepared

T = TypeVar("T")

_BAD_GATEWAY = (502, 504)
_EXCERPT_CHARS = 200


def answer_of(reply: Reply, shape: type[T]) -> T:
    """Decode the JSON of a reply. Raises `Malformed` if it does not have that shape."""
    try:
        return msgspec.json.decode(reply.content, type=prepared(shape))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed(
            f"the answer of {reply.method} {reply.url} does not fit the contract: {error}; it starts "
            f"with {_excerpt(reply)!r}",
            name="answer",
        ) from error


def error_of(reply: Reply) -> ReplaybufError:
    """Build the error that a reply describes. A reply without a problem document is described by status and excerpt."""
    try:
        document = msgspec.json.decode(reply.content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        where = f"{reply.method} {reply.url}"
        document = {"detail": f"{where} returned status {reply.status_code}: {_excerpt(reply)!r}"}
    status = ServiceUnavailable.status if reply.status_code in _BAD_GATEWAY else reply.status_code
    return from_problem(status, document, _retry_after_s(reply))


def _retry_after_s(reply: Reply) -> float | None:
    try:
        return max(0.0, float(reply.headers["retry-after"]))
    except (KeyError, ValueError):  # absent, or a date: `Backoff` alone sets the pauses
        return None


def _excerpt(reply: Reply) -> str:
    return reply.content[:_EXCERPT_CHARS].decode("utf-8", "replace")
