"""Addresses of services: `http://HOST:PORT`, or `unix:/PATH` of one on this machine; several with commas between.

And what is shown to them: the token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import httpx

from replaybuf.errors import Invalid

TransportT = TypeVar("TransportT")

_UNIX = "unix:"


def addresses_of(url: str) -> tuple[str, ...]:
    """Split `url` into addresses, without a slash at the end. Raises `Invalid` for what is none."""
    found = []
    for part in url.split(","):
        path = socket_path(part.strip())
        if path.startswith("/"):
            found.append(_UNIX + path)
            continue
        try:
            parsed = httpx.URL(part.strip())
        except httpx.InvalidURL:
            parsed = httpx.URL()
        if parsed.scheme not in ("http", "https") or not parsed.host:
            bound = "http://HOST:PORT or unix:/PATH, or several with commas between"
            raise Invalid(f"url is {url!r}; needed: {bound}", name="url", value=url, bound=bound)
        found.append(str(parsed).rstrip("/"))
    return tuple(dict.fromkeys(found))


def authorization(token: str | None) -> dict[str, str]:
    """Return the header that shows `token`. Raises `Invalid`, without telling it, for what cannot be a token."""
    if not token:
        return {}
    if not token.isascii() or not token.isprintable() or " " in token:
        bound = "printable ASCII characters without spaces"
        raise Invalid(f"token has a character that no token has; needed: {bound}", name="token", bound=bound)
    return {"authorization": f"Bearer {token}"}


def base_url(address: str) -> str:
    """Return what stands before the path of a request to `address`; for a unix socket it only tells it from others."""
    if not address.startswith(_UNIX):
        return address
    return f"http://{hashlib.blake2b(address.encode(), digest_size=8).hexdigest()}.unix"


def unix_mounts(addresses: Iterable[str], transport: Callable[[str], TransportT]) -> dict[str, TransportT | None]:
    """Say for `httpx.Client(mounts=)` which requests go to a unix socket; `transport` makes one from its path."""
    return {base_url(address): transport(socket_path(address)) for address in addresses if address.startswith(_UNIX)}


def socket_path(address: str) -> str:
    """Return the path of `unix:/PATH` and of `unix:///PATH`, or nothing."""
    path = address.removeprefix(_UNIX)
    return "" if path == address else "/" + path.lstrip("/") if path.startswith("/") else ""
