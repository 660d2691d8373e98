"""The state of one run together with its ledger: what is decided is written down before it counts.

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
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal, TypeVar

import msgspec

from replaybuf.config import RunConfig
from replaybuf.errors import Conflict, NotFound, ReplaybufError, ServiceUnavailable, StrategyFault
from replaybuf.index import Numbers
from replaybuf.ledger import AnyRecord, BatchRecord, ConfigRecord
from replaybuf.service.answers import WaitingAnswer
from replaybuf.service.rebuild import load_state
from replaybuf.snapshot import Snapshot
from replaybuf.state import RunState
from replaybuf.store import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_WAIT_S = 60.0


class Journal:
    """State, ledger and waiters of run `name`; `token` is the fencing token of this leader."""

    def __init__(self, name: str, store: Store, token: str, clock: Callable[[], float]) -> None:
        self.name = name
        self.state = RunState()
        self.store = store
        self.token = token
        self.clock = clock
        self.closed = False
        self._deciding = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._changes = 0
        self._unsure = False
        self._to_free: list[Numbers] = []
        self._freed_through = 0
        self.snapshot: Snapshot | None = None

    @property
    def config(self) -> RunConfig:
        """Configuration in force."""
        if self.state.config is None:
            raise NotFound(f"run {self.name} has no configuration yet", name="run", value=self.name)
        return self.state.config

    # ------------------------------------------------------------------ ledger

    async def load(self, freed_through: int) -> None:
        """Fold snapshot and both streams; payloads freed up to ledger entry `freed_through` are gone already."""
        self._freed_through = freed_through
        self.snapshot = await load_state(self.store, self.name, self.state)
        await self._catch_up()

    @contextlib.asynccontextmanager
    async def decision(self) -> AsyncIterator[None]:
        """Decide alone, with the ledger's end known. A strategy that breaks its contract pauses the run."""
        async with self._deciding:
            if self._unsure:
                await self._catch_up()
            try:
                yield
            except StrategyFault as fault:
                if self.state.config_state == "running":
                    logger.error("run paused run=%s reason=%s", self.name, fault.detail)
                    await self.set_state("paused", fault.detail)
                raise

    async def append(self, record: AnyRecord) -> None:
        """Write one record, then apply it. Called within a decision."""
        entry = self.state.entries + 1
        try:
            await self.store.append_record(self.name, self.token, entry, record)
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
        async for chunk in self.store.read_ledger(self.name, after, limit):
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
        if not self._to_free:
            return
        through = self.state.entries
        while self._to_free:
            entries = await self.store.entries(self.name, self._to_free[0].tolist())
            await self.store.unlink([entry.strings.payload_key for entry in entries])
            self._to_free.pop(0)
        await self.store.set_count(self.name, "freed_through", through)

    async def _catch_up(self) -> None:
        async for chunk in self.store.read_ledger(self.name, self.state.entries):
            for entry, record in chunk:
                self._apply(entry, record)
        self._unsure = False

    def _apply(self, entry: int, record: AnyRecord) -> None:
        freed = self.state.apply(entry, record)
        if len(freed) and entry > self._freed_through:
            self._to_free.append(freed)

    # ------------------------------------------------------------------ waiting

    async def until(self, attempt: Callable[[], Awaitable[T | WaitingAnswer]], wait_s: float) -> T | WaitingAnswer:
        """Repeat `attempt` on every change until it gives something else than a waiting answer, or time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(max(wait_s, 0.0), LONGEST_WAIT_S)
        while True:
            seen = self._changes
            outcome = await attempt()
            left = deadline - loop.time()
            if not isinstance(outcome, WaitingAnswer) or left <= 0 or self.closed:
                return outcome
            with contextlib.suppress(TimeoutError):  # the wait is over: look once more, then answer
                async with asyncio.timeout(left), self._changed:
                    while self._changes == seen:
                        await self._changed.wait()

    async def notify(self) -> None:
        """Tell every waiter that something changed."""
        async with self._changed:
            self._changes += 1
            self._changed.notify_all()

    async def close(self) -> None:
        """Wake every waiter for good."""
        self.closed = True
        await self.notify()
