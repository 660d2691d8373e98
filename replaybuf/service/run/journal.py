"""The state of one run together with its ledger: what is decided is written down before it counts.

- A journal leads or follows. A follower folds what the leader writes (`catch_up`) and decides nothing; with a fencing
  token of its own (`taking_over`) it goes on from there. The fold is the same on start, on following and on takeover.
- A decision holds the lock of `decision()`, judges the state, appends ledger records with `append`. If the outcome of
  an append is not known (connection lost), the next decision first reads the ledger's end: what was written counts,
  what was not did not happen.
- Whoever waits (a trainer for a batch, a producer for a ticket) waits in `until` on one condition for all; `close`
  wakes every waiter, who then answers with what it waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Literal, TypeVar

import msgspec

from replaybuf.errors import (
    Conflict,
    DataLost,
    LedgerGap,
    NotFound,
    NotLeader,
    ReplaybufError,
    ServiceUnavailable,
    StrategyFault,
)
from replaybuf.kernel.index import Numbers
from replaybuf.kernel.snapshot import Snapshot
from replaybuf.kernel.state import RunState
from replaybuf.service.run.rebuild import load_state
from replaybuf.service.traffic import waiting
from replaybuf.store import Ends, IndexChunk, Store
from replaybuf.store.faults import data_lost
from replaybuf.wire.config import RunConfig
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.ledger import AnyRecord, BatchRecord, ConfigRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_WAIT_S = 60.0


class Journal:
    """State, ledger and waiters of run `name`.

    Roles: following -> `taking_over` -> `leading` -> `follow`, or an append that a newer leader refuses -> following.
    `token` is the fencing token of a leader; `leader_url` is where the leader answers, as far as it is known. `terms`
    counts how often this server set out to lead.
    `lost` is set while Redis holds less than what was acknowledged. `unsettled` are groups that are folded and not yet
    settled: the journal adds them, `Arrivals` removes them.
    `changes` counts what waiters were told of.
    """

    def __init__(self, name: str, store: Store, clock: Callable[[], float]) -> None:
        self.name = name
        self.state = RunState()
        self.store = store
        self.clock = clock
        self.token: str | None = None
        self.leading = False
        self.leader_url: str | None = None
        self.terms = 0
        self.lost: DataLost | None = None
        self.unsettled: deque[IndexChunk] = deque()
        self.closed = False
        self._deciding = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._changed = asyncio.Condition()
        self.changes = 0
        self._unsure = False
        self._to_free: deque[tuple[int, Numbers]] = deque()
        self.snapshot: Snapshot | None = None

    @property
    def config(self) -> RunConfig:
        """Configuration in force."""
        if self.state.config is None:
            raise NotFound(f"run {self.name} has no configuration yet", name="run", value=self.name)
        return self.state.config

    # ------------------------------------------------------------------ roles

    def check_leading(self) -> str:
        """Let only the leader pass; return its fencing token. Raises `NotLeader`, naming the leader, where it follows.

        What awaits between this and a write needs the token from here: the lease may be lost meanwhile.
        """
        if not self.leading or self.token is None:
            where = self.leader_url or "another server, not known yet"
            raise NotLeader(
                f"run {self.name} is led by {where}; ask there, or again when its lease has ended",
                name="leader",
                value=self.leader_url,
            )
        return self.token

    @contextlib.asynccontextmanager
    async def taking_over(self, token: str) -> AsyncIterator[None]:
        """Lead from the end of the body on; the body may append, nobody else decides meanwhile.

        The token fences every older leader, so what is read first is all there is.
        """
        async with self._deciding:
            self.terms += 1
            self.token = token
            try:
                await self.catch_up()
                self._unsure = False
                yield
                self.leading = True
            finally:
                if not self.leading:
                    self.token = None

    def follow(self, leader_url: str | None) -> None:
        """Decide no more."""
        self.token, self.leading, self.leader_url = None, False, leader_url

    def lose(self, error: DataLost) -> None:
        """Take note that Redis lost data, until `check_kept` finds all of it again."""
        if self.lost is None:
            logger.critical("%s", error.detail)
        self.lost = error

    @contextlib.contextmanager
    def recording_loss(self) -> Iterator[None]:
        """Take note of a `DataLost` that the body raises, so that whoever asks next is told at once."""
        try:
            yield
        except DataLost as error:
            self.lose(error)
            raise

    async def check_kept(self) -> None:
        """Ask Redis where the streams end, and raise what `check_ends` raises."""
        known = self.ends  # first: what is acknowledged while we ask may not be in the answer
        self.check_ends(known, await self.store.streams.read_end(self.name))

    def check_ends(self, known: Ends, ends: Ends) -> None:
        """Raise `DataLost` where Redis `ends` before what was `known` of it; take that back once it is whole again.

        Where its last second is not asked for (durability relaxed), raise `LedgerGap` to go on from what it has.
        """
        if ends.entry < known.entry or ends.group < known.group:
            if ends.entry and self.store.connection.policy.level == "relaxed":
                raise LedgerGap(
                    f"run {self.name}: Redis lost ledger entries {ends.entry + 1} to {known.entry} and groups "
                    f"{ends.group + 1} to {known.group}; durability is relaxed",
                    name="redis",
                )
            seen = f"the ledger ends at entry {ends.entry} and the index at group {ends.group}"
            error = data_lost(self.name, f"{seen}; known are {known.entry} and {known.group}")
            self.lose(error)
            raise error
        self.lost = None

    @property
    def ends(self) -> Ends:
        """How far both streams are folded."""
        return Ends(self.state.entries, self.state.stored)

    # ------------------------------------------------------------------ streams

    async def load(self) -> None:
        """Fold snapshot and both streams from where it stands."""
        async with self._reading:
            ends = await self.store.streams.read_confirmed_end(self.name)
            self.snapshot = await load_state(self.store, self.name, self.state, ends.group if ends else None)
        await self.catch_up()

    async def pull(self, through: int | None = None) -> None:
        """Take in what is new in the index stream, whoever wrote it; `through` is the last group that is confirmed."""
        async with self._reading:
            if through is None:
                ends = await self.store.streams.read_confirmed_end(self.name)
                through = ends.group if ends else None
            await self._read_arrivals(through)

    async def catch_up(self) -> None:
        """Take in what is new in both streams: what is confirmed, as it is not to be lost again once it is acted on."""
        async with self._reading:
            ends = await self.store.streams.read_confirmed_end(self.name)
            through, count = (ends.group, max(0, ends.entry - self.state.entries)) if ends else (None, None)
            async for chunk in self.store.ledger.read(self.name, self.state.entries, count):
                # A record names groups that were stored before it: their entries are read after it and folded first.
                await self._read_arrivals(through)
                for entry, record in chunk:
                    self._apply(entry, record)
            await self._read_arrivals(through)

    async def _read_arrivals(self, through: int | None) -> None:
        async for chunk in self.store.groups.read_index(self.name, self.state.stored, through):
            self.state.store(chunk.numbers, chunk.values, chunk.malformed)
            self.unsettled.append(chunk)

    # ------------------------------------------------------------------ ledger

    @contextlib.asynccontextmanager
    async def decision(self) -> AsyncIterator[None]:
        """Decide alone, with the ledger's end known. Raises `NotLeader` where this server follows.

        A strategy that breaks its contract pauses the run.
        """
        async with self._deciding:
            self.check_leading()
            if self._unsure:
                await self.catch_up()
                self._unsure = False
            try:
                yield
            except StrategyFault as fault:
                await self.pause(fault)
                raise

    async def pause(self, fault: StrategyFault) -> None:
        """Pause a running run with what its plug-in did. Called within a decision."""
        if self.state.config_state == "running":
            logger.error("run paused run=%s reason=%s", self.name, fault.detail)
            await self.set_state("paused", fault.detail)

    async def append(self, record: AnyRecord) -> None:
        """Write one record, then apply it. Called within a decision."""
        entry = self.state.entries + 1
        try:
            with self.recording_loss():
                await self.store.ledger.append(self.name, self.token or "", entry, record)
        except NotLeader:
            self.follow(None)
            raise
        except (ServiceUnavailable, Conflict, asyncio.CancelledError):
            self._unsure = True  # it may have been written, or somebody else's record was
            raise
        self._apply(entry, record)

    async def set_state(self, state: Literal["running", "paused", "finished"], reason: str | None) -> None:
        """Record that the run is running, paused or finished from here on, and why."""
        config = msgspec.to_builtins(self.config)
        await self.append(
            ConfigRecord(config=config, max_uses=self.state.max_uses, state=state, reason=reason, at_s=self.clock())
        )

    async def records(self, after: int, limit: int) -> AsyncIterator[tuple[int, AnyRecord]]:
        """Read ledger records behind entry `after`."""
        async for chunk in self.store.ledger.read(self.name, after, limit):
            for entry in chunk:
                yield entry

    async def batch_record(self, entry: int) -> BatchRecord:
        """Read the batch record at ledger entry `entry`."""
        async for _, record in self.records(entry - 1, 1):
            if isinstance(record, BatchRecord):
                return record
        raise ReplaybufError(f"ledger entry {entry} of run {self.name} is not a batch", name="entry", value=entry)

    @property
    def owes_payloads(self) -> bool:
        """Say whether groups were freed whose payloads are not deleted yet."""
        return bool(self._to_free)

    async def free_payloads(self) -> None:
        """Delete the payloads that checkpoints and purges let go."""
        through = 0
        while self._to_free:
            through, numbers = self._to_free[0]
            entries = await self.store.groups.read_entries(self.name, numbers.tolist())
            await self.store.groups.delete_payloads([entry.strings.payload_key for entry in entries])
            self._to_free.popleft()
        if through:
            await self.store.counters.set(self.name, "freed_through", through)

    def mark_freed(self, through: int) -> None:
        """Take note that payloads let go up to ledger entry `through` are deleted."""
        while self._to_free and self._to_free[0][0] <= through:
            self._to_free.popleft()

    def _apply(self, entry: int, record: AnyRecord) -> None:
        numbers = self.state.apply(entry, record)
        if len(numbers):
            self._to_free.append((entry, numbers))

    # ------------------------------------------------------------------ waiting

    async def until(self, attempt: Callable[[], Awaitable[T | WaitingAnswer]], wait_s: float) -> T | WaitingAnswer:
        """Repeat `attempt` on every change until it gives something else than a waiting answer, or time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(max(wait_s, 0.0), LONGEST_WAIT_S)
        while True:
            seen = self.changes
            outcome = await attempt()
            left = deadline - loop.time()
            if not isinstance(outcome, WaitingAnswer) or left <= 0 or self.closed:
                return outcome
            with waiting(), contextlib.suppress(TimeoutError):  # the wait is over: look once more, then answer
                async with asyncio.timeout(left), self._changed:
                    while self.changes == seen:
                        await self._changed.wait()

    async def notify(self) -> None:
        """Tell every waiter that something changed."""
        async with self._changed:
            self.changes += 1
            self._changed.notify_all()

    async def close(self) -> None:
        """Wake every waiter for good."""
        self.closed = True
        await self.notify()
