"""Several inference engines as one: of those that are up, the one with the fewest tokens outstanding gets the request.

Life of a server, as its circuit breaker sees it::

    starting ──► up ──► aside ──► trial ──► up
                          ▲         │
                          └─────────┘

Up or in trial, it is put aside by `FAILURES_IN_A_ROW` failures without an answer between them (so in trial mostly by
the first), or by a connection that fails; in trial, one answer makes it up. Aside, it gets no request and is probed
(`healthy`, then `prepare`: it may have been started anew) after pauses that double. In trial it gets one request at a
time while others are up.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit
from replaybuf.generator.engines import Sample, Sampling, Server
from replaybuf.group import Int32s

logger = logging.getLogger(__name__)

TRIES = 3
"""A request that one engine failed is tried this often in all; sampling again does no harm."""
FAILURES_IN_A_ROW = 3
"""So many put a server aside; one that cannot be connected to is put aside at once."""
PROBE_FIRST_S = 0.5
PROBE_CEILING_S = 10.0
RETRY_PAUSE_S = 0.5
"""Before the next try on a server that has just failed the same request."""
_LOG_EVERY_S = 10.0
_NO_FAILURE = ("engine_aborted", "engine_restarted")
"""Reasons for another try that say nothing against the server."""

State = Literal["starting", "up", "aside", "trial"]


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one moment: requests in flight and tokens they may still come to, failures since its last answer.

    `fault`: why it gets no request; None where it does.
    """

    url: str
    state: State
    requests: int
    tokens: int
    failures: int
    fault: str | None


@dataclasses.dataclass(slots=True, eq=False)
class _Member:
    server: Server
    requests: int = 0
    tokens: int = 0
    failures: int = 0
    """Since the last answer."""
    setbacks: int = 0
    """Times put aside and probes failed since the last answer; the pause before a probe doubles with each."""
    fault: EngineFault | None = None
    """Why it is not used now; None = it is."""
    known: bool = False
    """Has been up."""
    watch: asyncio.Task[None] | None = None
    """Probes it while it is aside."""

    @property
    def state(self) -> State:
        if self.fault is not None:
            return "aside" if self.known else "starting"
        return "trial" if self.setbacks else "up"

    @property
    def pause_s(self) -> float:
        """How long to wait before the next probe; a server that starts is looked for steadily."""
        return min(PROBE_FIRST_S * 2 ** (self.setbacks - 1), PROBE_CEILING_S) if self.known else PROBE_FIRST_S

    @contextlib.contextmanager
    def carrying(self, tokens: int) -> Iterator[None]:
        self.requests += 1
        self.tokens += tokens
        try:
            yield
        finally:
            self.requests -= 1
            self.tokens -= tokens


