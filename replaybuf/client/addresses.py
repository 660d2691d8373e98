"""Addresses and tokens of services.

An address is `http://HOST:PORT`, or `unix:/PATH` for a socket on this machine; several have commas between.
"""

from __future__ import annotations

import hashlib
from urllib.parse import urlsplit

from replaybuf.errors import Invalid

_UNIX = "unix:"
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def addresses_of(url: str) -> tuple[str, ...]:
    """Split `url` into addresses, without trailing slashes. Raises `Invalid` for an invalid address."""
    addresses = []
    for part in url.split(","):
        path = socket_path(part.strip())
        if path.startswith("/"):
            addresses.append(_UNIX + path)
            continue
        address = _http_address(part.strip())
        if not address:
            bound = "http://HOST:PORT or unix:/PATH, or several with commas between"
            raise Invalid(f"url is {url!r}; it must be {bound}", name="url", value=url, bound=bound)
        addresses.append(address)
    return tuple(dict.fromkeys(addresses))


def _http_address(text: str) -> str:
    """Return an HTTP address as browsers write it, in lower case without a default port; empty for another text.

    Not by httpx: importing it takes a tenth of the start of the service, which needs nothing else of it.
    """
    if not text.isprintable() or " " in text:
        return ""
    try:
        parts = urlsplit(text)
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.port == 0:
            return ""
    except ValueError:  # brackets without an IPv6 address, or an invalid port
        return ""
    user, at, place = parts.netloc.rpartition("@")
    place = place.lower().removesuffix(_DEFAULT_PORTS[parts.scheme])
    return parts._replace(netloc=user + at + place).geturl().rstrip("/")


def authorization(token: str | None) -> dict[str, str]:
    """Return the header with `token`. Raises `Invalid`, which does not contain it, for an invalid token."""
    if not token:
        return {}
    if not token.isascii() or not token.isprintable() or " " in token:
        bound = "printable ASCII characters without spaces"
        raise Invalid(f"token has an invalid character; it must have {bound}", name="token", bound=bound)
    return {"authorization": f"Bearer {token}"}


def base_url(address: str) -> str:
    """Return the URL of `address`; for a unix socket, one with a name that identifies it."""
    if not address.startswith(_UNIX):
        return address
    return f"http://{hashlib.blake2b(address.encode(), digest_size=8).hexdigest()}.unix"


def socket_path(address: str) -> str:
    """Return the path of `unix:/PATH` or `unix:///PATH`; empty for another address."""
    path = address.removeprefix(_UNIX)
    return "" if path == address else "/" + path.lstrip("/") if path.startswith("/") else ""
