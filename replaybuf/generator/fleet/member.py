"""One server of a fleet: what it carries, how it failed, and when it is looked at again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Literal

import msgspec

from replaybuf.errors import EngineFault
from replaybuf.generator.engines import Load, Server

PROBE_FIRST_S = 0.5
PROBE_CEILING_S = 10.0

State = Literal["starting", "up", "aside", "trial"]


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one moment: requests in flight and tokens they may still come to, failures since its last answer.

    `outcomes`: requests ended so far, `ok` or the reason of their fault; `fault`: why it gets no request, None where it
    does; `running`, `waiting`: rollouts there by its own gauges, of every client, None where it does not tell.
    """

    url: str
    state: State
    requests: int
    tokens: int
    failures: int
    outcomes: dict[str, int] = {}
    fault: str | None
    running: int | None = None
    waiting: int | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Member:
    """A server and what the fleet remembers of it."""

    server: Server
    requests: int = 0
    tokens: int = 0
    failures: int = 0
    """Since the last answer."""
    doubts: int = 0
    """Requests since the last answer that it refused or answered badly."""
    setbacks: int = 0
    """Times put aside and probes failed since the last answer; the pause before a probe doubles with each."""
    fault: EngineFault | None = None
    """Why it is not used now; None = it is."""
    known: bool = False
    """Has been up."""
    watch: asyncio.Task[None] | None = None
    """Probes it while it is aside."""
    check: asyncio.Task[None] | None = None
    """Asks for its version after a publication."""
    newest: int = 0
    """Version that it had last, as far as is known."""
    rewound: bool = False
    """May still have weights that a rewind took back."""
    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    load: Load | None = None
    """As its gauges said last."""

    def status(self) -> ServerStatus:
        """Return how the server is doing."""
        return ServerStatus(
            url=self.server.url,
            state=self.state,
            requests=self.requests,
            tokens=self.tokens,
            failures=self.failures,
            outcomes=dict(self.outcomes),
            fault=None if self.fault is None else self.fault.detail,
            running=None if self.load is None else self.load.running,
            waiting=None if self.load is None else self.load.waiting,
        )

    @property
    def state(self) -> State:
        """Where it stands in its life."""
        if self.fault is not None:
            return "aside" if self.known else "starting"
        return "trial" if self.setbacks else "up"

    @property
    def pause_s(self) -> float:
        """How long to wait before the next probe; a server that starts is looked for steadily."""
        return min(PROBE_FIRST_S * 2 ** (self.setbacks - 1), PROBE_CEILING_S) if self.known else PROBE_FIRST_S

    @contextlib.contextmanager
    def carrying(self, tokens: int) -> Iterator[None]:
        """Count a request in flight, the tokens it may come to, and how it ends; a cancelled one has no outcome."""
        self.requests += 1
        self.tokens += tokens
        try:
            yield
            self.outcomes["ok"] += 1
        except EngineFault as fault:
            self.outcomes[fault.reason] += 1
            raise
        finally:
            self.requests -= 1
            self.tokens -= tokens
