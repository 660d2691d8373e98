"""What a Redis server is: its version, how it persists, and the function library it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from replaybuf.errors import UnsupportedServer
from replaybuf.store.durability import Level, ServerSettings, WritePolicy

OLDEST_SERVER = (7, 0)
LIBRARY = "replaybuf1"
LIBRARY_CODE = files("replaybuf.store").joinpath("library.lua").read_text()
CONFIG_NAMES = ("appendonly", "appendfsync", "no-appendfsync-on-rewrite", "maxmemory-policy")
"""What `read_settings` reads of a server's configuration."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServerReport:
    """What the server is and how durable an acknowledged write is on it.

    `durability` is the level in force, `met_by` what it rests on, `reasons` say what is weaker than strict or at risk.
    `replicas` are connected now.
    """

    version: str
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
        """Level and what it rests on: `strict (appendfsync always)`."""
        return f"{self.durability} ({self.met_by})"


def read_version(info: Mapping[str, Any]) -> str:
    """Return the version that a server's INFO tells."""
    return str(info.get("redis_version") or info.get("valkey_version"))


def check_version(version: str, url: str) -> None:
    """Raise `UnsupportedServer` for a server that is too old."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        raise UnsupportedServer(
            f"Redis at {url} has version {version}; at least {oldest} is needed",
            name="redis_version",
            value=version,
            bound=oldest,
        )


def read_settings(
    info: Mapping[str, Any], config: Mapping[str, str], waitaof: bool, refused: str | None
) -> ServerSettings:
    """Read from INFO and CONFIG GET how a server persists; `refused`: why it does not tell its configuration."""
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
        replicas=sum(
            isinstance(value, dict) and value.get("state") == "online"
            for name, value in info.items()
            if name.startswith("slave")
        ),
        is_replica=info.get("role") == "slave",
        refused=refused,
    )
