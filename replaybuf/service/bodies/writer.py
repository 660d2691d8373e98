"""Bodies of packed batches: each is written once, however many requests wait for it, and a large one in a thread."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import zstandard

from replaybuf.packing.batches import plan_of, write_body
from replaybuf.service.bodies.assembly import Coding, Form, PackedBatch, size_of
from replaybuf.service.turns import call_beside
from replaybuf.version import __version__

WRITERS = 2
"""Bodies of a run written at the same time: memory bandwidth is the bound, and writers hold the GIL at times."""
ZSTD_LEVEL = 1
TOKEN_BYTES = 8
"""Of a frame, about."""


class Bodies:
    """Writes the bodies of run `run`. A batch keeps its bodies and drops them with itself."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._writers = asyncio.Semaphore(WRITERS)

    async def body(self, batch: PackedBatch, rank: int, coding: Coding) -> memoryview:
        """Return the body of one rank. A request that is cancelled does not stop it for the others."""
        task = batch.bodies.get((rank, coding))
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = batch.bodies[rank, coding] = asyncio.create_task(self._write(batch, rank, coding))
        return await asyncio.shield(task)

    async def plan(self, batch: PackedBatch, rank: int) -> bytes:
        """Return the plan of one rank's body as JSON, without writing the body."""
        rollouts = len(batch.owners) // batch.layout.dp_world_size
        plan = await call_beside(rollouts, plan_of, self._run, batch, rank, __version__)
        return await call_beside(rollouts, msgspec.json.encode, plan)

    async def _write(self, batch: PackedBatch, rank: int, coding: Coding) -> memoryview:
        if coding == "zstd":
            plain = await self.body(batch, rank, "identity")
            async with self._writers:
                body = await asyncio.to_thread(_compress, plain)
        else:
            async with self._writers:
                size = size_of(len(batch.groups), TOKEN_BYTES * batch.tokens) // batch.layout.dp_world_size
                body = await call_beside(size, write_body, self._run, batch, rank)
        batch.nbytes += body.nbytes
        return body


def _compress(body: memoryview) -> memoryview:
    return memoryview(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(body))


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a batch, as an HTTP response needs it."""

    batch: PackedBatch
    rank: int
    bodies: Bodies

    def etag(self, form: Form) -> str:
        """Return the strong validator of the bytes in this form, without writing them."""
        return self.batch.etag(self.rank, form)

    async def body(self, coding: Coding = "identity") -> memoryview:
        """Return the body."""
        return await self.bodies.body(self.batch, self.rank, coding)

    async def plan(self) -> bytes:
        """Return the plan as JSON."""
        return await self.bodies.plan(self.batch, self.rank)
