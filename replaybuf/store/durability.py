"""What an acknowledged write is worth: the level that is wanted, what a server offers, and the wait that makes it so.

`assess` is pure: settings of a server in, `Durability` out. A write counts as durable when it survives kill -9 of the
server: the server itself says so after every write where it has WAITAOF (whatever `appendfsync` is, but for `no`);
without WAITAOF, `appendfsync always` is taken at its word. Replicas count only where they are asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from replaybuf.errors import Invalid, NotDurable

Level = Literal["strict", "relaxed"]

LONGEST_WAIT_S = 8.0
"""Upper bound of `timeout_s`: below the time after which a command counts as unanswered."""


@dataclasses.dataclass(frozen=True, slots=True)
class WritePolicy:
    """What is asked of every acknowledged write.

    `strict`: it is on the server's disk. `replicas`: so many replicas have it, too, in memory. Not confirmed within
    `timeout_s` seconds: the write is answered `NotDurable`.
    """

    level: Level = "strict"
    replicas: int = 0
    timeout_s: float = 2.0

    def __post_init__(self) -> None:
        if self.replicas < 0:
            raise Invalid(
                f"wait_replicas is {self.replicas}; at least 0 is needed",
                name="wait_replicas",
                value=self.replicas,
                bound=0,
            )
        if not 0 < self.timeout_s <= LONGEST_WAIT_S:
            raise Invalid(
                f"wait_timeout_s is {self.timeout_s}; it must be above 0 and at most {LONGEST_WAIT_S}",
                name="wait_timeout_s",
                value=self.timeout_s,
                bound=[0, LONGEST_WAIT_S],
            )


STRICT = WritePolicy()


@dataclasses.dataclass(frozen=True, slots=True)
class Barrier:
    """The wait behind a write, on the write's own connection: for the server's disk, for so many `replicas`, or both.

    WAITAOF and WAIT cover what their connection wrote, and with it everything the server wrote before that. WAITAOF for
    replicas is not used: they tell once a second what they synced, so that every write would take a second.
    """

    local: bool
    replicas: int
    timeout_s: float

    @property
    def commands(self) -> list[tuple[str | int, ...]]:
        """The commands that wait."""
        timeout_ms = max(1, int(self.timeout_s * 1000))
        waits: list[tuple[str | int, ...]] = [("WAITAOF", 1, 0, timeout_ms)] if self.local else []
        return [*waits, ("WAIT", self.replicas, timeout_ms)] if self.replicas else waits

    @property
    def text(self) -> str:
        """Name the waits as a person would: `WAITAOF 1 0 and WAIT 1`."""
        return " and ".join(" ".join(map(str, command[:-1])) for command in self.commands)

    def check(self, replies: Sequence[Any]) -> int:
        """Return how many replicas confirmed. Raises `NotDurable` where fewer did, or the server refused to wait."""
        for reply in replies:
            if isinstance(reply, Exception):
                raise NotDurable(
                    f"the write is not confirmed: the server refused {self.text}: {reply}",
                    name="durability",
                    bound=self.text,
                ) from reply
        local = int(replies[0][0]) if self.local else 0
        replicas = int(replies[-1]) if self.replicas else 0
        if local < self.local or replicas < self.replicas:
            raise NotDurable(
                f"the write is not confirmed: within {self.timeout_s:g} s it reached {local} of {int(self.local)} own "
                f"disks and {replicas} of {self.replicas} replicas ({self.text}); send it again",
                name="durability",
                value={"local": local, "replicas": replicas},
                bound={"local": int(self.local), "replicas": self.replicas, "timeout_s": self.timeout_s},
            )
        return replicas


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server says of itself; None = it does not tell. `waitaof`: it takes that command."""

    appendonly: bool | None
    appendfsync: str | None
    no_fsync_on_rewrite: bool | None
    policy: str | None
    waitaof: bool
    replicas: int = 0
    is_replica: bool = False
    refused: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Durability:
    """The level in force, how it is met (`appendfsync always`, `WAITAOF 1 0`, ...), why it is not strict or what else
    is wrong, and the wait that every acknowledged write gets. `reads_durable`: what can be read is durable already.
    """

    level: Level
    met_by: str
    reasons: tuple[str, ...]
    barrier: Barrier | None
    reads_durable: bool


def assess(server: ServerSettings, policy: WritePolicy) -> Durability:
    """Find the level in force on a server."""
    always = bool(
        server.appendonly
        and server.appendfsync == "always"
        and not server.no_fsync_on_rewrite
        and not server.is_replica
    )
    # With appendfsync no the server never tells when its disk has a write: WAITAOF would only time out. With always it
    # costs nothing, and the answer proves what a setting, read a while ago and changed since, only promises.
    can_wait = server.waitaof and server.appendonly is True and server.appendfsync != "no"
    barrier = Barrier(can_wait and policy.level == "strict", policy.replicas, policy.timeout_s)
    on_disk = always or barrier.local
    reasons = [] if on_disk else _weaknesses(server)
    if server.policy is None:
        reasons.append("maxmemory-policy is not told; a full server may drop data: set maxmemory-policy noeviction")
    elif server.policy != "noeviction":
        reasons.append(
            f"maxmemory-policy is {server.policy!r}; a full server drops data: set maxmemory-policy noeviction"
        )
    if server.is_replica:
        reasons.append("the server is a replica, which takes no writes: give the address of its primary")
    level: Level = "relaxed" if reasons or not on_disk else "strict"
    if server.replicas < policy.replicas:
        reasons.append(
            f"{server.replicas} replicas are connected; wait_replicas is {policy.replicas}: until more are, every "
            "write is answered 503 not-durable"
        )
    means = ["appendfsync always"] if always else []
    shown = dataclasses.replace(barrier, local=barrier.local and not always)
    met_by = " and ".join([*means, *([shown.text] if shown.commands else [])]) or _plainly(server)
    return Durability(
        level,
        met_by,
        tuple(reasons),
        barrier if barrier.commands else None,
        reads_durable=always and not policy.replicas,
    )


def _weaknesses(server: ServerSettings) -> list[str]:
    reasons = []
    if server.refused is not None:
        reasons.append(f"CONFIG GET is refused ({server.refused}); what an acknowledged write is worth is unknown")
    if server.appendonly is False:
        reasons.append("appendonly is 'no'; a killed server loses everything: set appendonly yes")
    if server.appendfsync not in ("always", None):
        other = "serve with --durability strict" if server.waitaof else "use a server with WAITAOF (7.2 or newer)"
        reasons.append(
            f"appendfsync is {server.appendfsync!r}; a killed server loses acknowledged writes: set appendfsync "
            f"always, or {other}"
        )
    if server.no_fsync_on_rewrite:
        reasons.append(
            "no-appendfsync-on-rewrite is 'yes'; while the append-only file is rewritten nothing is safe: set it to no"
        )
    return reasons


def _plainly(server: ServerSettings) -> str:
    if server.appendonly is False:
        return "appendonly no"
    return f"appendfsync {server.appendfsync}" if server.appendfsync else "unknown"
