"""One server of a fleet: its load, a circuit breaker with probes, and a check of its weight version.

States::

    starting ──► up ──► suspended ──► trial ──► up
                            ▲           │
                            └───────────┘

`FAILURES_IN_A_ROW` failures without an answer between them suspend a server; a failed connection or a wrong version
does so at once. A suspended server gets no request. It is probed (`healthy`, then `prepare`, because it may have
restarted) after pauses that double. A server in trial gets one request at a time while others are up. One answer makes
it up; its next failure suspends it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from replaybuf.errors import EngineAway, EngineFault, counted
from replaybuf.generator.engines import Load, Server
from replaybuf.generator.fleet.publication import ahead, stale

logger = logging.getLogger(__name__)

PROBE_FIRST_S = 0.5
PROBE_CEILING_S = 10.0
FAILURES_IN_A_ROW = 3
BEHIND = "engine_behind"
"""The server has the published version, but not yet the newer one that sampled elsewhere: a publication goes on."""
STALE = "engine_stale"
_HARMLESS = ("engine_aborted", "engine_restarted", "engine_version_changed", BEHIND)
"""Reasons for another try that are not the server's failure."""
_SUSPEND_AT_ONCE = ("engine_away", STALE)

State = Literal["starting", "up", "suspended", "trial"]


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one moment.

    `requests` in flight and `tokens` they may still produce; `failures` since its last answer; `outcomes`: number of
    ended requests by `ok` or fault reason; `fault`: why it gets no request, None where it does; `running`, `waiting`:
    rollouts there by its own gauges, of every client, None where it has no gauges.
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
class Shared:
    """State that all members of a fleet share; `changed` is notified when a server comes up or reports a new fault.

    `on_lost` is called with the published version when a server lost a later version, which nobody will publish.
    """

    published: int | None = None
    on_lost: Callable[[int], None] = lambda published: None
    changed: asyncio.Condition = dataclasses.field(default_factory=asyncio.Condition)


