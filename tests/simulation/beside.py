"""Simulated clients beside producers and trainer: a stage, a reader of a cursor, an operator."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from replaybuf.errors import Conflict, NotFound
from replaybuf.errors import Gone as BytesGone
from replaybuf.kernel.state.group_query import GroupQuery
from replaybuf.service.host import Service
from replaybuf.service.http.call.browse import describe_group, list_groups
from replaybuf.service.http.call.cursor_calls import _read_groups
from replaybuf.wire.config_patch import ConfigPatch
from replaybuf.wire.late_columns import late_columns
from tests.chaos.content import COLUMN, checksum, reference_of, tokens_of
from tests.chaos.history import OK, CursorMoved, CursorRead, Event
from tests.chaos.runs import CURSOR
from tests.simulation.servers import Client, Gone
from tests.simulation.world import World

AT_ONCE = 6
PAGE = 50
WAIT_S = 0.4
AGAIN = 0.1
"""Share of pages that are read again, as after a crash of the reader."""


async def stage(world: World, client: Client, run: str, stopping: asyncio.Event) -> None:
    """Add the late column to groups that lack it, until `stopping` is set."""

    async def work(service: Service, gone: Gone) -> None:
        led = await service.led(run)
        for group in (await list_groups(led, GroupQuery(lacks=COLUMN), None, AT_ONCE)).groups:
            try:
                rollouts: Any = (await describe_group(led, group.group_id, None))["rollouts"]
                values = [[reference_of(token) for token in rollout["completion_ids"]] for rollout in rollouts or []]
                await led.late_columns.add(late_columns(group.group_id, {COLUMN: values}))
            except (Conflict, NotFound, BytesGone):  # a batch has drawn it meanwhile, or it was dropped
                continue

    while not stopping.is_set():
        await client.observe(run, work)
        await asyncio.sleep(world.rng.uniform(0.05, 0.3))


class Reader:
    """Follows the cursor of a run. It keeps nothing: the cursor says where it goes on."""

    def __init__(self, world: World, client: Client, run: str, history: list[Event]) -> None:
        self._world, self._client, self._run, self._history = world, client, run, history

    async def open(self) -> None:
        """Create the cursor before any group is freed: it keeps no bytes of groups that were freed before it."""

        async def work(service: Service, gone: Gone) -> None:
            await (await service.led(self._run)).cursors.open(CURSOR, None)

        await self._client.observe(self._run, work)

    async def work(self, stopping: asyncio.Event) -> None:
        """Read until `stopping` is set."""
        while not stopping.is_set():
            page = await self._read()
            if page and self._world.rng.random() > AGAIN:
                await self._move(*page)
            await asyncio.sleep(self._world.rng.uniform(0.1, 0.6))

    async def read_to_the_end(self) -> None:
        """Read at rest what is left."""
        for _ in range(PAGE):
            page = await self._read(last=True)
            if page is None or not await self._move(*page):
                return

    async def _read(self, *, last: bool = False) -> tuple[int, str] | None:
        async def work(service: Service, gone: Gone) -> tuple[list[dict[str, Any]], str, int]:
            led = await service.led(self._run)
            await led.cursors.open(CURSOR, None)
            page = await led.cursors.page(CURSOR, PAGE, WAIT_S, gone)
            groups = await _read_groups(led, page, None)
            return groups, page.position.render(page.kind), page.gap.groups + len(page.items) - len(groups)

        asked = await self._client.observe(self._run, work, WAIT_S)
        groups, position, missed = asked.result or ([], "", 0)
        numbers: list[int] = [group["number"] for group in groups]
        wrong = [f"{group['group_id']} {difference}" for group in groups if (difference := _difference_of(group))]
        self._history.append(CursorRead(**asked.seen, numbers=numbers, missed=missed, wrong=wrong, last=last))
        return (numbers[-1], position) if numbers else None

    async def _move(self, number: int, position: str) -> bool:
        async def work(service: Service, gone: Gone) -> None:
            await (await service.led(self._run)).cursors.advance(CURSOR, position)

        moved = await self._client.observe(self._run, work)
        self._history.append(CursorMoved(**moved.seen, number=number))
        return bool(moved.seen["outcome"] == OK)


def _difference_of(group: dict[str, Any]) -> str | None:
    """Name what is wrong with the content of a group; None if nothing is."""
    if not group["rollouts"]:
        return f"without its tokens: number {group['number']}, {group['state']}, {group.get('reason')}"
    tokens = [checksum([*one["prompt_ids"], *one["completion_ids"]]) for one in group["rollouts"]]
    right = [checksum(tokens_of(group["group_id"], group["prompt_id"], number)) for number in range(len(tokens))]
    return None if tokens == right else "with other tokens"


async def operate(world: World, client: Client, run: str, stopping: asyncio.Event) -> None:
    """Change strategy, limits and adapters now and then, until `stopping` is set; then all adapters train."""
    while not stopping.is_set():
        await asyncio.sleep(world.rng.uniform(0.3, 2.0))
        await _patch(client, run, world.mix.revision(world.rng))
    while world.mix.changes_adapters and await _patch(client, run, world.mix.last_revision()) != OK:  # noqa: ASYNC110
        await asyncio.sleep(WAIT_S)


async def _patch(client: Client, run: str, changes: dict[str, Any]) -> str:
    patch = msgspec.convert(changes, ConfigPatch)

    async def work(service: Service, gone: Gone) -> None:
        await (await service.led(run)).patch(patch, by="operator")

    return str((await client.observe(run, work)).seen["outcome"])
