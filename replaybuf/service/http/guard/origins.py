"""Check that no web page of another site makes a browser call the service.

A browser can reach loopback addresses for every page that it shows. It marks such requests with `Origin` and
`Sec-Fetch-Site`. With DNS rebinding, a page reaches the service under the name of its own site, which is in `Host`.
Other clients send the name that they connect to, and no marks.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from replaybuf.client.addresses import addresses_of
from replaybuf.errors import Forbidden, Invalid, Malformed, ReplaybufError
from replaybuf.service.http.reply.json_pieces import error_response
from replaybuf.service.options import ServeOptions
from replaybuf.service.traffic import Traffic

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]+)?", re.IGNORECASE)
_MARKS = frozenset({b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"})
_OWN_SITES = ("same-origin", "none")
_CONSOLE = "/"


class HostNames:
    """Names of this service: the address it listens on, its advertised URL, the allowed hosts of the options.

    Ports are not compared, except with an allowed host that has one: tunnels and published ports change them. A server
    that listens on all addresses has every IP address as a name: no page can be rebound to an address.
    """

    def __init__(self, options: ServeOptions) -> None:
        """Raise `Invalid` for an allowed host that is not HOST or HOST:PORT."""
        for name in options.allowed_hosts:
            if not _HOST.fullmatch(name):
                bound = "HOST or HOST:PORT"
                detail = f"allowed_host is {name!r}; it must be {bound}"
                raise Invalid(detail, name="allowed_host", value=name, bound=bound)
        advertised = addresses_of(options.advertise_url) if options.advertise_url else ()
        named = [url.partition("://")[2] for url in advertised if "://" in url]
        self.named = frozenset(name.lower() for name in [*named, *options.allowed_hosts])
        self._bound = _address(options.host)
        self._everywhere = self._bound is not None and self._bound.is_unspecified
        self._loopback = options.host == "localhost" or (self._bound is not None and self._bound.is_loopback)
        own = {"localhost"} if self._everywhere or self._loopback else set()
        if not self._loopback:
            own.add(socket.gethostname().lower())
        self.names = self.named | own | {options.host.lower()}

    def accept(self, host: str) -> bool:
        """Return whether this is a name of the service; `host` is the value of a `Host` header."""
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].strip("[]").rstrip(".").lower()
        if name in self.names or host.lower() in self.names:
            return True
        address = _address(name)
        if address is None:
            return False
        return self._everywhere or address == self._bound or (self._loopback and address.is_loopback)

    def accept_origin(self, origin: str, host: str) -> bool:
        """Return whether a page of `origin` is a page of this service, which the browser called as `host`."""
        scheme, _, site = origin.lower().partition("://")
        return scheme in ("http", "https") and (site == host.lower() or site in self.named)


class OwnPagesOnly:
    """An ASGI application that answers 403 to requests of foreign pages and for foreign names."""

    def __init__(self, app: ASGIApp, hosts: HostNames, traffic: Traffic) -> None:
        self._app = app
        self._hosts = hosts
        self._traffic = traffic
        self._last_host = ""
        """The name that was accepted last: one client, or one proxy, always sends the same."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            self._check(scope)
        except ReplaybufError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        hosts, marks = [], {}
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value.decode("latin-1"))
            elif name in _MARKS:
                marks[name] = value.decode("latin-1")
        host = self._check_host(hosts, scope)
        if marks:
            self._check_page(marks, host, scope)

    def _check_host(self, hosts: list[str], scope: Scope) -> str:
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
            detail = f"the request has {len(hosts)} Host headers; it must have one"
            raise Malformed(detail, name="host", value=hosts, bound=1)
        host = hosts[0] if hosts else ""
        if host and host == self._last_host:
            return host
        # No browser connects to a unix socket, and none sends a request without the name.
        if not hosts or scope["server"] is None or scope["server"][1] is None:
            return host
        if self._hosts.accept(host):
            self._last_host = host
            return host
        self._traffic.refused["foreign_host"] += 1
        detail = (
            f"host is {host!r}; this server has the names {', '.join(sorted(self._hosts.names))}. To add a name: "
            "serve --allowed-host NAME"
        )
        raise Forbidden(detail, name="host", value=host, bound=sorted(self._hosts.names))

    def _check_page(self, marks: dict[bytes, str], host: str, scope: Scope) -> None:
        origin, site = marks.get(b"origin"), marks.get(b"sec-fetch-site", "none").lower()
        if origin is not None and self._hosts.accept_origin(origin, host):
            return
        if origin is None and (site in _OWN_SITES or _opens_console(marks, scope)):
            return
        self._traffic.refused["foreign_page"] += 1
        name, value = ("origin", origin) if origin is not None else ("sec-fetch-site", site)
        detail = (
            f"{name} is {value!r}; only pages of this server may call it from a browser. To allow the pages of a "
            "proxy in front of it: serve --allowed-host HOST[:PORT]"
        )
        raise Forbidden(detail, name=name, value=value, bound=f"http://{host}")


def _opens_console(marks: dict[bytes, str], scope: Scope) -> bool:
    """Return whether the browser follows a link to the console: that shows a page, but gives nothing to the site."""
    return (
        (scope["method"], scope["path"]) == ("GET", _CONSOLE)
        and marks.get(b"sec-fetch-mode") == "navigate"
        and marks.get(b"sec-fetch-dest") == "document"
    )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
