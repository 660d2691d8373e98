"""Redis URLs, and where the primary of each is: at a fixed address, or where Sentinel says.

    redis://HOST:PORT/DB, rediss://HOST:PORT/DB, unix:///PATH    one server
    redis+sentinel://HOST:PORT[,HOST:PORT...]/NAME[/DB]          the primary that these sentinels call NAME
    redis+cluster://HOST:PORT[,HOST:PORT...]                     the Redis Cluster that these nodes belong to
    rediss+sentinel://..., rediss+cluster://...                  the same, with TLS to sentinels and servers

A topology opens clients, whose new connections lead to the primary. User, password and options of a URL are those of
its servers; `sentinel_username` and `sentinel_password` are options for the sentinels.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
import redis.asyncio as aioredis
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.sentinel import Sentinel

from replaybuf.errors import Invalid
from replaybuf.store.redis.cluster import Cluster
from replaybuf.store.redis.faults import without_password
from replaybuf.store.redis.sentinel import SentinelPrimary
from replaybuf.store.redis.sentinel_answers import Address

_SENTINEL_FORM = "redis+sentinel://HOST:PORT[,HOST:PORT...]/NAME[/DB]"
_CLUSTER_FORM = "redis+cluster://HOST:PORT[,HOST:PORT...]"
URL_FORMS = f"redis://HOST:PORT/DB, rediss://HOST:PORT/DB, unix:///PATH, {_SENTINEL_FORM} or {_CLUSTER_FORM}"
_SCHEME = re.compile(r"(?:rediss?|rediss?\+sentinel|rediss?\+cluster|unix)://")
_PORT, _SENTINEL_PORT = 6379, 26379
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")


def is_redis_url(text: str) -> bool:
    """Check whether a text is meant as the URL of a Redis, and not as the path of a file."""
    return _SCHEME.match(text) is not None


class Topology(Protocol):
    """Where a Redis is.

    - `fails_over`: a replica may become the primary, so a write on one disk alone may be lost
    - `switches`: how often connections were cut because the primary is down or another one
    """

    fails_over: bool
    switches: int

    def open_client(self, **options: Any) -> aioredis.Redis:
        """Open a client whose connections lead to the primary; `options` are those of redis-py."""

    def open_blocking_client(self, **options: Any) -> redis.Redis:
        """Open such a client for threads."""

    async def check(self) -> None:
        """Raise `Invalid` for sentinels that are none, or that do not know the name."""

    def explain(self) -> str | None:
        """Return why the primary is down, if known."""

    async def close(self) -> None:
        """End the background work; the clients are closed by their owner."""


class SingleServer:
    """One server at a fixed address."""

    fails_over = False
    switches = 0

    def __init__(self, url: str) -> None:
        self._url = url

    def open_client(self, **options: Any) -> aioredis.Redis:
        """Open a client of the server."""
        return aioredis.Redis.from_url(self._url, **options)

    def open_blocking_client(self, **options: Any) -> redis.Redis:
        """Open a client for threads."""
        return redis.Redis.from_url(self._url, **options)

    async def check(self) -> None:
        """Nothing to check: the role of the server is checked by its answer."""

    def explain(self) -> str | None:
        """Nobody watches this server."""
        return None

    async def close(self) -> None:
        """Nothing runs in the background."""


def parse_topology(url: str, on_switch: Callable[[], None] = lambda: None) -> Topology:
    """Parse a Redis URL; `on_switch` is called when another server has become the primary, or it is down.

    Raises `Invalid`, without the password of the URL.
    """
    scheme = url.partition("://")[0]
    if scheme.endswith("+cluster"):
        return Cluster(*_parse_cluster(url), on_switch)
    if not scheme.endswith("+sentinel"):
        return SingleServer(url)
    sentinels = SentinelUrl.parse(url)
    return SentinelPrimary(
        sentinels.name, sentinels.hosts, sentinels.server_options, sentinels.sentinel_options, on_switch
    )


def _parse_cluster(url: str) -> tuple[tuple[Address, ...], dict[str, Any]]:
    """Return the hosts of a `redis+cluster://` URL, and the options of all nodes. Raises `Invalid`."""
    try:
        parts = urlsplit(url)
        user, _, hosts = parts.netloc.rpartition("@")
        if parts.path.strip("/") not in ("", "0"):
            raise ValueError("a cluster has no databases")
        scheme = parts.scheme.removesuffix("+cluster")
        plain = f"{scheme}://{user}@/0?{parts.query}"
        options = parse_url(plain)  # type: ignore[no-untyped-call]
        options.pop("connection_class", None)
        options.pop("db", None)
        return tuple(_parse_host(host, _PORT) for host in hosts.split(",")), {**options, "ssl": scheme == "rediss"}
    except ValueError:  # its message may hold a part of the password
        shown = without_password(url)
        detail = f"redis_url is {shown!r}; use {_CLUSTER_FORM}"
        raise Invalid(detail, name="redis_url", value=shown, bound=_CLUSTER_FORM) from None


def open_reader(url: str, **options: Any) -> redis.Redis | RedisCluster:
    """Open a client for one thread that asks for the primary at each new connection. Raises `Invalid`."""
    if url.partition("://")[0].endswith("+cluster"):
        hosts, own = _parse_cluster(url)
        nodes = [ClusterNode(host, port) for host, port in hosts]  # type: ignore[no-untyped-call]
        return RedisCluster(startup_nodes=nodes, **own, **options)  # type: ignore[no-untyped-call,unused-ignore]
    if not url.partition("://")[0].endswith("+sentinel"):
        return parse_topology(url).open_blocking_client(**options)
    sentinels = SentinelUrl.parse(url)
    timeouts = {name: options[name] for name in ("socket_connect_timeout", "retry") if name in options}
    asking = Sentinel(  # type: ignore[no-untyped-call]
        sentinels.hosts,
        sentinel_kwargs={**sentinels.sentinel_options, **timeouts, "socket_timeout": options.get("socket_timeout")},
    )
    reader: redis.Redis = asking.master_for(sentinels.name, **sentinels.server_options, **options)  # type: ignore[no-untyped-call]
    return reader


@dataclasses.dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The parts of a `redis+sentinel://` URL; the options are those of redis-py."""

    hosts: tuple[Address, ...]
    name: str
    server_options: dict[str, Any] = dataclasses.field(repr=False)
    sentinel_options: dict[str, Any] = dataclasses.field(repr=False)

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Parse a URL. Raises `Invalid` without its password."""
        try:
            return cls._parse(url)
        except ValueError:  # its message may hold a part of the password
            shown = without_password(url)
            detail = f"redis_url is {shown!r}; use {_SENTINEL_FORM}"
            raise Invalid(detail, name="redis_url", value=shown, bound=_SENTINEL_FORM) from None

    @classmethod
    def _parse(cls, url: str) -> SentinelUrl:
        parts = urlsplit(url)
        user, _, hosts = parts.netloc.rpartition("@")
        name, _, database = unquote(parts.path.strip("/")).partition("/")
        if not name:
            raise ValueError("no name of a primary")
        query = dict(parse_qsl(parts.query))
        own = {option.removeprefix("sentinel_"): query.pop(option) for option in _SENTINEL_OPTIONS if option in query}
        scheme = parts.scheme.removesuffix("+sentinel")
        plain = f"{scheme}://{user}@/{int(database or 0)}?{urlencode(query)}"
        servers = parse_url(plain)  # type: ignore[no-untyped-call]
        shared = {option: value for option, value in servers.items() if option.startswith("ssl_")}
        tls = scheme == "rediss"
        servers.pop("connection_class", None)
        return cls(
            hosts=tuple(_parse_host(host, _SENTINEL_PORT) for host in hosts.split(",")),
            name=name,
            server_options={**servers, "ssl": tls},
            sentinel_options={**own, **shared, "ssl": tls},
        )


def _parse_host(text: str, port: int) -> Address:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("no host")
    return parts.hostname, parts.port or port
