"""A small run beside the main one: its creation, groups, steps and state, each call repeated until it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from replaybuf.errors import ServiceUnavailable
from replaybuf.kernel.state.group_query import GroupQuery
from replaybuf.service.host import Service
from replaybuf.service.http.call.browse import describe_group, list_groups
from replaybuf.store import keys
from replaybuf.wire.config import RunConfig
from replaybuf.wire.contract import AttachRequest
from tests.chaos.content import GROUP_SIZE, VOCAB_SIZE, checksum, make_group
from tests.chaos.history import OK, Event
from tests.chaos.runs import spill_to
from tests.simulation.failing_over import ends_of
from tests.simulation.producer_calls import ServiceCalls
from tests.simulation.producing import Sent, send
from tests.simulation.redis_model.redis import Redis
from tests.simulation.servers import Client, Gone
from tests.simulation.training import ask, attach
from tests.simulation.world import World

T = TypeVar("T")

GROUPS, PER_BATCH = 6, 2
PAUSE_S = 0.2


class SmallRun:
    """One run. `folder` is for its frames, None keeps them in Redis.

    `stage`: what it does now; `wrong`: what did not hold; `epochs`: those of its trainers.
    """

    def __init__(self, world: World, client: Client, redis: Redis, name: str, folder: Path | None = None) -> None:
        self._world, self._client, self._redis, self.name, self._folder = world, client, redis, name, folder
        self._calls = ServiceCalls(client, name)
        self._unread: list[Event] = []  # the checker of chaos judges the main run only
        self.stage = "its creation"
        self.wrong: list[str] = []
        self.epochs: list[int] = []

    def _compare(self, what: str, before: object, after: object) -> None:
        if before != after:
            self.wrong.append(f"run {self.name}, {what}: {before} became {after}")

    async def _do(self, work: Callable[[Service, Gone], Awaitable[T]]) -> T:
        while True:
            done = await self._client.observe(self.name, work)
            if done.seen["outcome"] == OK:
                return done.result  # type: ignore[return-value]
            await asyncio.sleep(PAUSE_S)

    async def _create(self, service: Service, gone: Gone) -> None:
        config: dict[str, Any] = {
            "strategy": {"name": "one-step-off-policy", "options": {"max_staleness": GROUPS}},
            "batch": {"groups_per_batch": PER_BATCH, "seq_len": 64},
            "group_size": GROUP_SIZE,
            "vocab_size": VOCAB_SIZE,
        }
        config |= spill_to(self._folder) if self._folder else {}
        await service.create(self.name, msgspec.convert(config, RunConfig), if_absent=True)

    async def _append(self, name: str, calls: ServiceCalls | None = None) -> None:
        group = Sent(name, make_group(name, 0, named=True), None)
        while True:
            (outcome,) = await send(calls or self._calls, [group], self._unread, frames=True)
            if outcome in ("stored", "duplicate"):
                return
            await asyncio.sleep(PAUSE_S)

    async def _facts(self, service: Service, gone: Gone) -> dict[str, Any]:
        """Return the counts of the run, and the checksum of each rollout that is still needed."""
        run = await service.led(self.name)
        await run.read_streams()  # another server may have stored the last group
        if (run.state.entries, run.state.stored) != ends_of(self._redis.server_of(keys.counts(self.name)), self.name):
            raise ServiceUnavailable("this server has lost the lead and has not heard of it", name="leader")
        state, rollouts = msgspec.to_builtins(run.describe()), {}
        for group in (await list_groups(run, GroupQuery(state="live"), None, GROUPS)).groups:
            shown: Any = (await describe_group(run, group.group_id, None))["rollouts"]
            rollouts[group.group_id] = [checksum([*one["prompt_ids"], *one["completion_ids"]]) for one in shown or []]
        groups = {name: state["groups"][name] for name in ("stored", "live", "dead_lettered")}
        return groups | {"step": state["step"], "version": state["published_version"], "rollouts": rollouts}

    async def _train(self, steps: range) -> list[str]:
        """Attach, train steps and record a checkpoint; return the ids of their groups."""
        trained: list[str] = []
        request, epoch = AttachRequest(dp_world_size=1), None
        while epoch is None:
            got, _ = await attach(self._client, self.name, request, self._unread)
            epoch = got.epoch if got else None
        self.epochs.append(epoch)
        for step in steps:
            body = None
            while body is None:
                body = (await ask(self._client, self.name, step, (epoch, 1), 0, self._unread)).body
                await asyncio.sleep(0.05)
            trained += dict.fromkeys(rollout.group_id for rollout in body.rollouts)
            await self._write("ack", step, epoch)
            await self._write("publish_policy", step + 1, epoch)
        await self._write("checkpoint", steps.stop, epoch)
        return trained

    async def _write(self, kind: str, value: int, epoch: int) -> None:
        async def work(service: Service, gone: Gone) -> None:
            session = (await service.led(self.name)).trainer_calls
            if kind == "ack":
                await session.ack(value, epoch, {})
            elif kind == "checkpoint":
                await session.checkpoint(value, epoch, 1)
            else:
                await session.publish(value, epoch, None, "")

        await self._do(work)
