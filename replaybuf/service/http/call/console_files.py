"""The console: the page at `/` and the files below `/console/`, which `replaybuf/console/` holds.

A strict Content-Security-Policy lets the page run its own scripts only, and load from and call this server only.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from replaybuf.errors import NotFound
from replaybuf.wire.wait_reasons import WAIT_REASONS

INDEX = "index.html"
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


class ConsoleFile(NamedTuple):
    """One file of the console in memory."""

    content: bytes
    media_type: str
    etag: str


def _read(folder: Traversable, prefix: str = "") -> dict[str, ConsoleFile]:
    files: dict[str, ConsoleFile] = {}
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            files |= _read(entry, f"{name}/")
        elif (suffix := name[name.rfind(".") :]) in _TYPES:
            files[name] = _file(entry.read_bytes(), suffix)
    return files


def _file(content: bytes, suffix: str) -> ConsoleFile:
    return ConsoleFile(content, _TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _wait_reasons() -> bytes:
    """Write the words of the waits as a module of the console."""
    reasons = {name: [reason.meaning, reason.action] for name, reason in WAIT_REASONS.items()}
    return b"export const REASONS = " + msgspec.json.encode(reasons) + b";\n"


FILES = _read(files("replaybuf").joinpath("console")) | {"wait_reasons.js": _file(_wait_reasons(), ".js")}
"""About 250 KB: read once, so that a request needs no disk."""


async def get_console(request: Request) -> Response:
    """Return the page that shows every run."""
    return _respond(request, FILES[INDEX])


async def get_console_file(request: Request) -> Response:
    """Return a file of the console."""
    name = request.path_params["file"]
    if name not in FILES:
        raise NotFound(f"the console has no file {name!r}", name="file", value=name)
    return _respond(request, FILES[name])


def _respond(request: Request, file: ConsoleFile) -> Response:
    headers = _HEADERS | {"ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
