"""Answers of the engine: JSON, OpenAI error objects, and version spans as vLLM writes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from replaybuf.errors import Invalid, ReplaybufError

_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError"}


def answer(handler: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """Encode what a handler returns as JSON, unless it is a response."""

    async def endpoint(request: Request) -> Response:
        result = await handler(request)
        return result if isinstance(result, Response) else _json(result)

    return endpoint


async def reject(_: Request, error: Exception) -> Response:
    """Answer a request that raised; a fault of the request itself is 400, as in vLLM."""
    if not isinstance(error, ReplaybufError):
        return error_response(500, f"{type(error).__name__}: {error}")
    return error_response(400 if isinstance(error, Invalid) else error.status, error.detail, error.name)


def error_response(status: int, message: str, parameter: str | None = None) -> Response:
    """Return an OpenAI error object."""
    kind = _ERROR_TYPES.get(status, "InternalServerError")
    return _json({"error": {"message": message, "type": kind, "param": parameter, "code": status}}, status)


def version_spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Return the runs of equal versions as vLLM writes them."""
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": str(version), "start": position, "end": position + 1})
    return spans


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
