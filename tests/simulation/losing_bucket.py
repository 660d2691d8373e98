"""A run on a cluster, one of whose buckets goes back to before its newest payload: reported, accepted, trained on."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

from replaybuf.errors import DataLost
from replaybuf.service.host import Service
from replaybuf.store import keys
from tests.chaos.content import make_group
from tests.chaos.history import UNAVAILABLE, Faulted, Healed
from tests.simulation.http.client import CALL_TIMEOUT_S
from tests.simulation.loop import Node
from tests.simulation.losing import LOST_RUN, LostRun
from tests.simulation.producer_calls import ServiceCalls
from tests.simulation.producing import Sent, send
from tests.simulation.redis_model.server import RedisServer
from tests.simulation.redis_model.values import Saved
from tests.simulation.servers import Client, Gone
from tests.simulation.small_run import GROUPS, PAUSE_S, PER_BATCH

BESIDE = 2
"""Groups that are sent to the lost bucket before the loss is accepted."""
SUSPENDED = 0.5
"""Share of losses while a server is stopped within an append."""
LOOK_S, LONGEST_PAUSE_S = 0.001, 15.0
WRITTEN_S = 2.0
"""By then a server that goes on has written, or was refused."""
AGAIN = {"", "not-durable", *UNAVAILABLE} - {DataLost.slug}
"""Outcomes after which a call is repeated."""


class LostBucket(LostRun):
    """One run from its creation to its end, with a loss of one payload between."""

    async def work(self) -> None:
        """Do all of it; each call is repeated until it is answered."""
        names = [f"{LOST_RUN}-{number}" for number in range(GROUPS)]
        lost, bucket = names[-1], keys.bucket_of(names[-1])
        self._unanswered = set[str]()  # with a request that nobody answered: it may be stored when the loss is accepted
        await self._do(self._create)
        for name in names[:-1]:
            await self._append(name)
        trained = await self._train(range(1))
        beside = (name for name in map("beside-{}".format, range(100_000)) if keys.bucket_of(name) == bucket)
        again = [next(beside) for _ in range(BESIDE)]
        suspended = self._world.rng.random() < SUSPENDED
        losing = self._lose_meanwhile(bucket, lost, next(beside)) if suspended else self._lose_newest(bucket, lost)
        if not await losing:
            self.stage = "nothing"
            return
        await self._check_lost(again)
        await self._accept(0, self._count_missing(bucket))
        self._history.append(Healed(at_s=self._world.now_s(), process="valkey"))
        self.stage = "its end"
        await self._append("instead")
        rest = await self._train(range(1, GROUPS // PER_BATCH))
        seen = ["instead" if name in self._unanswered else name for name in trained + rest]
        self._compare("all trained groups", sorted({*names, "instead"} - {lost}), sorted(seen))
        facts = await self._do(self._facts)
        self._compare("groups that became unreadable", 1, facts["dead_lettered"])
        self.stage = "nothing"

    async def _lose_newest(self, bucket: int, lost: str) -> bool:
        """Append a group and let its bucket lose it; return whether that happened."""
        older = self._payloads(bucket)
        await self._append(lost)
        self.stage = "its loss"
        if not await self._is_known() or not self._world.faults.take("lost bucket", self._world.now_s()):
            return False
        self._lose_payload(bucket, older)
        return True

    async def _lose_meanwhile(self, bucket: int, lost: str, name: str) -> bool:
        """Do the same while a server is stopped in an append, between reading what is published and its write."""
        server, world = self._world.rng.choice(self._servers), self._world
        if not await self._is_known() or not world.faults.take("lost bucket", world.now_s()):
            return False
        server.stops_at, node, sent_s = LOST_RUN, server.node, world.now_s()
        group = Sent(name, make_group(name, 0, named=True), None)
        calls = ServiceCalls(Client([server], Node("held")), LOST_RUN)
        appending = asyncio.create_task(send(calls, [group], self._unread, frames=True))
        while server.stops_at and not (node.dead or appending.done()):  # noqa: ASYNC110 - the clock is virtual
            await asyncio.sleep(LOOK_S)
        server.stops_at = ""
        older = self._payloads(bucket)
        others = Client([other for other in self._servers if other is not server], Node("loser"))
        await self._append(lost, ServiceCalls(others, LOST_RUN))
        if any(f"}}:{name}:".encode() in key for key in self._payloads(bucket)):
            await appending
            return False  # another fault let the server go on: it wrote before the loss
        self.stage = "its loss"
        self._lose_payload(bucket, older)
        await asyncio.sleep(world.rng.uniform(0.0, LONGEST_PAUSE_S))
        world.loop.go_on(node)
        (outcome,) = await appending
        answered_s = world.now_s()
        await asyncio.sleep(WRITTEN_S)  # its client may have left long ago
        if node.dead:
            return False  # nobody knows whether it wrote
        self._note_answer(name, outcome, answered_s - sent_s)
        if outcome not in AGAIN:
            self._compare(f"the answer to group {name}", DataLost.slug, outcome)
        return True

    def _node(self, bucket: int) -> RedisServer:
        return self._redis.server_of(keys.written(LOST_RUN, bucket))

    def _payloads(self, bucket: int) -> Saved:
        """Return what the run has in a bucket."""
        tag = f"{{{LOST_RUN}/{bucket:02d}}}".encode()
        return {key: held for key, held in self._node(bucket).values.copy().items() if tag in key}

    def _lose_payload(self, bucket: int, older: Saved) -> None:
        """Let the node of a bucket lose its newest payload."""
        at_s, node, own = self._world.now_s(), self._node(bucket), self._payloads(bucket)
        self._history.append(Faulted(at_s=at_s, process="valkey", role="valkey", kind="crash", server="", led=[]))
        node.replace({key: held for key, held in node.values.copy().items() if key not in own} | older)

    async def _check_lost(self, again: list[str]) -> None:
        """Check that each server refuses groups that belong into the lost bucket."""
        calls: list[tuple[str, Callable[[], Awaitable[str]]]] = [("what is shown of the lost payload", self._read)]
        calls += [(f"the answer to group {name}", functools.partial(self._send, name)) for name in again]
        for what, call in calls if self._world.rng.random() < 0.5 else reversed(calls):
            self._compare(what, DataLost.slug, await call())

    def _count_missing(self, bucket: int) -> int:
        """Return how many payloads the bucket lacks, with those of attempts that nobody answered."""
        published = self._control.values.get(keys.buckets(LOST_RUN).encode(), dict) or {}
        written = self._node(bucket).values.get(keys.written(LOST_RUN, bucket).encode(), bytes) or 0
        return int(published.get(b"%d" % bucket, 0)) - int(written)

    async def _send(self, name: str) -> str:
        """Send a group to any server until it is answered."""
        group, outcome = Sent(name, make_group(name, 0, named=True), None), ""
        while outcome in AGAIN:
            sent_s = self._world.now_s()
            (outcome,) = await send(self._calls, [group], self._unread, frames=True)
            self._note_answer(name, outcome, self._world.now_s() - sent_s)
            await asyncio.sleep(PAUSE_S)
        return outcome

    def _note_answer(self, name: str, outcome: str, took_s: float) -> None:
        if outcome in AGAIN or took_s > CALL_TIMEOUT_S:  # its client has sent it again
            self._unanswered.add(name)

    async def _read(self) -> str:
        """Read all live groups at the leader until it answers."""

        async def work(service: Service, gone: Gone) -> None:
            await self._facts(service, gone)

        outcome = ""
        while outcome in AGAIN:
            outcome = str((await self._client.observe(LOST_RUN, work)).seen["outcome"])
            await asyncio.sleep(PAUSE_S)
        return outcome
