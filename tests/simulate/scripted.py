"""A real run in compressed time: producers and a trainer that sleep where others work, against a real service."""

from __future__ import annotations

import asyncio
import dataclasses
import time

from replaybuf.calls import Ticket, Waiting
from replaybuf.client import AsyncClient
from replaybuf.simulate.workload import Supply
from tests.builders import group_of_lengths

POLL_MS = 2000
_LONGEST_S = 90.0


@dataclasses.dataclass
class Measured:
    """What the scripted trainer saw: seconds in all, seconds it waited."""

    seconds: float = 0.0
    waited_s: float = 0.0

    @property
    def wait_share(self) -> float:
        """Waited over all."""
        return self.waited_s / self.seconds


async def play(client: AsyncClient, supply: Supply, steps: int) -> Measured:
    """Train `steps` steps while all slots generate."""
    measured = Measured()
    async with asyncio.timeout(_LONGEST_S):
        slots = [asyncio.create_task(_slot(client, supply)) for _ in range(supply.workload.slots)]
        try:
            await _train(client, supply, steps, measured)
        finally:
            for slot in slots:
                slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)
    return measured


async def _slot(client: AsyncClient, supply: Supply) -> None:
    while True:
        taken = await client.take_tickets("scripted", 1, wait_ms=POLL_MS)
        for ticket in taken.tickets:
            await _generate(client, supply, ticket, taken.published_version)


async def _generate(client: AsyncClient, supply: Supply, ticket: Ticket, version: int) -> None:
    attempt = supply.attempt(ticket.prompt_index, ticket.attempt)
    lengths = supply.lengths(ticket.prompt_index, ticket.attempt).tolist()
    group = group_of_lengths(
        lengths, ticket=ticket.ticket, prompt_index=ticket.prompt_index, policy_version=version, group_id=None
    )
    await asyncio.sleep(attempt.duration_s)
    if attempt.fate == "stored":
        await client.append([group])
    else:
        await client.return_ticket(ticket.ticket, attempt.fate)


async def _train(client: AsyncClient, supply: Supply, steps: int, measured: Measured) -> None:
    """The order of a trainer's step, with the reference trainer's prefetch: asked once, at the start of training."""
    w = supply.workload
    epoch = (await client.attach(dp_world_size=1)).epoch
    began = time.perf_counter()
    for step in range(steps):
        asked = time.perf_counter()
        while isinstance(await client.fetch_batch(step, epoch, wait_ms=POLL_MS), Waiting):
            pass
        measured.waited_s += time.perf_counter() - asked
        done = asyncio.get_running_loop().time() + w.train_s
        if w.prefetch and step + 1 < steps:
            await client.fetch_batch(step + 1, epoch)
        await asyncio.sleep(done - asyncio.get_running_loop().time())
        await client.ack(step, epoch)
        if (step + 1) % w.checkpoint_steps == 0:
            await client.checkpoint(step + 1, epoch)
        await asyncio.sleep(w.publish_s)
        await client.publish_policy(step + 1, epoch)
    measured.seconds = time.perf_counter() - began
