"""Several inference engines as one: the least loaded of those that are up gets the next request."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from replaybuf.errors import EngineAway, EngineUnfit
from replaybuf.generator.engines import Engine, Sample, Sampling
from replaybuf.group import Int32s

logger = logging.getLogger(__name__)

TRIES = 3
"""A request that one engine failed is tried this often in all; sampling again does no harm."""
PROBE_EVERY_S = 0.5
_LOG_EVERY_S = 10.0


class Server(Engine, Protocol):
    """One member of a fleet; `replaybuf.generator.engines.VllmEngine` is one."""

    url: str
    model: str | None
    max_model_len: int | None

    async def healthy(self) -> bool:
        """Say whether the server takes requests."""

    async def prepare(self) -> None:
        """Learn what the server serves."""


@dataclasses.dataclass(slots=True, eq=False)
class _Member:
    server: Server
    in_flight: int = 0
    fault: EngineAway | None = None
    """Why it is not used now; None = up."""
    probe_at_s: float = 0.0


class Fleet:
    """Engines side by side, serving the same model.

    A server that fails with `EngineAway` gets no request until `GET /health` answers again; the request goes to another
    one, or waits up to `patience_s` seconds for any to come back. Only then is `EngineAway` raised.
    """

    def __init__(self, servers: Sequence[Server], *, patience_s: float = 30.0) -> None:
        self._members = [_Member(server) for server in servers]
        self._patience_s = patience_s
        self._log_at_s = 0.0

    @property
    def up(self) -> bool:
        """Whether at least one server takes requests, as far as is known."""
        return any(member.fault is None for member in self._members)

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt and completion together that every server takes, in tokens; None where none tells."""
        return min((m.server.max_model_len for m in self._members if m.server.max_model_len is not None), default=None)

    async def generate(self, prompt_ids: Int32s, sampling: Sampling) -> Sample:
        """Sample completions on the least loaded server; see `Engine.generate`."""
        tries = 0
        while True:
            member = await self._choose()
            tries += 1
            member.in_flight += 1
            try:
                return await member.server.generate(prompt_ids, sampling)
            except EngineAway as error:
                self._put_aside(member, error)
                # Not after a timeout: the next try may take as long again, and the ticket does not wait.
                if tries >= TRIES or error.reason == "engine_timeout":
                    raise
            finally:
                member.in_flight -= 1

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as a server is up. Raises `EngineAway` after `timeout_s` seconds."""
        await self._wait(lambda: self.up, timeout_s)

    async def prepare(self, timeout_s: float) -> None:
        """Wait for every server and learn what it serves.

        Raises `EngineAway` where one is not up in time, `EngineUnfit` where they serve different models.
        """
        for member in self._members:
            member.fault = EngineAway("engine_away", f"engine {member.server.url} is not up yet")
        await self._wait(lambda: all(member.fault is None for member in self._members), timeout_s)
        for member in self._members:
            await member.server.prepare()
        served = {member.server.url: member.server.model for member in self._members}
        if len(set(served.values())) > 1:
            raise EngineUnfit("engine_unfit", f"engines serve different models: {served}", name="engine", value=served)

    async def aclose(self) -> None:
        """Close all connections."""
        for member in self._members:
            await member.server.aclose()

    async def _choose(self) -> _Member:
        await self.wait_ready(self._patience_s)
        return min((member for member in self._members if member.fault is None), key=lambda member: member.in_flight)

    def _put_aside(self, member: _Member, error: EngineAway) -> None:
        if member.fault is None:
            logger.warning("engine %s is put aside: %s", member.server.url, error)
            member.probe_at_s = asyncio.get_running_loop().time() + PROBE_EVERY_S
        member.fault = error

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Probe what is down until the condition holds; of many requests that wait here, one probes a server."""
        clock = asyncio.get_running_loop().time
        ends_s = clock() + timeout_s
        while not condition():
            faults = "; ".join(str(member.fault) for member in self._members if member.fault is not None)
            if clock() >= ends_s:
                raise EngineAway("engine_away", f"waited {timeout_s:g} s for an engine in vain: {faults}")
            if clock() >= self._log_at_s:
                logger.warning("waiting for an engine: %s", faults)
                self._log_at_s = clock() + _LOG_EVERY_S
            if not await self._probe(clock()):
                await asyncio.sleep(PROBE_EVERY_S / 2)

    async def _probe(self, now_s: float) -> bool:
        """Probe servers that are down and due; say whether one came back."""
        back = False
        for member in self._members:
            if member.fault is None or member.probe_at_s > now_s:
                continue
            member.probe_at_s = now_s + PROBE_EVERY_S  # before the await: nobody else probes it meanwhile
            if await member.server.healthy():
                logger.info("engine %s is up", member.server.url)
                member.fault = None
                back = True
        return back