@dataclasses.dataclass(slots=True, eq=False)
class Member:
    """A server and what the fleet knows about it."""

    server: Server
    shared: Shared
    requests: int = 0
    tokens: int = 0
    failures: int = 0
    """Failures since the last answer."""
    refusals: int = 0
    """Requests since the last answer that it refused or answered badly."""
    retries: int = 0
    """Suspensions and failed probes since the last answer; the pause before a probe doubles with each."""
    fault: EngineFault | None = None
    """Why it gets no request; None while it does."""
    was_up: bool = False
    newest: int = 0
    """Newest version that it reported."""
    rewound: bool = False
    """Whether it may still have weights that a rewind took back."""
    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    load: Load | None = None
    """Its last gauges."""
    watch: asyncio.Task[None] | None = None
    """Probes it while it is suspended."""
    check: asyncio.Task[None] | None = None
    """Reads its version after a publication."""

    def status(self) -> ServerStatus:
        """Return the server's status."""
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
        """Current state; see the module's diagram."""
        if self.fault is not None:
            return "suspended" if self.was_up else "starting"
        return "trial" if self.retries else "up"

    @property
    def pause_s(self) -> float:
        """Pause before the next probe; a starting server is probed at a steady rate."""
        return min(PROBE_FIRST_S * 2 ** (self.retries - 1), PROBE_CEILING_S) if self.was_up else PROBE_FIRST_S

    @contextlib.contextmanager
    def carrying(self, tokens: int) -> Iterator[None]:
        """Count a request in flight, its tokens and its outcome; a cancelled request has no outcome."""
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

    async def read_load(self) -> bool:
        """Read the server's gauges; return False where it gave no usable answer, which is not a failure."""
        try:
            self.load = await self.server.load()
        except EngineFault as fault:
            self.load = None
            logger.debug("no gauges: %s", fault)
            return False
        return True

    async def aclose(self) -> None:
        """Stop probing and close the connections."""
        tasks = [task for task in (self.watch, self.check) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.server.aclose()

    # ------------------------------------------------------------------ circuit breaker

    def start(self) -> None:
        """Probe a server that has not been up yet, at once."""
        self.fault = EngineAway("engine_away", f"engine {self.server.url} is not up yet")
        self.watch = asyncio.create_task(self._probe_until_up(0.0))

    def record_answer(self) -> None:
        """Record a usable answer."""
        self.failures = self.retries = self.refusals = 0

    def record_failure(self, error: EngineFault) -> None:
        """Record a failure of the server, and suspend it where that was one too many."""
        if error.reason in _HARMLESS:
            return
        self.failures += 1
        if error.reason in _SUSPEND_AT_ONCE or self.failures >= FAILURES_IN_A_ROW:
            self.suspend(error)

    def suspend(self, error: EngineFault) -> None:
        """Send no more requests until a probe succeeds."""
        if self.fault is not None:  # another request in flight there has failed before
            return
        self.fault, self.was_up = error, True
        self.retries += 1
        logger.warning(
            "engine %s is suspended after %s in a row, next probe in %g s: %s",
            self.server.url,
            counted(self.failures, "failure"),
            self.pause_s,
            error,
        )
        self.watch = asyncio.create_task(self._probe_until_up(self.pause_s))

    async def check_idle(self, within_s: float) -> None:
        """Suspend a server without requests that refuses `healthy`: no request would show that it is away.

        One that does not answer in time is left alone: it may be busy with the requests of others. So is one whose
        last request failed: a retry is on its way.
        """
        if self.fault is not None or self.requests or self.failures:
            return
        try:
            async with asyncio.timeout(within_s):
                healthy = await self.server.healthy()
        except TimeoutError:
            return
        if not healthy and not self.requests:
            url = self.server.url
            self.suspend(EngineAway("engine_away", f"engine {url} is not healthy while idle", name="engine", value=url))

    async def _probe_until_up(self, pause_s: float) -> None:
        up = False
        while not up:
            await asyncio.sleep(pause_s)
            up, pause_s = await self._probe(), self.pause_s
        logger.info("engine %s is up", self.server.url)
        self.fault, self.was_up = None, True
        await self._notify()

    async def _probe(self) -> bool:
        try:
            if await self.server.healthy():
                await self.server.prepare()
                await self.check_version()
                return True
        except EngineFault as fault:
            self.fault = fault
            if self.was_up:
                logger.warning("engine %s stays suspended: %s", self.server.url, fault)
            await self._notify()  # `Fleet.prepare` gives up on a server that serves another model
        self.retries += self.was_up
        return False

    async def _notify(self) -> None:
        async with self.shared.changed:
            self.shared.changed.notify_all()

    # ------------------------------------------------------------------ versions

    def learn_published(self) -> None:
        """Check the server's version after a publication; a stale server is probed at once."""
        if self.fault is None and (self.check is None or self.check.done()):
            self.check = asyncio.create_task(self._check_published())
        elif self.fault is not None and self.fault.reason == STALE and self.watch is not None:
            self.watch.cancel()
            self.watch = asyncio.create_task(self._probe_until_up(0.0))

    def learn_rewind(self, version: int) -> None:
        """Suspend the server until it has other weights than those that a rewind to `version` took back."""
        self.rewound, self.newest = True, min(self.newest, version)
        self.suspend(stale_fault(self.server.url, f"weights from before a rewind to {version}", version))

    async def _check_published(self) -> None:
        """Suspend a server that a publication did not reach; check again if another version is published meanwhile."""
        checked: int | None = None
        while self.fault is None and checked != self.shared.published:
            checked = self.shared.published
            try:
                await self.check_version()
            except EngineAway as error:
                self.record_failure(error)
            except EngineFault as error:  # the next request meets the same fault and handles it
                logger.warning("engine %s reports no version: %s", self.server.url, error)

    async def check_version(self) -> None:
        """Raise `EngineAway` (`engine_stale`) where the loaded weights are neither published nor next to be."""
        before = self.shared.published  # a version published during the call may be newer than the answer
        version = await self.read_version()
        wrong = stale(version, before) or ahead(version, self.shared.published)
        if wrong or (self.rewound and stale(before, version)):
            raise stale_fault(self.server.url, f"version {version}", before)
        self.rewound = False

    async def read_version(self) -> int | None:
        """Return the server's version; where it fell from an unpublished version, report that version as lost."""
        before, shared = self.newest, self.shared  # a sample during the call may be newer than the answer
        version = await self.server.loaded_version()
        if version is None or version >= before:
            self.newest = max(self.newest, version or 0)
            return version
        self.newest = version
        if shared.published is not None and before > shared.published:
            message = "engine %s has lost version %d before it was published: it has %d"
            logger.warning(message, self.server.url, before, version)
            shared.on_lost(shared.published)
        return version


def stale_fault(url: str, what: str, published: int | None) -> EngineAway:
    """Return the fault of a server without the published weights; it suspends the server at once."""
    return EngineAway(STALE, f"engine {url} has {what}; published is {published}", name="engine", value=url)
