"""How durable an acknowledged write is: the requested policy, what a server offers, and the wait after each write.

A durable write survives kill -9 of the server. A server with WAITAOF confirms this after every write, whatever
`appendfsync` is, except `no`. Without WAITAOF, `appendfsync always` is trusted. Replicas count only if requested; where
Sentinel may promote a replica, a write is strict only with at least one.
`assess` is pure: settings of a server in, `Durability` out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

from replaybuf.errors import Invalid, NotDurable, counted

Level = Literal["strict", "relaxed"]

LONGEST_WAIT_S = 8.0
"""Upper bound of `timeout_s`: less than the timeout of a command."""


@dataclasses.dataclass(frozen=True, slots=True)
class WritePolicy:
    """What every acknowledged write must reach.

    `strict`: the server's disk. `replicas`: the memory of so many replicas as well. A write that is not confirmed
    within `timeout_s` seconds raises `NotDurable`.
    """

    level: Level = "strict"
    replicas: int = 0
    timeout_s: float = 2.0

    def __post_init__(self) -> None:
        if self.replicas < 0:
            message = f"wait_replicas is {self.replicas}; the minimum is 0"
            raise Invalid(message, name="wait_replicas", value=self.replicas, bound=0)
        if not 0 < self.timeout_s <= LONGEST_WAIT_S:
            message = f"wait_timeout_s is {self.timeout_s}; it must be above 0 and at most {LONGEST_WAIT_S}"
            raise Invalid(message, name="wait_timeout_s", value=self.timeout_s, bound=[0, LONGEST_WAIT_S])


STRICT = WritePolicy()


@dataclasses.dataclass(frozen=True)
class Barrier:
    """The wait after a write, on the write's connection: for the server's disk (`local`), for `replicas`, or both.

    `in_background`: the server syncs in a thread of its own, so it notices the end of a sync only when it is awake.
    WAITAOF and WAIT cover all writes of their connection, and everything the server wrote before. WAITAOF is not used
    for replicas: they report their disk once a second, so every write would take a second.
    """

    local: bool
    replicas: int
    timeout_s: float
    in_background: bool = False

    @functools.cached_property
    def commands(self) -> list[tuple[str | int, ...]]:
        """The commands that wait."""
        timeout_ms = max(1, int(self.timeout_s * 1000))
        waits: list[tuple[str | int, ...]] = [("WAITAOF", 1, 0, timeout_ms)] if self.local else []
        return [*waits, ("WAIT", self.replicas, timeout_ms)] if self.replicas else waits

    @property
    def text(self) -> str:
        """The commands as text, without timeout: `WAITAOF 1 0 and WAIT 1`."""
        return " and ".join(" ".join(map(str, command[:-1])) for command in self.commands)

    def check(self, replies: Sequence[Any]) -> int:
        """Return how many replicas confirmed. Raises `NotDurable` if too few did, or the server refused to wait."""
        for reply in replies:
            if isinstance(reply, Exception):
                message = f"the write is not confirmed: the server refused {self.text}: {reply}"
                raise NotDurable(message, name="durability", bound=self.text) from reply
        local = int(replies[0][0]) if self.local else 0
        replicas = int(replies[-1]) if self.replicas else 0
        if local < self.local or replicas < self.replicas:
            raise NotDurable(
                f"the write is not confirmed: within {self.timeout_s:g} s it reached {local} of {int(self.local)} own "
                f"disks and {replicas} of {counted(self.replicas, 'replica')} ({self.text}); send it again",
                name="durability",
                value={"local": local, "replicas": replicas},
                bound={"local": int(self.local), "replicas": self.replicas, "timeout_s": self.timeout_s},
            )
        return replicas


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server persists; None = unknown. `waitaof`: it has that command. `refusal`: why CONFIG GET failed.

    `fails_over`: a replica may take its place at any time.
    """

    appendonly: bool | None
    appendfsync: str | None
    no_fsync_on_rewrite: bool | None
    policy: str | None
    waitaof: bool
    replicas: int = 0
    is_replica: bool = False
    refusal: str | None = None
    fails_over: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Durability:
    """The level in force.

    - `met_by`: how it is met (`appendfsync always`, `WAITAOF 1 0`, ...)
    - `reasons`: why it is not strict, or what else is wrong
    - `barrier`: the wait after every acknowledged write
    - `reads_durable`: everything that can be read is durable
    """

    level: Level
    met_by: str
    reasons: tuple[str, ...]
    barrier: Barrier | None
    reads_durable: bool


def assess(server: ServerSettings, policy: WritePolicy) -> Durability:
    """Find the level in force on a server."""
    syncs_always = server.appendonly and server.appendfsync == "always" and not server.no_fsync_on_rewrite
    always = bool(syncs_always and not server.is_replica)
    # With appendfsync no, WAITAOF only times out. With always it costs nothing, and it proves what a setting only
    # promises: the setting was read earlier and may have changed.
    can_wait = server.waitaof and server.appendonly is True and server.appendfsync != "no"
    local = can_wait and policy.level == "strict"
    barrier = Barrier(local, policy.replicas, policy.timeout_s, in_background=local and not always)
    on_disk = always or barrier.local
    risks = [*([] if on_disk else _disk_risks(server)), *_other_risks(server)]
    if server.fails_over and not policy.replicas:
        risks.append(
            "wait_replicas is 0; Sentinel promotes a replica that may lack acknowledged writes: serve with "
            "--wait-replicas 1"
        )
    level: Level = "relaxed" if risks or not on_disk else "strict"
    if server.replicas < policy.replicas:
        risks.append(
            f"{counted(server.replicas, 'replica')} connected; wait_replicas is {policy.replicas}: until more are "
            "connected, every write is answered 503 not-durable"
        )
    waits = dataclasses.replace(barrier, local=barrier.local and not always).text
    met_by = " and ".join(part for part in ("appendfsync always" if always else "", waits) if part)
    return Durability(
        level,
        met_by or _name_setting(server),
        tuple(risks),
        barrier if barrier.commands else None,
        reads_durable=always and not policy.replicas,
    )


def _disk_risks(server: ServerSettings) -> list[str]:
    risks = []
    if server.refusal is not None:
        risks.append(f"CONFIG GET is refused ({server.refusal}); the durability of acknowledged writes is unknown")
    if server.appendonly is False:
        risks.append("appendonly is 'no'; a killed server loses everything: set appendonly yes")
    if server.appendfsync not in ("always", None):
        other = "serve with --durability strict" if server.waitaof else "use a server with WAITAOF (7.2 or newer)"
        risks.append(
            f"appendfsync is {server.appendfsync!r}; a killed server loses acknowledged writes: set appendfsync "
            f"always, or {other}"
        )
    if server.no_fsync_on_rewrite:
        risks.append(
            "no-appendfsync-on-rewrite is 'yes'; a server killed while it rewrites its append-only file loses "
            "acknowledged writes: set it to no"
        )
    return risks


def _other_risks(server: ServerSettings) -> list[str]:
    risks = []
    if server.policy != "noeviction":
        policy = "unknown" if server.policy is None else repr(server.policy)
        risks.append(f"maxmemory-policy is {policy}; a full server may drop data: set maxmemory-policy noeviction")
    if server.is_replica:
        risks.append("the server is a replica, which takes no writes: use the address of its primary")
    return risks


def _name_setting(server: ServerSettings) -> str:
    if server.appendonly is False:
        return "appendonly no"
    return f"appendfsync {server.appendfsync}" if server.appendfsync else "unknown"
