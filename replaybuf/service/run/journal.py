"""State of one run together with its ledger: a decision is written to the ledger before it is applied.

- A journal leads or follows. A follower folds what the leader writes (`catch_up`) and decides nothing. With a fencing
  token of its own (`taking_over`) it continues from there.
- A decision holds the lock of `decision()`, reads the state and appends ledger records. If the outcome of an append is
  unknown (connection lost), the next decision first reads the ledger's end: what was written counts, the rest did not
  happen.
- After each change `notify` calls the listeners: the long polls of trainers and producers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

from replaybuf.errors import (
    DataLost,
    Fenced,
    NotFound,
    NotLeader,
    ReplaybufError,
    ServiceUnavailable,
    StrategyFault,
)
from replaybuf.kernel.decide.config import decide_phase
from replaybuf.kernel.rows.index import Numbers
from replaybuf.kernel.state.run_state import RunPhase, RunState
from replaybuf.kernel.state.snapshot import Snapshot, decode_snapshot, restore
from replaybuf.service.clock import SYSTEM_CLOCK, Clock
from replaybuf.service.presence import Presence
from replaybuf.store import AppendResult, Ends, IndexChunk, IndexEntry, Store
from replaybuf.store.entries import NewEntry, build_chunk
from replaybuf.store.ledger import LedgerEntry, NewColumn
from replaybuf.store.redis.faults import replaced
from replaybuf.wire.answer.explain import Candidates
from replaybuf.wire.config import RunConfig
from replaybuf.wire.decoding import collector_paused
from replaybuf.wire.ledger import AnyRecord, BatchRecord, ColumnsRecord, newest_group

logger = logging.getLogger(__name__)


class RefusalRecorder(contextlib.AbstractContextManager["RefusalRecorder"]):
    """Tells the journal what Redis refused its body for. Not a generator: each append enters it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if isinstance(error, DataLost):
            self._journal.lose(error)
        elif isinstance(error, NotLeader) and self._journal.token and error.bound not in (None, self._journal.token):
            self._journal.become_follower(None)  # else Redis was not asked, or knows our token and refused an older one


