"""HTTP server of published weights folders, with ranges of bytes, in a thread of the trainer."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from replaybuf.certificates import Certificate
from replaybuf.errors import ReplaybufError
from replaybuf_trainer.weight_download.listening import ServerThread, check_token, problem

IN_USE_S = 60.0
"""A version counts as being downloaded for so long after its last request: helpers pause between tries."""
SEND_TIMEOUT_S = 30.0
"""Longest time in which a client must read a piece."""
LONGEST_RANGE_HEADER = 64


class WeightsServer:
    """Serves the files below `root` that are not hidden, to clients with the token."""

    def __init__(
        self, root: Path, host: str, port: int, token: str | None, certificate: Certificate | None = None
    ) -> None:
        """Listen. Raises `ServiceUnavailable` for a port that is taken."""
        self._root = root.resolve()
        self._token = token
        self._requested_s: dict[Path, float] = {}
        routes = [Route("/{path:path}", self._send_file, methods=["GET"])]
        application = Starlette(routes=routes, exception_handlers={ReplaybufError: problem})
        self._thread = ServerThread(application, host, port, "port of --publisher-options", certificate)

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return self._thread.port

    def in_use(self, folder: Path) -> bool:
        """Return whether somebody downloads the version in a folder."""
        return time.monotonic() - self._requested_s.get(folder.resolve(), -IN_USE_S) < IN_USE_S

    def close(self) -> None:
        """Stop; downloads are cut and go on with the next trainer."""
        self._thread.close()

    async def _send_file(self, request: Request) -> FileResponse:
        check_token(request, self._token)
        parts = request.path_params["path"].split("/")
        path = self._root.joinpath(*parts)
        ordinary = all(part and not part.startswith(".") and "\0" not in part for part in parts)
        # Ranges are of one shard at most; a long list of ranges would cost the server more than the client.
        if len(request.headers.get("range", "")) > LONGEST_RANGE_HEADER:
            raise HTTPException(416, f"range has more than {LONGEST_RANGE_HEADER} characters")
        if not (ordinary and path.is_file() and path.resolve().is_relative_to(self._root)):
            raise HTTPException(404, "there is no such file; older versions are deleted")
        self._use(path)
        return _BoundedFile(path, lambda: self._use(path))

    def _use(self, path: Path) -> None:
        """Record a request; of folders that are deleted nothing is kept."""
        for folder in path.parents:
            if folder == self._root:
                break
            self._requested_s[folder] = time.monotonic()
        for folder in [folder for folder in self._requested_s if not folder.exists()]:
            self._requested_s.pop(folder, None)


class _BoundedFile(FileResponse):
    """A file, in large pieces, to a client that must read each of them in time."""

    chunk_size = 1 << 20

    def __init__(self, path: Path, sent: Any) -> None:
        super().__init__(path, media_type="application/octet-stream")
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        finally:
            self._sent()
