"""Answers with a batch: as body or plan, in a content coding, with validators (RFC 9110 sections 12.5, 13.1.2)."""

from __future__ import annotations

import asyncio
import re

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from replaybuf.errors import NotAcceptable
from replaybuf.service.bodies.assembly import Coding, Form
from replaybuf.service.bodies.writer import Part
from replaybuf.wire import plan

MEDIA_TYPE = "application/vnd.safetensors"
CHUNK_BYTES = 256 * 1024
"""Maximum written to a socket before the event loop serves other calls."""

_QVALUE = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")
_ETAG = re.compile(r'(?:W/)?("[^"]*")|\*')


async def answer(request: Request, part: Part) -> Response:
    """Answer with the plan, or with the body in the preferred coding; 304 if the caller has it already.

    Raises `NotAcceptable` if the request accepts neither coding.
    """
    form: Form = "plan" if wants_plan(request) else coding_for(request.headers.getlist("accept-encoding"))
    etag = part.etag(form)
    headers = {"etag": etag, "vary": "Accept, Accept-Encoding"}
    if matches(request.headers.getlist("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    if form == "plan":
        return Response(await part.plan(), headers=headers, media_type=plan.MEDIA_TYPE)
    if form != "identity":
        headers["content-encoding"] = form
    return BodyResponse(await part.body(form), headers)


def wants_plan(request: Request) -> bool:
    """Check whether `Accept` names the media type of a plan with a weight not below the body's."""
    weights = _weights(request.headers.getlist("accept"))
    return weights.get(plan.MEDIA_TYPE, 0.0) > 0 and weights[plan.MEDIA_TYPE] >= weights.get(MEDIA_TYPE, 0.0)


def coding_for(accepted: list[str]) -> Coding:
    """Choose a coding by `Accept-Encoding`: zstd if it is named with a weight not below identity's.

    A bare `*` accepts zstd but does not select it. Raises `NotAcceptable`.
    """
    weights = _weights(accepted)
    anything = weights.get("*")
    identity = weights.get("identity", 1.0 if anything is None else anything)
    # `*` gives the weight of a coding that is not named; identity is acceptable by default (RFC 9110 section 12.5.3).
    zstd = weights.get("zstd", anything or 0.0)
    if zstd > 0 and (identity == 0 or ("zstd" in weights and zstd >= weights.get("identity", 0.0))):
        return "zstd"
    if identity > 0:
        return "identity"
    value = ", ".join(accepted)
    detail = f"Accept-Encoding is {value!r}; a body comes as identity or zstd"
    raise NotAcceptable(detail, name="accept-encoding", value=value, bound="identity, zstd")


def _weights(values: list[str]) -> dict[str, float]:
    """Parse codings or media types with their weights; ignore malformed elements."""
    weights = {}
    for element in ",".join(values).split(","):
        name, _, parameter = element.partition(";")
        weight = parameter.replace(" ", "").replace("\t", "").lower().removeprefix("q=") if parameter else "1"
        if name.strip() and _QVALUE.fullmatch(weight):
            weights[name.strip().lower()] = float(weight)
    return weights


def matches(values: list[str], etag: str) -> bool:
    """Check whether `If-None-Match` names this validator, compared weakly, or any."""
    return any(match[0] == "*" or match[1] == etag for value in values for match in _ETAG.finditer(value))


class BodyResponse(Response):
    """A body sent in views of at most `CHUNK_BYTES`; the event loop serves other calls between two views."""

    def __init__(self, data: memoryview, headers: dict[str, str]) -> None:
        super().__init__(None, 200, headers | {"content-length": str(data.nbytes)}, MEDIA_TYPE)
        self._data = data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body; `send` waits for a slow reader."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope["method"] != "HEAD":
            for start in range(0, self._data.nbytes, CHUNK_BYTES):
                chunk = self._data[start : start + CHUNK_BYTES]
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                # A fast socket never makes `send` wait.
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
