"""Readers of requests: bodies within their limits, declared shapes, parameters of paths and queries.

Raises `TooLarge`, `UnsupportedMedia`, `Malformed` for bytes that do not decode, `Invalid` for values out of bounds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from replaybuf.errors import Invalid, Malformed, TooLarge, UnsupportedMedia
from replaybuf.service.http.body.body_budget import STEP_BYTES, BodyShare
from replaybuf.service.http.guard.auth import Permission
from replaybuf.wire.config import LARGEST_INTEGER, RunConfig
from replaybuf.wire.config_patch import ConfigPatch
from replaybuf.wire.decoding import decode_json, decode_request
from replaybuf.wire.names import LONGEST_NAME_BYTES, LONGEST_REASON_BYTES, check_string, check_strings

T = TypeVar("T", bound=msgspec.Struct)

MAX_CONTROL_BODY_BYTES = 256 << 10
"""Decoding any body of this size holds the event loop for at most 20 ms."""
MAX_PAGE = 1000

_PATCH_FIELDS = ConfigPatch.__struct_fields__
_FIXED_FIELDS = set(RunConfig.__struct_fields__) - set(_PATCH_FIELDS)
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
_REAL_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SHOWN_DIGITS = 500
_MAX_DIGITS = len(str(LARGEST_INTEGER))


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A whole number in a path or a query, from `low` to `high`."""

    name: str
    default: int | None = None
    low: int = 0
    high: int = LARGEST_INTEGER
    required: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Real:
    """A finite number in a query, between the bounds of a 32-bit float."""

    name: str
    high: float = 3.4e38


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A text in a query, printable and at most `most_bytes` long; one of `choices`, if there are any."""

    name: str
    default: str | None = None
    choices: tuple[str, ...] = ()
    most_bytes: int = LONGEST_NAME_BYTES


STEP = Number("step", required=True)
EPOCH = Number("epoch", required=True)
DP_RANK = Number("dp_rank", 0)
WAIT_MS = Number("wait_ms", 0)
NEWER_THAN = Number("after")
AFTER = Number("after", 0)
LIMIT = Number("limit", 100, 1, MAX_PAGE)
GENERATION = Number("generation")
ADAPTER = Text("adapter", "")
REASON = Text("reason", "returned", most_bytes=LONGEST_REASON_BYTES)
IF_REVISION = Number("if_revision")
DRY_RUN = Text("dry_run", "false", ("true", "false"))
PIECES = Text("pieces", "false", ("true", "false"))
IF_ABSENT = Text("if_absent", "false", ("true", "false"))


class BodyParts:
    """The body of a request in parts, of which at most `held_bytes` stay in memory.

    Raises `TooLarge` as soon as the body is known to exceed the limit, `ClientDisconnect`, and what `BodyShare.hold`
    and `Permission.check` raise: no part passes after the token is revoked. Not a generator: several around each other
    take longer than a small body.
    """

    def __init__(self, request: Request, limit_bytes: int, held_bytes: int) -> None:
        self._receive = request.receive
        self._limit_bytes = limit_bytes
        self._held_bytes = held_bytes
        state = request.scope["state"]
        self._share: BodyShare = state["body_share"]
        permission: Permission = state["permission"]
        self._permission = None if permission.tokens.open else permission
        self._declared_bytes = declared_bytes(request)
        if self._declared_bytes > min(limit_bytes, STEP_BYTES):
            self._check(self._declared_bytes)
        self._most_bytes = min(self._declared_bytes or limit_bytes, held_bytes)
        self._size_bytes = 0
        self._more = True

    def __aiter__(self) -> BodyParts:
        return self

    async def __anext__(self) -> bytes:
        while self._more:
            # Room for what has arrived and the next step, before the next bytes are taken from the connection.
            needed_bytes = min(self._size_bytes + STEP_BYTES, self._most_bytes)
            if needed_bytes > self._share.held_bytes:
                await self._share.hold(needed_bytes)
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part: bytes = message.get("body", b"")
            self._more = message.get("more_body", False)
            if part:
                self._size_bytes += len(part)
                if self._size_bytes > self._declared_bytes:  # what it declares is checked
                    self._check(self._size_bytes)
                self._share.read_bytes = self._size_bytes
                if self._permission:
                    self._permission.check()
                return part
        raise StopAsyncIteration

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self._limit_bytes:
            raise _too_large(size_bytes, self._limit_bytes)
        self._share.check(min(size_bytes, self._held_bytes))


def declared_bytes(request: Request) -> int:
    """Return the size of the body that a request declares; 0 if it declares none."""
    declared = header(request, b"content-length")
    return int(declared) if declared.isdigit() else 0


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Read a small body; keep it, in case that another server must answer."""
    body = b"".join([part async for part in BodyParts(request, limit_bytes, limit_bytes)])
    request.state.body_share.kept = body
    return body


def _too_large(size_bytes: int, limit_bytes: int) -> TooLarge:
    detail = f"body has at least {size_bytes} bytes; the maximum is {limit_bytes}"
    return TooLarge(detail, name="body", value=size_bytes, bound=limit_bytes)


