"""Facts about a Redis server: its version, how it persists, and the function library it needs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from replaybuf.errors import UnsupportedServer, counted
from replaybuf.store.redis.durability import Level, ServerSettings, WritePolicy

OLDEST_SERVER = (7, 0)
LIBRARY = "replaybuf1"
LIBRARY_CODE = files("replaybuf.store").joinpath("library.lua").read_text()
CONFIG_NAMES = ("appendonly", "appendfsync", "no-appendfsync-on-rewrite", "maxmemory-policy")
"""Settings that `read_settings` needs."""
LINK_DOWN_FACTOR = 11
"""Ten times, and a first time until the primary counts as down."""
_FOLLOWS = re.compile(r"^slave\d+:.*\bstate=online,offset=[1-9]", re.MULTILINE)
"""A replica that has loaded what it got: until then its offset is 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServerReport:
    """Version, durability and memory of a server.

    `version`: of Redis, for Valkey the one it is compatible with; `name`: program and own version. `durability` is the
    level in force, `met_by` how it is met, `reasons` what is weaker than strict or at risk. `replicas`
    are connected now.
    """

    version: str
    name: str
    durability: Level
    met_by: str
    reasons: tuple[str, ...]
    policy: WritePolicy
    replicas: int
    used_memory_bytes: int
    max_memory_bytes: int
    max_memory_policy: str

    @property
    def summary(self) -> str:
        """Level and how it is met: `strict (appendfsync always)`."""
        return f"{self.durability} ({self.met_by})"

    @property
    def meets_policy(self) -> bool:
        """True if durability and replicas are at least what was requested."""
        return self.durability in ("strict", self.policy.level) and self.replicas >= self.policy.replicas


def read_version(info: Mapping[str, Any]) -> str:
    """Return the version of Redis in a server's INFO; Valkey names the last one it is compatible with."""
    return str(info.get("redis_version") or info.get("valkey_version"))


def read_name(info: Mapping[str, Any]) -> str:
    """Return program and version: `valkey 9.1.2`, `redis 7.4.1`."""
    valkey = info.get("valkey_version")
    return f"valkey {valkey}" if valkey else f"redis {read_version(info)}"


def read_replicas(info: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return host and port of each replica that a primary names in its INFO."""
    return [(str(replica["ip"]), int(replica["port"])) for replica in _replicas(info)]


def _replicas(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [value for name, value in info.items() if name.startswith("slave") and isinstance(value, dict)]


def check_version(version: str, url: str) -> None:
    """Raise `UnsupportedServer` if the server is too old."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        message = f"Redis at {url} has version {version}; the minimum is {oldest}"
        raise UnsupportedServer(message, name="redis_version", value=version, bound=oldest)


def check_role(info: Mapping[str, Any], url: str) -> None:
    """Raise `UnsupportedServer`, with the right URL, for a sentinel, a node of a cluster and a replica.

    A node of a cluster takes only the runs of its own slots, and a replica nothing.
    """
    parts, mode = urlsplit(url), str(info.get("server_mode") or info.get("redis_mode"))
    scheme, hosts = ("rediss" if parts.scheme == "rediss" else "redis"), parts.netloc or "HOST:PORT"
    if mode == "sentinel":
        watched = [value for name, value in info.items() if name.startswith("master") and isinstance(value, dict)]
        urls = ", ".join(f"{scheme}+sentinel://{hosts}/{value.get('name')}" for value in watched)
        what, way_out = "a sentinel", f"give the name that it watches too: {urls or 'it watches none'}"
    elif mode == "cluster":
        what, way_out = "a node of a cluster", f"give the cluster: {scheme}+cluster://{hosts}[,HOST:PORT...]"
    elif info.get("role") == "slave":
        user = f"{hosts.rpartition('@')[0]}@" if "@" in hosts else ""
        database = parts.path if parts.scheme != "unix" else ""
        primary = f"{scheme}://{user}{info.get('master_host')}:{info.get('master_port')}{database}"
        what, way_out = "a replica", f"give its primary: {primary}"
    else:
        return
    detail = f"Redis at {url} is {what}; needed: one primary. {way_out}"
    raise UnsupportedServer(detail, name="redis_url", value=url, bound="one primary")


def check_cluster_mode(info: Mapping[str, Any], address: str) -> None:
    """Raise `UnsupportedServer` for a server that is not a node of a cluster."""
    mode = str(info.get("server_mode") or info.get("redis_mode"))
    if mode != "cluster":
        detail = f"Redis at {address} is not a node of a cluster; give redis://{address}/0, or a node"
        raise UnsupportedServer(detail, name="redis_url", value=address, bound="cluster-enabled yes")


def read_settings(
    info: Mapping[str, Any], config: Mapping[str, str], waitaof: bool, refusal: str | None, fails_over: bool
) -> ServerSettings:
    """Read from INFO and CONFIG GET how a server persists; `refusal`: why CONFIG GET failed."""
    appendonly = config["appendonly"] == "yes" if "appendonly" in config else None
    if appendonly is None and "aof_enabled" in info:
        appendonly = bool(int(info["aof_enabled"]))
    rewriting = config.get("no-appendfsync-on-rewrite")
    policy = config.get("maxmemory-policy") or info.get("maxmemory_policy")
    return ServerSettings(
        appendonly=appendonly,
        appendfsync=config.get("appendfsync"),
        no_fsync_on_rewrite=None if rewriting is None else rewriting == "yes",
        policy=None if policy is None else str(policy),
        waitaof=waitaof,
        replicas=sum(replica.get("state") == "online" for replica in _replicas(info)),
        is_replica=info.get("role") == "slave",
        refusal=refusal,
        fails_over=fails_over,
    )


def find_split(info: str, *, replicas: int, down_after_s: float) -> str | None:
    """Return why a primary must not be used yet, by its reply to INFO: it restarted without its replicas.

    A restart begins a history with new, low offsets. A replica that has not synchronized since then keeps the higher
    offset of the old history, so a failover promotes it before one that confirmed newer writes. Sentinel promotes no
    replica whose link was down for ten times `down_after_s`, a cluster none whose link was down for ten times its node
    timeout and 10 s. `replicas`: those that are seen alive.
    """
    facts = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    up_s, window_s = int(facts["uptime_in_seconds"]), LINK_DOWN_FACTOR * down_after_s
    promoted = bool(facts["master_replid2"].strip("0"))
    following = len(_FOLLOWS.findall(info))
    if facts["role"] != "master" or promoted or up_s > window_s or following >= replicas:
        return None
    return (
        f"restarted {up_s} s ago, and {following} of {counted(replicas, 'replica')} follow it since then; one "
        f"that does not may be promoted without newer writes, for {window_s:g} s"
    )


def text(value: Any) -> str:
    """Return a string reply as text; some commands reply with bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