class Fleet:
    """Engines side by side, serving the same model.

    A request that fails with `EngineAway` goes to another server; only a timeout is told at once, since the next try
    may take as long again and the ticket does not wait. With no server up it waits up to `patience_s` seconds for any
    to come back. An `EngineUnfit` server is put aside too while others are up.
    """

    def __init__(self, servers: Sequence[Server], *, patience_s: float = 30.0) -> None:
        self._members = [_Member(server) for server in servers]
        self._patience_s = patience_s
        self._changed = asyncio.Condition()
        self._log_at_s = 0.0

    @property
    def up(self) -> bool:
        """Whether at least one server takes requests, as far as is known."""
        return any(member.fault is None for member in self._members)

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt and completion together that every server takes, in tokens; None where none tells."""
        return min((m.server.max_model_len for m in self._members if m.server.max_model_len is not None), default=None)

    def status(self) -> tuple[ServerStatus, ...]:
        """Return how every server is doing."""
        return tuple(
            ServerStatus(
                url=member.server.url,
                state=member.state,
                requests=member.requests,
                tokens=member.tokens,
                failures=member.failures,
                fault=None if member.fault is None else member.fault.detail,
            )
            for member in self._members
        )

    async def generate(self, prompt_ids: Int32s, sampling: Sampling) -> Sample:
        """Sample completions on the least loaded server; see `Engine.generate`."""
        tokens = len(prompt_ids) + sampling.n * sampling.max_tokens
        failed: list[_Member] = []
        while True:
            member = await self._choose(failed)
            try:
                with member.carrying(tokens):
                    sample = await member.server.generate(prompt_ids, sampling)
            except EngineAway as error:
                self._count(member, error)
                failed.append(member)
                if len(failed) >= TRIES or error.reason == "engine_timeout":
                    raise
            except EngineUnfit as error:
                if not any(other.fault is None for other in self._members if other is not member):
                    raise
                self._put_aside(member, error)
            else:
                member.failures = member.setbacks = 0
                return sample

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as a server is up. Raises `EngineAway` after `timeout_s` seconds."""
        await self._wait(lambda: self.up, timeout_s)

    async def prepare(self, timeout_s: float) -> None:
        """Wait for every server and learn what it serves.

        Raises `EngineAway` where one is not up in time, `EngineUnfit` where they serve different models.
        """
        for member in self._members:
            member.fault = EngineAway("engine_away", f"engine {member.server.url} is not up yet")
            member.watch = asyncio.create_task(self._watch(member, first_pause_s=0.0))
        await self._wait(self._all_up, timeout_s)
        served = {member.server.url: member.server.model for member in self._members}
        if len(set(served.values())) > 1:
            raise EngineUnfit("engine_unfit", f"engines serve different models: {served}", name="engine", value=served)

    async def aclose(self) -> None:
        """Stop probing and close all connections."""
        watches = [member.watch for member in self._members if member.watch is not None]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        for member in self._members:
            await member.server.aclose()

    # ------------------------------------------------------------------ choosing

    async def _choose(self, failed: Sequence[_Member]) -> _Member:
        """Return the least loaded server, one that has not failed this request where there is one."""
        await self.wait_ready(self._patience_s)
        if failed and not self._usable(failed) and failed[-1].fault is None:
            await asyncio.sleep(RETRY_PAUSE_S)
            await self.wait_ready(self._patience_s)
        usable = self._usable(failed) or self._usable(())
        calm = [member for member in usable if member.state == "up" or not member.requests]
        return min(calm or usable, key=lambda member: (member.tokens, member.requests))

    def _usable(self, failed: Sequence[_Member]) -> list[_Member]:
        return [member for member in self._members if member.fault is None and member not in failed]

    def _all_up(self) -> bool:
        unfit = next((m.fault for m in self._members if isinstance(m.fault, EngineUnfit)), None)
        if unfit is not None:
            raise unfit
        return all(member.fault is None for member in self._members)

    # ------------------------------------------------------------------ the circuit breaker

    def _count(self, member: _Member, error: EngineAway) -> None:
        if error.reason in _NO_FAILURE:
            return
        member.failures += 1
        if error.reason == "engine_away" or member.failures >= FAILURES_IN_A_ROW:
            self._put_aside(member, error)

    def _put_aside(self, member: _Member, error: EngineFault) -> None:
        if member.fault is not None:  # by another of the requests that were in flight there
            return
        member.fault, member.known = error, True
        member.setbacks += 1
        logger.warning(
            "engine %s is put aside after %d failures in a row, probed in %g s: %s",
            member.server.url,
            member.failures,
            member.pause_s,
            error,
        )
        member.watch = asyncio.create_task(self._watch(member, first_pause_s=member.pause_s))

    async def _watch(self, member: _Member, *, first_pause_s: float) -> None:
        """Probe a server that is aside until it is back."""
        pause_s, back = first_pause_s, False
        while not back:
            await asyncio.sleep(pause_s)
            back, pause_s = await self._back(member), member.pause_s
        logger.info("engine %s is up", member.server.url)
        member.fault, member.known = None, True
        async with self._changed:
            self._changed.notify_all()

    async def _back(self, member: _Member) -> bool:
        try:
            if await member.server.healthy():
                await member.server.prepare()
                return True
        except EngineFault as fault:
            member.fault = fault
            if member.known:
                logger.warning("engine %s stays aside: %s", member.server.url, fault)
            async with self._changed:  # `prepare` gives up on a server that does not fit
                self._changed.notify_all()
        member.setbacks += member.known
        return False

    # ------------------------------------------------------------------ waiting

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the condition holds; now and then say for what."""
        clock = asyncio.get_running_loop().time
        ends_s = clock() + timeout_s
        while not condition():
            self._check_watches()
            faults = "; ".join(str(member.fault) for member in self._members if member.fault is not None)
            if clock() >= ends_s:
                raise EngineAway("engine_away", f"waited {timeout_s:g} s for an engine in vain: {faults}")
            if clock() >= self._log_at_s:
                logger.warning("waiting for an engine: %s", faults)
                self._log_at_s = clock() + _LOG_EVERY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(ends_s - clock(), _LOG_EVERY_S)), self._changed:
                    await self._changed.wait()

    def _check_watches(self) -> None:
        """Raise what ended a probe that nothing should have ended."""
        for member in self._members:
            if member.watch is not None and member.watch.done():
                member.watch.result()