async def read_json(request: Request, shape: type[T]) -> T:
    """Read a JSON body of a declared shape."""
    media_type(request, {"application/json"})
    return decode_request(await read_body(request, MAX_CONTROL_BODY_BYTES), shape)


async def read_patch(request: Request) -> ConfigPatch:
    """Read a change of a run. Raises `Malformed` for a field of the configuration that cannot be changed."""
    media_type(request, {"application/json"})
    body = await read_body(request, MAX_CONTROL_BODY_BYTES)
    for name in decode_json(body, dict[str, Any]).keys() & _FIXED_FIELDS:
        detail = (
            f"{name} is fixed when the run is created; PATCH changes {', '.join(_PATCH_FIELDS)}. To use another "
            f"{name}, create a run with another name"
        )
        raise Malformed(detail, name=name, bound=_PATCH_FIELDS)
    patch = decode_json(body, ConfigPatch)
    check_strings(patch)
    return patch


def media_type(request: Request, accepted: set[str]) -> str:
    """Return the media type of the body. Raises `UnsupportedMedia` if the call does not accept it."""
    declared = declared_media_type(request)
    if declared not in accepted:
        detail = f"Content-Type is {declared or 'missing'}; this call accepts {', '.join(sorted(accepted))}"
        raise UnsupportedMedia(detail, name="content-type", value=declared, bound=sorted(accepted))
    return declared


def declared_media_type(request: Request) -> str:
    """Return the media type of the body without its parameters; "" for none."""
    return header(request, b"content-type").partition(";")[0].strip().lower()


def header(request: Request, name: bytes) -> str:
    """Return the first header of this name, in lower case; "" for none. starlette's `headers` takes three calls."""
    for sent, value in request.scope["headers"]:
        if sent == name:
            text: str = value.decode("latin-1")
            return text
    return ""


def check_query(request: Request, accepted: Sequence[Number | Real | Text]) -> None:
    """Raise `Malformed` for an unknown query parameter: a misspelled one would have no effect."""
    names = [parameter.name for parameter in accepted]
    for parameter_name, value in request.query_params.items():
        if parameter_name not in names:
            close = get_close_matches(parameter_name, names, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            detail = (
                f"query parameter {parameter_name!r} is unknown; this call accepts {', '.join(names) or 'none'}{hint}"
            )
            raise Malformed(detail, name=parameter_name, value=value, bound=names)


def number(request: Request, parameter: Number) -> int:
    """Read a whole number that is required or has a default."""
    value = optional_number(request, parameter)
    if value is None:
        name = parameter.name
        raise Malformed(f"{name} is missing; add {name}= with a whole number", name=name, bound="integer")
    return value


def optional_number(request: Request, parameter: Number) -> int | None:
    """Read a whole number, or its default."""
    name = parameter.name
    raw = request.path_params.get(name) or request.query_params.get(name)
    if raw is None:
        return parameter.default
    if not _WHOLE_NUMBER.fullmatch(raw):
        raise Malformed(f"{name} is {raw!r}; it must be a whole number", name=name, value=raw, bound="integer")
    digits = len(raw.lstrip("-"))  # Python raises for thousands of digits
    value = int(raw) if digits <= _MAX_DIGITS else raw if digits < _SHOWN_DIGITS else f"a number of {digits} digits"
    if isinstance(value, str) or not parameter.low <= value <= parameter.high:
        detail = f"{name} is {value}; it must be in {parameter.low}..{parameter.high}"
        raise Invalid(detail, name=name, value=value, bound=[parameter.low, parameter.high])
    return value


def real(request: Request, parameter: Real) -> float | None:
    """Read a finite number; None without one."""
    name, raw = parameter.name, request.query_params.get(parameter.name)
    if raw is None:
        return None
    if not _REAL_NUMBER.fullmatch(raw):
        raise Malformed(f"{name} is {raw!r}; it must be a finite number", name=name, value=raw, bound="number")
    value = float(raw)
    if not abs(value) <= parameter.high:
        detail = f"{name} is {raw}; it must be in {-parameter.high}..{parameter.high}"
        raise Invalid(detail, name=name, value=raw, bound=[-parameter.high, parameter.high])
    return value


def text(request: Request, parameter: Text) -> str | None:
    """Read a text, or its default. Raises `Invalid` for one outside its bounds or choices."""
    name, choices = parameter.name, parameter.choices
    value = request.query_params.get(name, parameter.default)
    check_string(name, value or "", parameter.most_bytes)
    if value is not None and choices and value not in choices:
        detail = f"{name} is {value!r}; it must be one of {', '.join(choices)}"
        raise Invalid(detail, name=name, value=value, bound=choices)
    return value


def wait_s(request: Request) -> float:
    """Read how long the caller wants to wait, in seconds."""
    return number(request, WAIT_MS) / 1000


def page(request: Request) -> tuple[int, int]:
    """Read the start and the maximum length of a page."""
    return number(request, AFTER), number(request, LIMIT)
