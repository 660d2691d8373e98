"""A run whose newest groups and entries Redis loses for good: the loss is reported, accepted, and the run trains on."""

from __future__ import annotations

import asyncio

import msgspec

from replaybuf.errors import Conflict, Fenced
from replaybuf.service.host import Service
from replaybuf.service.lost_data import accept_loss
from replaybuf.store import keys
from replaybuf.wire.answer.run_status import AcceptedLoss, LossRequest
from replaybuf.wire.ledger import LossRecord
from tests.chaos.content import make_group
from tests.chaos.history import OK, UNAVAILABLE, Event, Faulted, Healed
from tests.simulation.failing_over import ends_of, find_silent, parts_of
from tests.simulation.producing import Sent, send
from tests.simulation.redis_model.redis import Redis
from tests.simulation.redis_model.server import RedisServer
from tests.simulation.redis_model.values import Saved
from tests.simulation.servers import Client, Gone, Server
from tests.simulation.small_run import GROUPS, PAUSE_S, PER_BATCH, SmallRun
from tests.simulation.world import World

LOST_RUN = "losing"
LOST = 2
"""Groups that are lost; with them an entry at times, that of a batch."""
LATEST_S = 1.0
KNOWN_S = 20.0
"""Within this time all servers must know all that Redis holds: what nobody knows is not reported as lost."""


class LostRun(SmallRun):
    """One run from its creation to its end, with a loss between. `wrong`: what the loss changed beyond what is lost."""

    def __init__(self, world: World, client: Client, redis: Redis, servers: list[Server], history: list[Event]) -> None:
        super().__init__(world, client, redis, LOST_RUN)
        self._servers, self._history = servers, history

    async def work(self) -> None:
        """Do all of it; each call is repeated until it is answered."""
        names, rng = [f"{LOST_RUN}-{number}" for number in range(GROUPS)], self._world.rng
        kept, lost = names[:-LOST], names[-LOST:]
        await self._do(self._create)
        for name in kept:
            await self._append(name)
        trained = await self._train(range(1))
        await asyncio.sleep(rng.uniform(0.0, LATEST_S))
        facts, older, left = await self._do(self._facts), self._own(), ends_of(self._control, LOST_RUN)
        for name in lost:
            await self._append(name)
        if rng.random() < 0.5:
            await self._train(range(1, 2))
        self.stage = "its loss"
        if not await self._is_known() or not self._world.faults.take("loss", self._world.now_s()):
            self.stage = "nothing"
            return
        await self._lose(older, left)
        self._compare("what is left after the loss", facts, await self._do(self._facts))
        await self._check_fenced(self.epochs[-1])
        self.stage = "its end"
        for name in kept:
            await self._check_stored(name)
        for name in lost:
            await self._append(name)
        rest = await self._train(range(1, GROUPS // PER_BATCH))
        self._compare("all trained groups", names, sorted(trained + rest))
        self._compare("the epochs, which grow", sorted(set(self.epochs)), self.epochs)
        self.stage = "nothing"

    # ------------------------------------------------------------------ the loss

    @property
    def _control(self) -> RedisServer:
        return self._redis.server_of(keys.counts(LOST_RUN))

    def _own(self) -> Saved:
        """Return what Redis holds of this run alone."""
        tags = f"{{{LOST_RUN}}}".encode(), f"{{{LOST_RUN}:".encode()
        return {key: held for key, held in self._control.values.copy().items() if any(tag in key for tag in tags)}

    async def _is_known(self) -> bool:
        """Wait until Redis is well, and all servers run and know all that it holds of the run."""
        ends_s = self._world.now_s() + KNOWN_S
        while self._world.now_s() < ends_s:
            states = [
                server.service.runs[LOST_RUN].state
                for server in self._servers
                if server.service and LOST_RUN in server.service.runs and not server.node.stopped
            ]
            ends = {(state.entries, state.stored) for state in states}
            if (
                self._control.healthy
                and len(states) == len(self._servers)
                and ends == {ends_of(self._control, LOST_RUN)}
            ):
                return True
            await asyncio.sleep(0.02)
        return False

    async def _lose(self, older: Saved, left: tuple[int, int]) -> None:
        """Let Redis lose the newest part of the run, and accept it, if just that is reported."""
        known, own = ends_of(self._control, LOST_RUN), self._own()
        missing = known[0] - left[0], known[1] - left[1]
        at_s = self._world.now_s()
        self._history.append(Faulted(at_s=at_s, process="valkey", role="valkey", kind="crash", server="", led=[]))
        rest = {key: held for key, held in self._control.values.copy().items() if key not in own}
        self._control.replace(rest | older)
        before = parts_of(self._control, LOST_RUN)
        silent = await find_silent(self._world, self._servers, self._control, LOST_RUN)
        self._compare("the servers that do not report the loss", [], [server.name for server in silent])
        wrong = await self._client.observe(LOST_RUN, _acceptance(missing[0] + 1, missing[1]))
        self._compare("an acceptance of more than is lost", False, wrong.seen["outcome"] == OK)
        self._compare("what Redis holds before the loss is accepted", before, parts_of(self._control, LOST_RUN))
        await self._accept(*missing)
        self._history.append(Healed(at_s=self._world.now_s(), process="valkey"))
        records = await self._do(lambda service, gone: _records(service, left[0]))
        said = [(record.entries, record.groups) for record in records if isinstance(record, LossRecord)]
        self._compare("the record of the loss", [missing], said)

    async def _accept(self, entries: int, groups: int) -> None:
        """Accept the loss; an attempt without an answer may have done it."""
        unanswered = False
        while True:
            server = self._world.rng.choice(self._servers)
            done = await self._client.observe(LOST_RUN, _acceptance(entries, groups), only=server)
            outcome = done.seen["outcome"]
            if outcome == OK or (outcome == Conflict.slug and unanswered):
                return
            if outcome not in (*UNAVAILABLE, "not-durable"):
                self.wrong.append(f"run {LOST_RUN}, its loss of {(entries, groups)}: {done.seen}")
                return
            unanswered = True
            await asyncio.sleep(PAUSE_S)

    # ------------------------------------------------------------------ afterwards

    async def _check_fenced(self, epoch: int) -> None:
        """Check that the trainer of before may not write any more."""

        async def work(service: Service, gone: Gone) -> None:
            await (await service.led(LOST_RUN)).trainer_calls.checkpoint(1, epoch, 1)

        outcome = None
        while outcome is None or outcome in (*UNAVAILABLE, "not-durable"):
            outcome = (await self._client.observe(LOST_RUN, work)).seen["outcome"]
            await asyncio.sleep(PAUSE_S)
        self._compare("a write of the epoch before", Fenced.slug, outcome)

    async def _check_stored(self, name: str) -> None:
        """Send a group again that is not lost."""
        group, outcome = Sent(name, make_group(name, 0, named=True), None), ""
        while outcome in ("", *UNAVAILABLE, "not-durable"):
            (outcome,) = await send(self._calls, [group], self._unread, frames=True)
            await asyncio.sleep(PAUSE_S)
        self._compare(f"the answer to group {name}", "duplicate", outcome)


def _acceptance(entries: int, groups: int):  # type: ignore[no-untyped-def]
    async def work(service: Service, gone: Gone) -> AcceptedLoss:
        return await accept_loss(service, LOST_RUN, LossRequest(entries=entries, groups=groups), by="operator")

    return work


async def _records(service: Service, after: int) -> list[msgspec.Struct]:
    run = await service.led(LOST_RUN)
    return [record async for _, record in run.journal.records(after, 1)]
