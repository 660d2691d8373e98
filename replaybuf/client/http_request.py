"""A call of the HTTP API as an exchange: a generator that yields requests and receives the answer of each.

It returns the result of the call. The blocking and the asyncio client run the same exchanges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec

from replaybuf.client.http_reply import Reply

T = TypeVar("T")

_JSON = "application/json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """One HTTP request below the address of a run, or of all runs.

    - `accept`: the media type wanted, for a call with several
    - `wait_ms`: how long the service may hold the request
    - `repeatable`: a repetition does no harm
    - `answers`: statuses beside 2xx that are answers, not errors
    - `every_run`: the address is that of all runs
    - `pause_s`: how long the client waits before it sends the request
    """

    method: str = "GET"
    path: str = ""
    params: dict[str, str | int] = dataclasses.field(default_factory=dict)
    content: bytes = b""
    media_type: str = _JSON
    accept: str | None = None
    wait_ms: int = 0
    repeatable: bool = True
    answers: frozenset[int] = frozenset()
    every_run: bool = False
    pause_s: float = 0.0


Exchange: TypeAlias = Generator[HttpRequest, Reply, T]


def segment(text: str) -> str:
    """Encode one segment of a path. HTTP clients remove the segments `.` and `..`, so their dots are encoded too."""
    encoded = quote(text, safe="")
    return encoded if encoded.strip(".") else encoded.replace(".", "%2E")


def fields(**optional: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in optional.items() if value is not None}


def finite_metrics(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Turn numbers that JSON does not have into None. Scalars of numpy and torch are numbers too."""
    numbers = {name: None if value is None else float(value) for name, value in metrics.items()}
    return {name: value if value is not None and math.isfinite(value) else None for name, value in numbers.items()}


def encode_body(value: Any) -> bytes:
    """Encode the JSON body of a request."""
    return msgspec.json.encode(value)