class Journal:
    """State, ledger and listeners of run `name`.

    Roles: following -> `taking_over` -> leading -> `follow`, or an append that a newer leader fences -> following.

    - `token`: fencing token of a leader; "" once the lead is lost: Redis then fences later writes of a decision
    - `leader_url`: where the leader answers, if known
    - `terms`: how often this server started to lead
    - `lost`: set while Redis holds less than it acknowledged
    - `unsettled`: groups that are folded and not settled; the journal adds them, `Arrivals` removes them
    - `changes`: how often listeners were notified
    - `listeners`: called after each change; they must be quick, and may start tasks
    - `presence`: when the clients of the run last called
    """

    def __init__(self, name: str, store: Store, clock: Clock = SYSTEM_CLOCK) -> None:
        self.name = name
        self.state = RunState()
        self.store = store
        self.clock = clock
        self.presence = Presence(clock.monotonic)
        self.token = ""
        self.leading = False
        self.leader_url: str | None = None
        self.terms = 0
        self.lost: DataLost | None = None
        self.unsettled: deque[IndexChunk] = deque()
        self.closed = False
        self.changes = 0
        self.listeners: list[Callable[[], None]] = []
        self.snapshot: Snapshot | None = None
        self._refusal_recorder = RefusalRecorder(self)
        self._deciding = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._uncertain = False
        self._entry_key = ""
        self._group_key = ""
        self._incarnation = 0
        self._to_free: deque[tuple[int, Numbers]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def config(self) -> RunConfig:
        """Configuration in force."""
        if self.state.config is None:
            raise NotFound(f"run {self.name} has no configuration yet", name="run", value=self.name)
        return self.state.config

    # ------------------------------------------------------------------ roles

    def check_leading(self) -> str:
        """Return the leader's fencing token. Raises `NotLeader`, naming the leader, on a follower.

        Code that awaits between this and a write must write with this token: the lease may be lost meanwhile.
        """
        if not self.leading:
            where = self.leader_url or "another server, not known yet"
            detail = f"run {self.name} is led by {where}; send the request there, or again after its lease has ended"
            raise NotLeader(detail, name="leader", value=self.leader_url)
        return self.token

    def check_epoch(self, epoch: int) -> None:
        """Raise `Fenced` unless `epoch` is that of the attached trainer; `NotLeader` if only the leader can know."""
        if epoch > self.state.epoch:
            self.check_leading()
        if epoch != self.state.epoch or epoch < 1:
            detail = f"epoch is {epoch}; the run is attached with epoch {self.state.epoch}"
            raise Fenced(detail, name="epoch", value=epoch, bound=self.state.epoch)
        self.presence.record_trainer()

    @contextlib.asynccontextmanager
    async def taking_over(self, token: str, ends: tuple[int, int] | None = None) -> AsyncIterator[None]:
        """Lead from the end of the body on; only it decides meanwhile. Raises `NotLeader` if the lead is lost in it.

        The token fences every older leader, so all is read first; `ends`: newest entry and group then, if known.
        """
        async with self._deciding:
            if not self.state.entries:  # a new run, under the name of one that may have been deleted
                self._note_incarnation()
            self.terms += 1
            self.token = token
            try:
                async with self._reading:  # else a read that has begun would apply our first records too
                    caught_up = ends == (self.state.entries, self.state.stored)
                if not caught_up:
                    await self.catch_up()
                self._uncertain = False
                yield
                self.leading = self.token == token
                self.check_leading()
            finally:
                if not self.leading:
                    self.token = ""

    def become_follower(self, leader_url: str | None) -> None:
        """Stop deciding, and cancel what was started as the leader."""
        self.token, self.leading, self.leader_url = "", False, leader_url
        for task in self._tasks:
            task.cancel()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start background work of the leader. It is cancelled when the lead is lost, so it must catch its errors."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def lose(self, error: DataLost) -> None:
        """Record that Redis lost data, until `check_ends` finds all of it again."""
        if self.lost is None:
            logger.critical("%s", error.detail)
        self.lost = error

    def recording_refusals(self) -> RefusalRecorder:
        """Record a `DataLost` that the body raises, so that the next request reports it; follow after a `NotLeader`."""
        return self._refusal_recorder

    async def prove_lead(self) -> None:
        """Ask Redis whether our token is the newest, before an answer that is not written. Raises `NotLeader`."""
        token = self.check_leading()
        with self.recording_refusals():
            await self.store.counters.add(self.name, {}, token)

    def check_ends(self, shown: Ends | ReplaybufError) -> None:
        """Raise what a check of the ends returned; clear the last loss if there is none."""
        if isinstance(shown, ReplaybufError):
            raise shown
        self.lost = None
        if not self._entry_key and shown.entry == self.state.entries:  # the snapshot of a run does not hold the key
            self._entry_key = shown.entry_key
            self._record_ends()

    @property
    def ends(self) -> Ends:
        """How far both streams are folded."""
        return Ends(self.state.entries, self.state.stored, self._group_key, self._incarnation, self._entry_key)

    def _note_incarnation(self) -> None:
        """Note which run of this name the state begins with. `known` may be of a later one while this state ends."""
        self._incarnation = self.store.connection.known.of(self.name).incarnation

    def _record_ends(self) -> None:
        """Let the store compare later Redis servers with what is folded now."""
        self.store.connection.known.advance(self.name, self.ends)

    # ------------------------------------------------------------------ streams

    async def load(self) -> None:
        """Rebuild the state from the snapshot and both streams. Raises `LedgerGap` if the run is replaced meanwhile."""
        async with self._reading:
            ends = await self.store.streams.read_confirmed_end(self.name)
            self._note_incarnation()  # after a read, which learns of a run that was restored since the caller looked
            await self._load_snapshot(None if ends is None else ends.group)
        await self.catch_up()
        newest = self.store.connection.known.of(self.name).incarnation
        if newest != self._incarnation:  # the ends of an older run count for nothing: no loss would be noticed
            raise replaced(self.name, self._incarnation, newest)

    async def _load_snapshot(self, through: int | None) -> None:
        """Bring an empty state to the snapshot's ledger entry; `through` is the last confirmed group."""
        store, run, state = self.store, self.name, self.state
        raw = await store.snapshots.read(run)
        snapshot = self.snapshot = None if raw is None else decode_snapshot(raw)
        state.start_after(snapshot.trimmed if snapshot else 0)
        state.index.reserve((await store.counters.read(run)).get("stored", 0) - state.trimmed)
        if through is not None and snapshot:
            through = max(through, snapshot.stored)  # groups in a snapshot were confirmed before it
        with collector_paused():
            if snapshot:
                async for chunk in store.snapshots.read_old_entries(run):
                    state.store(chunk.numbers, chunk.values, chunk.malformed)
            async for chunk in store.groups.read_index(run, state.trimmed, through):
                self._fold(chunk)
        if snapshot:
            restore(state, snapshot)
        self._record_ends()

    async def pull(self, through: int | None = None) -> None:
        """Read new groups from the index stream; `through` is the last confirmed group."""
        async with self._reading:
            if through is None:
                ends = await self.store.streams.read_confirmed_end(self.name)
                through = None if ends is None else ends.group
            await self._read_groups(through)

    async def catch_up(self) -> None:
        """Read what is new and confirmed in both streams: unconfirmed entries may still be lost."""
        async with self._reading:
            ends = await self.store.streams.read_confirmed_end(self.name)
            through, count = (None, None) if ends is None else (ends.group, max(0, ends.entry - self.state.entries))
            async for chunk in self.store.ledger.read(self.name, self.state.entries, count):
                # A record names groups that were stored before it: read them first.
                await self._read_groups(through)
                for entry in chunk:
                    self._apply(*entry)
            await self._read_groups(through)

    async def fold_published(self, published: Sequence[AppendResult]) -> None:
        """Fold groups that an append published; read those that others published before them."""
        before, arrived = 0, list[tuple[int, NewEntry]]()
        for result in published:
            if result.entry is None:
                before = max(before, result.number)
            else:
                arrived.append((result.number, result.entry))
        if arrived:
            before = max(before, arrived[0][0] - 1)
        if before > self.state.stored or self._reading.locked():  # else no await lies between here and the fold
            async with self._reading:
                if before > self.state.stored:
                    await self._read_groups(before)
        if arrived and arrived[0][0] <= self.state.stored:
            arrived = [pair for pair in arrived if pair[0] > self.state.stored]
        if arrived:  # the store knows these ends: it wrote them before it returned
            self._store(build_chunk(*zip(*arrived, strict=True)))

    async def _read_groups(self, through: int | None) -> None:
        async for chunk in self.store.groups.read_index(self.name, self.state.stored, through):
            self._store(chunk)
        self._record_ends()

    def _store(self, chunk: IndexChunk) -> None:
        self._fold(chunk)
        self.unsettled.append(chunk)

    def _fold(self, chunk: IndexChunk) -> None:
        self.state.store(chunk.numbers, chunk.values, chunk.malformed)
        self._group_key = chunk.strings[-1].payload_key

    # ------------------------------------------------------------------ ledger

    @contextlib.asynccontextmanager
    async def decision(self) -> AsyncIterator[None]:
        """Decide alone, with the whole ledger folded. Raises `NotLeader` on a follower.

        A `StrategyFault` in the body pauses the run.
        """
        async with self._deciding:
            self.check_leading()
            if self._uncertain:
                await self.catch_up()
                self._uncertain = False
            try:
                yield
            except StrategyFault as fault:
                await self.pause(fault)
                raise

    async def pause(self, fault: StrategyFault) -> None:
        """Pause a running run because a plug-in failed. Called within a decision."""
        if self.state.config_phase == "running":
            logger.error("run paused run=%s reason=%s", self.name, fault.detail)
            await self.set_phase("paused", fault.detail)

    async def append(self, record: AnyRecord, candidates: Candidates | None = None) -> None:
        """Write one record, and what a batch was chosen from, then apply the record. Called within a decision."""
        await self._write(lambda entry: self.store.ledger.append(self.name, self.token, entry, record, candidates))

    async def append_columns(self, record: ColumnsRecord, frames: Sequence[NewColumn]) -> None:
        """Write a record with the late columns that it names, then apply it. Called within a decision."""
        ledger = self.store.ledger
        await self._write(lambda entry: ledger.append_columns(self.name, self.token, entry, record, frames))

    async def _write(self, write: Callable[[int], Awaitable[LedgerEntry]]) -> None:
        """Apply the entry that `write` has written under this number."""
        try:
            with self.recording_refusals():
                entry = await write(self.state.entries + 1)
                if newest_group(entry.record) > self.state.stored:  # a rewind, and others store groups
                    async with self._reading:
                        await self._read_groups(newest_group(entry.record))
        except (ServiceUnavailable, asyncio.CancelledError):
            self._uncertain = True  # this record may be written, or one before it
            raise
        self._apply(*entry)

    async def set_phase(self, phase: RunPhase, reason: str | None) -> None:
        """Record that the run is running, paused or finished. Called within a decision."""
        await self.append(decide_phase(self.state, phase, reason, self.clock.wall()))

    async def records(self, after: int, limit: int) -> AsyncIterator[tuple[int, AnyRecord]]:
        """Read up to `limit` ledger records behind entry `after`, of those that can be lost no more."""
        if not self.store.connection.reads_are_durable:
            limit = min(limit, self.state.entries - after)  # Redis may hold further ones that are not confirmed
        async for chunk in self.store.ledger.read(self.name, after, limit):
            for entry in chunk:
                yield entry.number, entry.record

    async def batch_record(self, entry: int) -> BatchRecord:
        """Read the batch record at ledger entry `entry`."""
        async for _, record in self.records(entry - 1, 1):
            if isinstance(record, BatchRecord):
                await asyncio.sleep(0)  # decoding 100,000 groups takes 40 ms
                return record
        with self.recording_refusals():  # an older Redis lacks the entry
            await self.store.streams.read_end(self.name)
        raise ReplaybufError(f"ledger entry {entry} of run {self.name} is not a batch", name="entry", value=entry)

    def _apply(self, entry: int, record: AnyRecord, key: str) -> None:
        numbers = self.state.apply(entry, record)
        self._entry_key = key
        self._record_ends()
        if len(numbers):
            self._to_free.append((entry, numbers))

    # ------------------------------------------------------------------ freed payloads

    @property
    def owes_payloads(self) -> bool:
        """Return whether payloads of freed groups are still to be deleted."""
        return bool(self._to_free)

    async def free_payloads(self, forget_spilled: Callable[[Sequence[IndexEntry]], Awaitable[None]]) -> None:
        """Delete the payloads that checkpoints and purges freed; `forget_spilled` deletes those in files."""
        groups = self.store.groups
        while self._to_free:
            through, numbers = self._to_free[0]
            entries = await groups.read_entries(self.name, numbers.tolist())
            keys = [entry.strings.payload_key for entry in entries]
            with self.recording_refusals():
                await forget_spilled(entries)
                await groups.free_payloads(self.name, self.token, keys, through, self.state.pool.columns.late_names)
            self.mark_freed(through)  # a reload of the counters may have marked it meanwhile

    def mark_freed(self, through: int) -> None:
        """Skip payloads freed up to ledger entry `through`: a leader has deleted them."""
        while self._to_free and self._to_free[0][0] <= through:
            self._to_free.popleft()

    # ------------------------------------------------------------------ listeners

    def notify(self) -> None:
        """Call every listener after a change."""
        self.changes += 1
        for listener in self.listeners:
            listener()

    def close(self) -> None:
        """Let nobody wait any more."""
        self.closed = True
        self.notify()
