"""A run that this process leads, on a real Valkey, without HTTP."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from replaybuf.service.bodies.writer import Part
from replaybuf.service.run.append.group_check import Incoming
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.config import BatchSpec, RunConfig
from replaybuf.wire.group import group_from_json
from tests.builders import arriving, rollout, wire_group

_names = itertools.count()
LEASE_S = 60.0


def on_a_run(server: EmbeddedServer, work: Callable[[Store, Run], Awaitable[None]], **config: Any) -> None:
    """Do `work` on a new run that is led here; by default of one group per batch."""

    async def main() -> None:
        store, name = await Store.open(server.url), f"led-{next(_names)}"
        try:
            token = (await store.runs.take_lease(name, "here", LEASE_S)).token
            spec = RunConfig(**{"batch": BatchSpec(groups_per_batch=1), **config})
            await work(store, await Run.create(name, store, str(token), spec))
        finally:
            await store.close()

    asyncio.run(main())


async def append(run: Run, *group_ids: str, version: int = 0) -> None:
    """Store small groups."""
    wires = [wire_group(rollout(), group_id=name, policy_version=version) for name in group_ids]
    await run.appends.append(arriving(Incoming(group_from_json(wire)) for wire in wires))


async def train(run: Run, epoch: int, steps: range) -> None:
    """Fetch, ack and publish."""
    for step in steps:
        assert isinstance(await run.batches.part(step, epoch, 0, 0.0), Part)
        await run.trainer_calls.ack(step, epoch, None)
        await run.trainer_calls.publish(step + 1, epoch, None, "")
