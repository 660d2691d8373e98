"""A simulated trainer: attaches, trains steps, checkpoints, resumes at them, and now and then writes when it is fenced.

The order of a step is the contract's: fetch all ranks, (prefetch,) ack, publish, now and then a checkpoint.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from replaybuf.errors import WrongStep
from replaybuf.service.host import Service
from replaybuf.wire.contract import Attachment, AttachRequest, WaitingAnswer
from tests.chaos.content import priority_of
from tests.chaos.history import OK, UNAVAILABLE, Attached, BatchAsked, Event, TrainerWrote
from tests.chaos.trainer import read_body
from tests.simulation.direct import DirectRank
from tests.simulation.servers import Client, Gone, Server
from tests.simulation.world import World

WAIT_S = 0.8
CHECKPOINT_EVERY_STEPS = 3
"""Each step with many rewinds: they are short, and hit groups that are on their way."""
REATTACHES, OFTEN, MOST_OFTEN = 0.05, 0.4, 0.7
"""Share of steps after which a trainer attaches again, without many rewinds, with them, and with faults too."""
RESAMPLES, MOSTLY = 0.25, 0.7
"""Share of attaches that give the groups of later batches back, without and with many rewinds."""
RETRIED = (*UNAVAILABLE, "not-durable")


async def attach(
    client: Client, run: str, request: AttachRequest, history: list[Event]
) -> tuple[Attachment | None, str]:
    """Attach and record it; return the answer and the outcome."""

    async def work(service: Service, gone: Gone) -> Attachment:
        led = await service.led(run)
        return await led.trainer_calls.attach(request)

    done = await client.observe(run, work)
    asked: dict[str, Any] = {"resume_step": request.resume_step, "on_resume": request.on_resume}
    if done.result:
        asked |= {"epoch": done.result.epoch, "step": done.result.step, "generation": done.result.generation}
    history.append(Attached(**done.seen, **asked, world=request.dp_world_size))
    return done.result, str(done.seen["outcome"])


class Trainer:
    """Trains one run. `keep` checkpoints stay resumable; it remembers all but the oldest of them.

    `direct`: its ranks build their bodies from Redis.
    """

    def __init__(
        self,
        world: World,
        client: Client,
        run: str,
        history: list[Event],
        keep: int,
        direct: DirectRank | None = None,
    ) -> None:
        self._client, self._run, self._history, self._keep = client, run, history, keep
        self._rng, self._world, self._direct = world.rng, world, direct
        self._checkpoints: tuple[int, ...] = (0,)
        self._refused = 0
        self._attachment = Attachment(epoch=0, step=0, generation=0, published_version=0, dp_world_size=1)
        self._trained: list[str] = []
        self._adapters, self._completed = world.mix.all_adapters, dict[str, int]()
        self.steps = 0
        """Acks that were answered."""

    async def work(self, stopping: asyncio.Event) -> None:
        """Train until `stopping` is set; a trainer that is fenced begins anew."""
        self._stopping = stopping
        while not stopping.is_set():
            await self._attach_until_answered()
            if self._attachment.step == 0:  # step 0 is a checkpoint too, and the first to be dropped
                await self._write_until_answered("checkpoint", 0)
            while not stopping.is_set() and await self._train_step():
                if self._rng.random() < self._reattaches:
                    break

    @property
    def _rewinds(self) -> bool:
        """Whether it rewinds most often: as long as there are faults, else the run takes long to come to rest."""
        return self._world.mix.rewinds and self._world.faults.active

    @property
    def _reattaches(self) -> float:
        """Share of steps after which it attaches again."""
        often = MOST_OFTEN if self._world.faults.active else OFTEN
        return often if self._world.mix.rewinds else REATTACHES

    # ------------------------------------------------------------------ life

    async def _attach_until_answered(self) -> None:
        while not self._stopping.is_set() and not await self._attach():  # noqa: ASYNC110 - asks again, waits for nothing
            await asyncio.sleep(0.3)

    async def _attach(self) -> bool:
        # Refused twice: a late attach has voided the checkpoints.
        resumable = self._checkpoints[:-1] if self._rewinds else ()  # those before the newest step
        resume_step = self._rng.choice(resumable or self._checkpoints) if self._refused < 2 else None
        # Before the call: it may take effect without an answer, and drop the later checkpoints.
        self._checkpoints = tuple(step for step in self._checkpoints if resume_step is None or step <= resume_step)
        resampled = self._rng.random() < (MOSTLY if self._world.mix.rewinds else RESAMPLES)
        on_resume: Literal["redeliver", "resample"] = "resample" if resampled else "redeliver"
        request = AttachRequest(
            dp_world_size=self._rng.choice((1, 2, 2, 3)), resume_step=resume_step, on_resume=on_resume
        )
        got, outcome = await attach(self._client, self._run, request, self._history)
        if got is None:
            if outcome == WrongStep.slug:
                self._checkpoints, self._refused = (0,), self._refused + 1
            return False
        self._attachment = got
        if resume_step is None:
            self._checkpoints = (got.step,)
        self._refused = 0
        return True

    # ------------------------------------------------------------------ a step

    async def _train_step(self) -> bool:
        """Train one step; return False if a newer trainer has the run, or at the end."""
        step, self._trained = self._attachment.step, []
        for rank in range(self._attachment.dp_world_size):
            if not await self._fetch(step, rank):
                return False
        if self._rng.random() < 0.3:
            await self._ask(
                step, self._rng.randrange(self._attachment.dp_world_size), self._rng.choice(self._client.servers)
            )
        await asyncio.sleep(self._rng.uniform(0.01, 0.5))  # training
        if self._attachment.look_ahead and self._rng.random() < 0.5:
            await self._ask(step + 1, self._rng.randrange(self._attachment.dp_world_size))
        if not await self._write_until_answered("ack", step):
            return False
        self.steps += 1
        self._attachment = msgspec.structs.replace(self._attachment, step=step + 1)
        if not await self._publish(step):
            return False
        every = 1 if self._world.mix.rewinds else CHECKPOINT_EVERY_STEPS
        if (step + 1) % every == 0 and not await self._checkpoint(step + 1):
            return False
        if self._attachment.epoch > 1 and self._rng.random() < 0.1:
            kind = self._rng.choice(("ack", "publish", "checkpoint"))
            await self._write(kind, self._attachment.epoch - 1, step + 1, next(iter(self._adapters), ""))
        return True

    async def _publish(self, step: int) -> bool:
        """Announce what `step` trained: the next version, or that of each adapter whose own step it completed."""
        if not self._adapters:
            return await self._write_until_answered("publish", step + 1)
        for name, own_step in self._completed.items():
            version = (own_step + 1) // self._adapters[name]["steps_per_publish"]
            if not await self._write_until_answered("publish", version, name):
                return False
        return True

    async def _fetch(self, step: int, rank: int) -> bool:
        """Ask until the batch is there; return False if it never will be, or at the end."""
        while not self._stopping.is_set():
            if self._world.mix.rewinds:
                self._client.ask_any()
            asked = await self._ask(step, rank)
            if asked.body:
                self._trained += [rollout.group_id for rollout in asked.body.rollouts]
                self._completed = asked.body.completed
                return True
            if asked.outcome != OK and asked.outcome not in RETRIED:
                return False
            if asked.waiting is None:
                await asyncio.sleep(0.1)
        return False

    async def _checkpoint(self, step: int) -> bool:
        if not await self._write_until_answered("checkpoint", step):
            return False
        self._checkpoints = tuple(sorted({*self._checkpoints, step})[-(self._keep - 1) :])
        return True

    # ------------------------------------------------------------------ calls

    async def _ask(self, step: int, rank: int, only: Server | None = None) -> BatchAsked:
        layout = self._attachment.epoch, self._attachment.dp_world_size
        return await ask(self._client, self._run, step, layout, rank, self._history, only, self._direct)

    async def _write_until_answered(self, kind: str, value: int, adapter: str = "") -> bool:
        """Repeat a write until the service decides; return whether it accepted."""
        while True:
            outcome = await self._write(kind, self._attachment.epoch, value, adapter)
            if outcome not in RETRIED:
                return outcome == OK
            if self._stopping.is_set():
                return False
            await asyncio.sleep(0.1)

    async def _write(self, kind: str, epoch: int, value: int, adapter: str = "") -> str:
        priorities = {group_id: priority_of(group_id, value) for group_id in self._trained}

        async def work(service: Service, gone: Gone) -> None:
            session = (await service.led(self._run)).trainer_calls
            if kind == "ack":
                await session.ack(value, epoch, {"priorities": priorities})
            elif kind == "publish":
                await session.publish(value, epoch, None, adapter)
            else:
                await session.checkpoint(value, epoch, self._keep)

        done = await self._client.observe(self._run, work)
        self._history.append(TrainerWrote(**done.seen, kind=kind, epoch=epoch, value=value, adapter=adapter))
        return str(done.seen["outcome"])


async def ask(
    client: Client,
    run: str,
    step: int,
    layout: tuple[int, int],
    rank: int,
    history: list[Event],
    only: Server | None = None,
    direct: DirectRank | None = None,
) -> BatchAsked:
    """Ask for a rank's part of a batch, and record it. `layout`: epoch and number of ranks.

    `direct`: builds the body from Redis. What it cannot build comes from the server.
    """
    epoch, ranks = layout

    async def work(service: Service, gone: Gone) -> bytes | WaitingAnswer:
        serving = await service.serving(run)
        outcome = await serving.batches.part(step, epoch, rank, WAIT_S, gone=gone)
        if isinstance(outcome, WaitingAnswer):
            return outcome
        built = direct.build(await outcome.plan()) if direct else None
        return bytes(await outcome.body()) if built is None else built

    done = await client.observe(run, work, WAIT_S, only=only)
    body = read_body(done.result) if isinstance(done.result, bytes) else None
    waiting = msgspec.to_builtins(done.result) if isinstance(done.result, WaitingAnswer) else None
    asked = BatchAsked(**done.seen, epoch=epoch, step=step, rank=rank, world=ranks, body=body, waiting=waiting)
    history.append(asked)
    return asked
