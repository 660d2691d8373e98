"""Problem documents (RFC 9457) as HTTP responses."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from replaybuf.errors import ReplaybufError

MEDIA_TYPE = "application/problem+json"


def error_response(error: ReplaybufError, request: str = "") -> Response:
    """Render an error, with the headers that belong to its status; `request`: id of the request, as the log has it."""
    headers = {"X-Request-Id": request} if request else {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return document_response(error.problem(), headers)


def document_response(document: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """Render a problem document; its `status` is the status of the response."""
    return Response(msgspec.json.encode(document, enc_hook=str), document["status"], headers, media_type=MEDIA_TYPE)
