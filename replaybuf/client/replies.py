"""Decoding of replies: the answer of the contract, or the error that a problem document describes."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from replaybuf.client.http_reply import Reply
from replaybuf.errors import (
    BatchOverdue,
    DataLost,
    GenerationFault,
    GroupRejected,
    InvalidGroups,
    Malformed,
    MissingExtra,
    ReplaybufError,
    ServiceUnavailable,
)
from replaybuf.wire.decoding import prepared

T = TypeVar("T")

_BAD_GATEWAY = (502, 504)
_EXCERPT_CHARS = 200
_LOCAL = (MissingExtra, BatchOverdue, GroupRejected, GenerationFault)
"""Errors that never cross HTTP."""


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


def from_problem(status: int, document: dict[str, Any], retry_after_s: float | None = None) -> ReplaybufError:
    """Rebuild the error of a problem document, as the nearest known class."""
    slug = str(document.get("type", "")).rpartition(":")[2]
    detail = str(document.get("detail") or document.get("title") or f"HTTP status {status}")
    known = [cls for cls in _tree(ReplaybufError) if not issubclass(cls, _LOCAL)]
    by_slug = {cls.slug: cls for cls in reversed(known)}
    by_status = {cls.status: cls for cls in reversed(known)}
    cls = by_slug.get(slug) or by_status.get(status, ReplaybufError)
    fields = {key: document.get(key) for key in ("name", "value", "bound")}
    if cls is DataLost:
        fields |= {key: document.get(key) for key in ("entries", "groups")}
    if cls is InvalidGroups:
        return InvalidGroups(detail, list(document.get("results") or []), **fields)
    return cls(detail, retry_after_s=retry_after_s, **fields)


def _tree(cls: type[ReplaybufError]) -> list[type[ReplaybufError]]:
    return [cls, *(error for child in cls.__subclasses__() for error in _tree(child))]


def _retry_after_s(reply: Reply) -> float | None:
    try:
        return max(0.0, float(reply.headers["retry-after"]))
    except (KeyError, ValueError):  # absent, or a date: `Backoff` alone sets the pauses
        return None


def _excerpt(reply: Reply) -> str:
    return reply.content[:_EXCERPT_CHARS].decode("utf-8", "replace")
