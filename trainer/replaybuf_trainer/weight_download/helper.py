"""The helper of an engine: downloads weights for it, and passes the calls of a trainer on to it.

The trainer's publisher `http` calls the helper as if it were the engine. Two things differ::

    POST /stage {"weights_uri": ...}                        downloads; answers at once with the progress
    reload_weights, load_lora_adapter with a weights_uri    are passed on with the folder of the copy

A download that failed is answered once with its reason. A helper that is not ready answers 409, which changes nothing
at the engine, and 502 for an engine that does not answer.
"""

from __future__ import annotations

import logging
import ssl
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from replaybuf.errors import Malformed, ReplaybufError, TooLarge
from replaybuf.wire.decoding import prepared
from replaybuf_trainer.faults import DiskFault, EngineAway
from replaybuf_trainer.weight_download.listening import check_token, problem
from replaybuf_trainer.weight_download.local_weights import LocalWeights
from replaybuf_trainer.weight_download.staging import Staging

logger = logging.getLogger(__name__)

STAGE = "/stage"
LARGEST_BODY_BYTES = 64 << 10
_ADDRESSES = {"/collective_rpc": ("kwargs", "weights_path"), "/v1/load_lora_adapter": ("lora_path",)}
"""Where the calls that load weights name them."""
_PASSED = ("/pause", "/resume", "/update_weight_version", "/v1/unload_lora_adapter")


class StageRequest(msgspec.Struct, frozen=True):
    """Body of `POST /stage`."""

    weights_uri: str


class StageAnswer(msgspec.Struct, frozen=True):
    """Whether the weights are here, and a number that grows while they come."""

    complete: bool
    progress_bytes: int


class Helper:
    """The handlers of all routes."""

    def __init__(
        self,
        engine: str,
        local: LocalWeights,
        staging: Staging,
        token: str | None,
        timeout_s: float,
        tls: ssl.SSLContext,
    ) -> None:
        self._engine = engine.rstrip("/")
        self._local = local
        self._staging = staging
        self._token = token
        self._timeout_s = timeout_s
        self._tls = tls

    def application(self) -> Starlette:
        """Return the application."""
        routes = [
            Route(STAGE, self._stage, methods=["POST"]),
            Route("/weight_info", self._pass_on, methods=["GET"]),
            *(Route(path, self._pass_on, methods=["POST"]) for path in (*_PASSED, *_ADDRESSES)),
        ]
        return Starlette(routes=routes, exception_handlers={ReplaybufError: problem})

    async def _stage(self, request: Request) -> Response:
        check_token(request, self._token)
        content = await _body(request)
        try:
            uri = msgspec.json.decode(content, type=prepared(StageRequest)).weights_uri
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Malformed(f"body: {error}", name="body") from error
        folder = self._staging.start(uri)
        answer = StageAnswer(_complete(folder), self._local.progress_bytes())
        return JSONResponse(msgspec.to_builtins(answer))

    async def _pass_on(self, request: Request) -> Response:
        """Send a call to the engine; its answer is ours."""
        check_token(request, self._token)
        path = request.url.path
        content = await _body(request)
        if path in _ADDRESSES:
            content = self._with_folder(content, _ADDRESSES[path])
        # A client for each call: they are few, and an engine that restarts leaves no dead connection.
        async with httpx.AsyncClient(timeout=self._timeout_s, verify=self._tls) as client:
            try:
                answer = await client.request(
                    request.method,
                    self._engine + path,
                    params=dict(request.query_params),
                    content=content,
                    headers={"content-type": "application/json"},
                )
            except httpx.HTTPError as error:
                detail = f"engine {self._engine} does not answer {path}: {error or type(error).__name__}"
                raise EngineAway(detail, name="engine", value=self._engine) from error
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    def _with_folder(self, content: bytes, keys: tuple[str, ...]) -> bytes:
        """Return a body with the folder of the copy in place of the address of the weights. Raises `Conflict`."""
        try:
            body = msgspec.json.decode(content, type=dict[str, Any])
            *outer, last = keys
            named = body
            for key in outer:
                named = named[key]
            named[last] = str(self._staging.folder(str(named[last])).resolve())
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise Malformed(f"body: {error!r}; it must have {'.'.join(keys)}", name="body") from error
        return msgspec.json.encode(body)


def _complete(folder: Future[Path]) -> bool:
    """Return whether a download is complete. Raises why it failed."""
    if not folder.done():
        return False
    error = folder.exception()
    if isinstance(error, OSError):
        raise DiskFault(f"the weights cannot be stored: {error}", name="folder") from error
    if error is not None:
        raise error
    return True


async def _body(request: Request) -> bytes:
    """Read a body within its bound. Raises `TooLarge`."""
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > LARGEST_BODY_BYTES:
            detail = f"the body has more than {LARGEST_BODY_BYTES} bytes"
            raise TooLarge(detail, name="body", value=len(content), bound=LARGEST_BODY_BYTES)
    return bytes(content)
