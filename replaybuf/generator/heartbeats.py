"""Heartbeats to the service, and the abort of groups when the answer says that the run takes no groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from replaybuf.errors import ReplaybufError, ServiceUnavailable
from replaybuf.generator.failures import LAST_S
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.inflight import InFlight

logger = logging.getLogger(__name__)

FIRST_EVERY_S = 5.0
"""Pause before the second heartbeat, until an answer says how long the service waits for one."""
_SHARE = 3
"""Heartbeats per `heartbeat_s`: one or two may be lost."""
_LEAST_GAP_S = 1.0
"""Pause before a heartbeat that reports a failure."""
_CHECK_SHARE = 5
"""Engines without requests have this share of a pause to answer: the heartbeat must not come late."""


class Heartbeats:
    """Follower that reports what this producer does; `held_back_by` returns why it does less than it could."""

    def __init__(self, producer: str, held_back_by: Callable[[], str | None], slots: Callable[[], int]) -> None:
        self._producer = producer
        self._held_back_by = held_back_by
        self._slots = slots
        self._every_s = FIRST_EVERY_S
        self._failing = False

    async def follow(self, inflight: InFlight, fleet: Fleet, published: Callable[[], int | None]) -> None:
        """Send heartbeats until nothing is in flight. A service that does not answer gets the next one later."""
        while not inflight.done:
            await fleet.check_idle(self._every_s / _CHECK_SHARE)
            await self._send(inflight, fleet)
            gap_s = min(_LEAST_GAP_S, self._every_s)
            await inflight.until(lambda: inflight.done, gap_s)
            await inflight.until(lambda: inflight.done or inflight.failure is not None, self._every_s - gap_s)

    async def report_failure(self, inflight: InFlight, fleet: Fleet) -> None:
        """Send a failure that the service does not know yet, within `LAST_S`."""
        if inflight.failure is None:
            return
        try:
            async with asyncio.timeout(LAST_S):
                await self._send(inflight, fleet)
        except TimeoutError:
            logger.warning("the service did not take the last failure within %g s", LAST_S)

    async def _send(self, inflight: InFlight, fleet: Fleet) -> None:
        engines = sum(engine.fault is None for engine in fleet.status())
        failure = inflight.failure  # it stays until the service has answered: this may be cancelled before
        try:
            answer = await inflight.client.send_heartbeat(
                self._producer,
                in_flight=len(inflight.jobs),
                slots=self._slots(),
                engines=engines,
                held_back_by=self._held_back_by(),
                failure=failure,
            )
        except ReplaybufError as error:  # the calls that matter retry, and report it
            logger.log(logging.DEBUG if self._failing else logging.WARNING, "no heartbeat: %s", error)
            self._failing = True
            if not isinstance(error, ServiceUnavailable):  # it would be refused again, and no heartbeat come
                inflight.forget(failure)
            return
        inflight.forget(failure)
        self._failing, self._every_s = False, answer.heartbeat_s / _SHARE
        if answer.state != "running":
            inflight.abort_sampling(f"run_{answer.state}", f"the run is {answer.state}")
