"""A run that is backed up, deleted, restored, trained to its end and deleted for good, in the hostile world.

Backup and restore are processes of their own: they are killed, or stopped and continued when another restore has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from replaybuf.backup.section import Section
from replaybuf.backup.source import Source
from replaybuf.backup.target import open_target
from replaybuf.errors import Gone as RunGone
from replaybuf.errors import NotFound, ReplaybufError
from replaybuf.service.host import Service
from replaybuf.store import Store, keys
from replaybuf.store.redis.connection import Connection
from replaybuf.wire.config_patch import ConfigPatch
from tests.simulation.loop import Node
from tests.simulation.redis_model.redis import Redis
from tests.simulation.redis_model.values import Values
from tests.simulation.servers import LONGEST_STOP_S, Client, Gone
from tests.simulation.small_run import GROUPS, PAUSE_S, PER_BATCH, SmallRun
from tests.simulation.world import World

T = TypeVar("T")

COPIED_RUN = "copied"
STEPS_BEFORE = 1
ATTEMPT_S = 8.0
"""An attempt that takes longer is killed."""
DISTURBED = 0.3
"""Share of attempts that are killed or stopped."""
SOON_S = 0.06
"""Within this time: an attempt takes about half of it."""
STAYS = ("incarnation", "deleted", "lead")
"""Keys of a name that outlive the run: see `replaybuf.store.keys`."""


class CopiedRun(SmallRun):
    """One run from its creation to its second deletion. `wrong`: what a restore changed, or the last deletion left."""

    def __init__(self, world: World, client: Client, redis: Redis, folder: Path | None) -> None:
        super().__init__(world, client, redis, COPIED_RUN, folder)
        self._attempts = 0

    async def work(self) -> None:
        """Do all of it; each call is repeated until it is answered."""
        names = [f"copied-{number}" for number in range(GROUPS)]
        await self._do(self._create)
        for name in names:
            await self._append(name)
        await self._train(range(STEPS_BEFORE))
        before = await self._do(self._facts)
        self.stage = "its backup"
        sections = await self._run_process("backup", self._back_up)
        await self._delete("its deletion")
        self.stage = "its restore"
        await self._run_process("restore", lambda: self._restore(sections))
        self.stage = "its end"
        self._compare("its state and rollouts", before, await self._do(self._facts))
        rest = await self._train(range(STEPS_BEFORE, GROUPS // PER_BATCH))
        self._compare("the groups trained afterwards", names[STEPS_BEFORE * PER_BATCH :], sorted(rest))
        after = await self._do(self._facts)
        self._compare("groups that became unreadable", before["dead_lettered"], after["dead_lettered"])
        await self._delete("its last deletion")
        self.stage = "nothing"

    def check_nothing_is_left(self) -> None:
        """Note keys of the run at rest: a late server, or a late restore, wrote them after the last deletion."""
        values, tag = self._values, COPIED_RUN.encode()
        stays = {f"rb:{{{COPIED_RUN}}}:{name}".encode() for name in STAYS}
        # A payload that was never published has a lifetime.
        left = [key for key, (_, ends_ms) in values.copy().items() if tag in key and key not in stays and not ends_ms]
        if left:
            self.wrong.append(f"{sorted(left)[:5]} and {len(left)} keys in all are left of the deleted run")

    @property
    def _values(self) -> Values:
        return self._redis.server_of(keys.RUNS).values

    # ------------------------------------------------------------------ calls

    async def _delete(self, stage: str) -> None:
        """Finish and delete the run, and wait until its keys are gone."""
        self.stage = stage

        async def work(service: Service, gone: Gone) -> None:
            with contextlib.suppress(RunGone, NotFound):  # an attempt without an answer has done it
                run = await service.led(COPIED_RUN)
                await run.patch(ConfigPatch(state="finished"))
                await service.delete(COPIED_RUN)

        await self._do(work)
        index = keys.index(COPIED_RUN).encode()
        while self._values.peek(index) is not None:  # noqa: ASYNC110 - servers do it in the background
            await asyncio.sleep(PAUSE_S)

    # ------------------------------------------------------------------ processes

    async def _run_process(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run a process until one succeeds. Any may be killed or stopped, and go on later."""
        world = self._world
        while True:
            self._attempts += 1
            node = Node(f"{name}{self._attempts}")
            task: asyncio.Task[tuple[T] | None] = world.on(node, world.loop.create_task, _answered(work))
            if world.faults.happens(f"hurt {name}", DISTURBED, world):
                await asyncio.wait({task}, timeout=world.rng.uniform(0.0, SOON_S))
                stays_dead = world.rng.random() < 0.5
                world.note("is killed" if stays_dead else "is stopped", node=node)
                node.dead, node.stopped = stays_dead, not stays_dead
                if node.stopped:
                    world.loop.call_later(world.rng.uniform(0.5, LONGEST_STOP_S), world.loop.go_on, node)
            await asyncio.wait({task}, timeout=ATTEMPT_S)
            if not task.done():
                world.note("takes too long", node=node)
            elif answer := task.result():
                return answer[0]
            await asyncio.sleep(PAUSE_S)

    async def _store(self) -> Store:
        connection = Connection(self._redis.url)
        await connection.check_role()
        await connection.prepare()
        return Store(connection)

    async def _back_up(self) -> list[Section]:
        store, sections = await self._store(), _Sections()
        await Source(store, COPIED_RUN, sections).copy()
        await store.close()
        return sections.sections

    async def _restore(self, sections: list[Section]) -> None:
        if COPIED_RUN.encode() in (self._values.get(keys.RUNS.encode(), set) or ()):
            return  # an attempt without an answer has done it
        store = await self._store()
        async with open_target(store, COPIED_RUN) as target:
            for section in sections:
                await target.add(section)
            await target.finish()
        await store.close()


class _Sections:
    """Takes the sections of a backup into memory."""

    def __init__(self) -> None:
        self.sections: list[Section] = []

    async def add(self, section: Section) -> None:
        """Take one section."""
        self.sections.append(section)


async def _answered(work: Callable[[], Awaitable[T]]) -> tuple[T] | None:
    """Do work; None if it ends with an error that a person would repeat."""
    try:
        return (await work(),)
    except ReplaybufError:
        return None
