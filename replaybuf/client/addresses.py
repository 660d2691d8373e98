"""Addresses and tokens of services.

An address is `http://HOST:PORT`, or `unix:/PATH` for a socket on this machine; several have commas between.
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
    """Split `url` into addresses, without trailing slashes. Raises `Invalid` for an invalid address."""
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
            raise Invalid(f"url is {url!r}; it must be {bound}", name="url", value=url, bound=bound)
        found.append(str(parsed).rstrip("/"))
    return tuple(dict.fromkeys(found))


def authorization(token: str | None) -> dict[str, str]:
    """Return the header with `token`. Raises `Invalid`, which does not contain it, for an invalid token."""
    if not token:
        return {}
    if not token.isascii() or not token.isprintable() or " " in token:
        bound = "printable ASCII characters without spaces"
        raise Invalid(f"token has an invalid character; it must have {bound}", name="token", bound=bound)
    return {"authorization": f"Bearer {token}"}


def base_url(address: str) -> str:
    """Return the URL of `address` for httpx; for a unix socket, a name that identifies it in `mounts`."""
    if not address.startswith(_UNIX):
        return address
    return f"http://{hashlib.blake2b(address.encode(), digest_size=8).hexdigest()}.unix"


def unix_mounts(addresses: Iterable[str], transport: Callable[[str], TransportT]) -> dict[str, TransportT | None]:
    """Return `mounts` for `httpx.Client` with a transport for each unix socket; `transport` makes one from a path."""
    return {base_url(address): transport(socket_path(address)) for address in addresses if address.startswith(_UNIX)}


def socket_path(address: str) -> str:
    """Return the path of `unix:/PATH` or `unix:///PATH`; empty for another address."""
    path = address.removeprefix(_UNIX)
    return "" if path == address else "/" + path.lstrip("/") if path.startswith("/") else ""
