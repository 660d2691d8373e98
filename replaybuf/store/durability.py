"""What an acknowledged write is worth: the level that is wanted, what a server offers, and the wait that makes it so.

`judge` is pure: settings of a server in, `Verdict` out. A write counts as durable when it survives kill -9 of the
server: the server itself says so after every write where it has WAITAOF (whatever `appendfsync` is, but for `no`);
without WAITAOF, `appendfsync always` is taken at its word. Replicas count only where they are asked for.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from replaybuf.errors import Invalid, NotDurable

Level = Literal["strict", "relaxed"]

LONGEST_WAIT_S = 8.0
"""Upper bound of `timeout_s`: below the time after which a command counts as unanswered."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of every acknowledged write.

    `strict`: it is on the server's disk. `replicas`: so many replicas have it too (strict: on disk, where the server
    has WAITAOF). Not confirmed within `timeout_s` seconds: the write is answered `NotDurable`.
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


STRICT = Wanted()


@dataclasses.dataclass(frozen=True, slots=True)
class Barrier:
    """The wait behind a write, on the write's own connection: `local` = 1 for the server's disk, and `replicas`.

    WAITAOF and WAIT cover what their connection wrote, and with it everything the server wrote before that.
    """

    local: int
    replicas: int
    timeout_s: float
    waitaof: bool

    @property
    def command(self) -> tuple[str | int, ...]:
        """The command that waits."""
        timeout_ms = max(1, int(self.timeout_s * 1000))
        if self.waitaof:
            return ("WAITAOF", self.local, self.replicas, timeout_ms)
        return ("WAIT", self.replicas, timeout_ms)

    @property
    def text(self) -> str:
        """Name the wait as a person would: `WAITAOF 1 0`."""
        return " ".join(map(str, self.command[:-1]))

    def check(self, reply: Any) -> int:
        """Return how many replicas confirmed. Raises `NotDurable` where fewer did, or the server refused to wait."""
        if isinstance(reply, Exception):
            raise NotDurable(
                f"the write is not confirmed: the server refused {self.text}: {reply}",
                name="durability",
                bound=self.text,
            ) from reply
        local, replicas = (int(reply[0]), int(reply[1])) if self.waitaof else (0, int(reply))
        if local < self.local or replicas < self.replicas:
            raise NotDurable(
                f"the write is not confirmed: within {self.timeout_s:g} s it reached {local} of {self.local} own disks "
                f"and {replicas} of {self.replicas} replicas ({self.text}); it may still become durable, send it again",
                name="durability",
                value={"local": local, "replicas": replicas},
                bound={"local": self.local, "replicas": self.replicas, "timeout_s": self.timeout_s},
            )
        return replicas


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
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
class Verdict:
    """The level in force, how it is met (`appendfsync always`, `WAITAOF 1 0`, ...), why it is not strict or what else
    is wrong, and the wait that every acknowledged write gets. `sees_durable`: what a client reads is on disk already,
    because the server answers nobody before it has synced.
    """

    level: Level
    met_by: str
    reasons: tuple[str, ...]
    barrier: Barrier | None
    sees_durable: bool


def judge(server: Settings, wanted: Wanted) -> Verdict:
    """Find the level in force on a server."""
    always = bool(
        server.appendonly
        and server.appendfsync == "always"
        and not server.no_fsync_on_rewrite
        and not server.is_replica
    )
    # With appendfsync no the server never tells when its disk has a write: WAITAOF would only time out.
    can_wait = server.waitaof and server.appendonly is True and server.appendfsync != "no"
    barrier = _barrier(wanted, can_wait, server.waitaof)
    on_disk = always or (barrier is not None and barrier.local == 1)
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
    if server.replicas < wanted.replicas:
        reasons.append(
            f"{server.replicas} replicas are connected; wait_replicas is {wanted.replicas}: until more are, every "
            "write is answered 503 not-durable"
        )
    means = ["appendfsync always"] if always else []
    if barrier and (not always or wanted.replicas):
        means.append(barrier.text)
    return Verdict(
        level, " and ".join(means) or _plainly(server), tuple(reasons), barrier, always and not wanted.replicas
    )


def _barrier(wanted: Wanted, can_wait: bool, waitaof: bool) -> Barrier | None:
    if wanted.level == "strict" and waitaof:
        # Also with appendfsync always, where it costs nothing: the answer proves what a setting, read a while ago and
        # changed since, only promises.
        local = int(can_wait)
        if local or wanted.replicas:
            return Barrier(local, wanted.replicas, wanted.timeout_s, waitaof=True)
        return None
    if wanted.replicas:
        return Barrier(0, wanted.replicas, wanted.timeout_s, waitaof=False)
    return None


def _weaknesses(server: Settings) -> list[str]:
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


def _plainly(server: Settings) -> str:
    if server.appendonly is False:
        return "appendonly no"
    return f"appendfsync {server.appendfsync}" if server.appendfsync else "unknown"
