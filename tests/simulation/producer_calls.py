"""The calls of a producer: by HTTP (`http.client`), or of the service in its process, which is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from replaybuf.errors import InvalidGroups
from replaybuf.service.host import Service
from replaybuf.service.run.append.group_check import Incoming
from replaybuf.wire.contract import AppendResult, Tickets
from replaybuf.wire.frame import decode_frame, encode_frame
from replaybuf.wire.group import Group
from tests.builders import arriving
from tests.chaos.calling import Outcome
from tests.simulation.http.client import WAIT_S
from tests.simulation.servers import Client, Gone


class ProducerCalls(Protocol):
    """What a producer of one run calls. Each call is repeated where the contract allows it."""

    async def take(self, producer: str, count: int, adapter: str) -> Outcome[Tickets]:
        """Take tickets."""

    async def append(self, groups: Sequence[Group], *, frames: bool) -> Outcome[list[AppendResult]]:
        """Append groups. `frames`: as frames, not as JSON."""

    async def give_back(self, ticket: str) -> Outcome[None]:
        """Give a ticket back."""


class ServiceCalls:
    """Calls of the service in its process."""

    def __init__(self, client: Client, run: str) -> None:
        self._client, self._run = client, run

    async def take(self, producer: str, count: int, adapter: str) -> Outcome[Tickets]:
        """Take tickets."""

        async def work(service: Service, gone: Gone) -> Tickets:
            led = await service.led(self._run)
            led.journal.presence.record_producer()
            return await led.tickets.issue(producer, count, adapter, WAIT_S, gone)

        return await self._client.observe(self._run, work, WAIT_S)

    async def append(self, groups: Sequence[Group], *, frames: bool) -> Outcome[list[AppendResult]]:
        """Append groups."""
        arrived = [_arrive(group, frames=frames) for group in groups]

        async def work(service: Service, gone: Gone) -> list[AppendResult]:
            storing = await service.storing(self._run)
            storing.journal.presence.record_producer()
            try:
                return await storing.appends.append(arriving(arrived))
            except InvalidGroups as error:  # the answer has the results too
                return list(error.results)

        self._client.ask_any()  # each of them stores groups
        return await self._client.observe(self._run, work)

    async def give_back(self, ticket: str) -> Outcome[None]:
        """Give a ticket back."""

        async def work(service: Service, gone: Gone) -> None:
            led = await service.led(self._run)
            await led.tickets.give_back(ticket, "chaos")

        return await self._client.observe(self._run, work)


def _arrive(group: Group, *, frames: bool) -> Incoming:
    if not frames:
        return Incoming(group)
    frame = encode_frame(group)
    return Incoming(decode_frame(frame), frame)
