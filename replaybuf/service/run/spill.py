"""Spill of one run: moves frames out of Redis while they exceed `limits.max_bytes_in_memory`.

The leader moves, in one background task per run, so a folder that hangs delays nobody else. `kernel.decide.spill`
chooses the groups, `store.spill` has the order of writes. What the folder cannot take stays in Redis: moving is tried
again every `RETRY_S`, the state shows why, and appends beyond the limit get 429 meanwhile.

A crash may leave files that nothing names. They are deleted when their group is freed, never before: a group that is
freed is freed in every continuation of this history, but a file that this Redis does not name may be named by another
one. This Redis may be an older copy that was opened for a moment, and another server may lead by now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence

import numpy as np

from replaybuf.errors import Invalid, NoRoom, ReplaybufError, ServiceUnavailable, SpillAway, StrategyFault, counted
from replaybuf.kernel.decide.spill import START, choose_moves, find_excess, list_movable
from replaybuf.kernel.rows.groups import Groups
from replaybuf.kernel.rows.index import Numbers
from replaybuf.kernel.state.spill import SpillState
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.service.run.journal import Journal
from replaybuf.store import IndexEntry
from replaybuf.store.chunks import split_chunks
from replaybuf.store.groups import with_columns
from replaybuf.store.keys import late_column
from replaybuf.store.spill import Move, SpillFiles, SpillStore
from replaybuf.wire.answer.run_status import SpillStatus
from replaybuf.wire.spill import is_stub, is_unfinished, number_in, path_of

logger = logging.getLogger(__name__)

MOVED_AT_ONCE = 256
"""Groups of one chunk, which has at most 8 MiB of frames."""
DELETED_AT_ONCE = 1_000
MOST_DOOMED = 100_000
"""Groups whose files wait to be deleted. Beyond, all files are compared with the freed groups instead."""
RETRY_S = 1.0
CHECK_S = 10.0
"""A folder without work is checked so often, so that its loss is known before a batch needs it."""
ROOM_WAIT_S = 1.0
"""Longest wait of an append for frames to move; then it gets 429."""


class Spill:
    """Moves the frames of one run. `moved` counts groups moved by this server."""

    def __init__(self, journal: Journal, selector: Selector) -> None:
        self.state = SpillState(journal.state)
        self.moved = 0
        self._journal = journal
        self._selector = selector
        spec, frames = journal.config.spill, journal.store.groups.spilled
        self.files = frames.open(journal.name, spec.url) if spec else None
        self._folder: str | None = None
        self._sweep = False
        self._strays: dict[int, set[str]] = {}
        self._doomed: list[str] = []
        self._task: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()
        self._next_s = 0.0
        self._fault: str | None = None

    @property
    def failing(self) -> str | None:
        """Return why the folder cannot be used now; None if it can."""
        return (self.files.error if self.files else None) or self._fault

    def describe(self) -> SpillStatus | None:
        """Describe the spill for the state of the run; None without a folder, and on a follower."""
        if self.files is None or not self._journal.leading:
            return None
        use = self.state.use
        return SpillStatus(bytes_in_memory=use.in_memory, groups=use.groups, bytes=use.bytes, failing=self.failing)

    @property
    def in_memory(self) -> int:
        """Return the bytes of frames in Redis; 0 without a limit on them."""
        return 0 if self._journal.config.limits.max_bytes_in_memory is None else self.state.use.in_memory

    def close(self) -> None:
        """Stop moving."""
        if self._task:
            self._task.cancel()
        if self.files:
            self._journal.store.groups.spilled.close(self._journal.name, self.files)

    # ------------------------------------------------------------------ what others call

    async def take_over(self) -> None:
        """Read what older leaders moved. Called while taking over."""
        if self.files is None:
            return
        store, run = self._journal.store.spill, self._journal.name
        self._folder = await self._find_folder()
        spilled = await store.read_spilled(run)
        self.state.load(spilled)
        # An older leader may have died between a move and the check of what was freed during it.
        held = self.state.sizes_of(list(spilled))
        freed = [number for number in spilled if number not in held]
        if freed:
            await store.forget(run, self._journal.token, freed)
        self._doomed, self._strays, self._sweep = [], {}, self._folder is not None

    async def make_room(self, nbytes: int) -> None:
        """Start to move frames when they come near the limit; wait a moment for it if `nbytes` more would exceed it."""
        if self.files is None:
            return
        limit = self._journal.config.limits.max_bytes_in_memory
        if limit is None or self.state.use.in_memory + nbytes <= limit * START:
            return
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_WAIT_S):
                while self._moving and not self.failing and self.state.use.in_memory + nbytes > limit:
                    await self._progress.wait()

    async def make_room_for_columns(self, nbytes: int) -> None:
        """Make room for late columns. Raises `NoRoom` if they do not fit below the limit."""
        await self.make_room(nbytes)
        limit, in_memory = self._journal.config.limits.max_bytes_in_memory, self.in_memory
        if limit is not None and in_memory + nbytes > limit:
            name, value = "limits.max_bytes_in_memory", in_memory + nbytes
            detail = f"with these columns {counted(value, 'byte')} would be in memory; {name} is {limit}"
            raise NoRoom(detail, name=name, value=value, bound=limit)

    async def forget(self, entries: Sequence[IndexEntry]) -> None:
        """Forget freed groups that are spilled, and delete their files in the background."""
        if self.files is None or self._folder is None:
            return
        store, journal = self._journal.store.spill, self._journal
        payload_keys = {entry.number: entry.strings.payload_key for entry in entries}
        spilled = await store.find_spilled(journal.name, list(payload_keys))
        token, columns = journal.check_leading(), journal.state.pool.columns.late_names
        for number in spilled:
            self._doomed += [
                path_of(self._folder, number, key) for key in with_columns([payload_keys[number]], columns)
            ]
        for number in self._strays.keys() & payload_keys.keys():
            self._doomed += self._strays.pop(number)
        if len(self._doomed) > MOST_DOOMED * (1 + len(columns)):
            self._doomed, self._strays, self._sweep = [], {}, True
        # Last: after a lost answer the repeated call finds nothing spilled, and would keep the files.
        await store.forget(journal.name, token, spilled)

    def start(self) -> None:
        """Do in the background what there is to do, unless that is going on."""
        if self.files is None or not self._journal.leading or self._moving:
            return
        now_s = self._journal.clock.monotonic()
        rested = now_s >= self._next_s
        if (self.failing and not rested) or not (rested or self._excess or self._sweep or self._doomed):
            return
        self._next_s = now_s + (RETRY_S if self.failing else CHECK_S)
        self._progress.clear()
        self._task = self._journal.start(self._work(self.files), f"spill {self._journal.name}")

    @property
    def _moving(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def _excess(self) -> int:
        limit = self._journal.config.limits.max_bytes_in_memory
        return 0 if limit is None else find_excess(self.state.use.in_memory, limit)

    # ------------------------------------------------------------------ background

    async def _work(self, files: SpillFiles) -> None:
        """Check the folder, delete what is freed, move what is too much. Log failures."""
        was_failing, self._fault = self.failing, None
        try:
            if self._folder:
                await files.check(self._folder)
            await self._delete(files)
            while self._excess:
                numbers = await self._choose(self._excess)
                if not len(numbers):
                    break
                await self._move_all(files, numbers)
        except SpillAway as error:
            self._fault = error.detail
        except ReplaybufError as error:  # Redis is away, or another server leads
            logger.warning("frames not moved run=%s: %s", self._journal.name, error.detail)
        except Exception as error:  # the next try may meet the same fault; the run goes on without moving
            logger.exception("frames not moved run=%s", self._journal.name)
            self._fault = repr(error)
        finally:
            self._wake()
        if self.failing != was_failing:
            level = logging.ERROR if self.failing else logging.INFO
            logger.log(level, "spill run=%s: %s", self._journal.name, self.failing or "the folder is available again")
        if self.failing:
            self._next_s = self._journal.clock.monotonic() + RETRY_S

    def _wake(self) -> None:
        """Let appends that wait for room check again."""
        self._progress.set()
        self._progress = asyncio.Event()

    async def _delete(self, files: SpillFiles) -> None:
        """Delete doomed files, and sweep if that is due. A checkpoint may add paths or ask for a sweep meanwhile."""
        while doomed := self._doomed:
            paths = doomed[:DELETED_AT_ONCE]
            await self._confirm_lead()
            await files.delete(paths)
            del doomed[: len(paths)]  # not `self._doomed`: a sweep may have replaced the list
        if self._sweep and self._folder:
            self._sweep = False
            try:
                deleted = await files.delete_some(self._folder, self._list_freed, self._confirm_lead)
            except BaseException:
                self._sweep = True
                raise
            logger.info("files of freed groups deleted run=%s files=%d", self._journal.name, deleted)

    async def _confirm_lead(self) -> None:
        """Ask Redis before files go: an accepted loss gives their numbers to other groups. Raises `NotLeader`."""
        journal = self._journal
        await journal.store.counters.add(journal.name, {}, journal.check_leading())

    def _list_freed(self, paths: Sequence[str]) -> list[str]:
        """List the files of freed groups; remember those that nothing names until their groups are freed.

        Groups above `stored` are unknown, not freed: another history may have them.
        """
        by_number: dict[int, list[str]] = {}
        for path in paths:
            number = number_in(path)
            if number is not None and number <= self._journal.state.stored:
                by_number.setdefault(number, []).append(path)
        held = self.state.sizes_of(list(by_number)).keys()
        spilled = self.state.list_spilled(list(held))
        for number in held if len(self._strays) < MOST_DOOMED else ():
            unnamed = {path for path in by_number[number] if is_unfinished(path) or number not in spilled}
            if unnamed:
                self._strays.setdefault(number, set()).update(unnamed)
        return [path for number, own in by_number.items() if number not in held for path in own]

    async def _choose(self, excess: int) -> Numbers:
        movable = list_movable(self._journal.state, self._draw_order)
        return await asyncio.to_thread(choose_moves, movable, excess)

    def _draw_order(self, groups: Groups) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Ask the strategy; a strategy that fails costs speed only, so groups then move as they were stored."""
        strategy = self._selector.strategy

        def asked() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            order = np.asarray(strategy.draw_order(groups), np.float64)
            if order.shape != (len(groups),):
                raise ValueError(f"draw_order has shape {order.shape}; it must be ({len(groups)},)")
            return np.nan_to_num(order)

        try:
            return self._selector.ask("draw_order", asked)
        except StrategyFault:
            return np.arange(len(groups), dtype=np.float64)

    async def _move_all(self, files: SpillFiles, numbers: Numbers) -> None:
        if self._folder is None:
            self._folder = await self._find_folder() or await self._create_folder(files)
        entries = await self._journal.store.groups.read_entries(self._journal.name, numbers.tolist())
        sizes = self.state.sizes_of(numbers)
        for chunk in split_chunks(entries, lambda entry: sizes.get(entry.number, 0), MOVED_AT_ONCE):
            await self._move(files, self._folder, chunk)
            self._wake()

    async def _find_folder(self) -> str | None:
        """Return the run's folder, if Redis names it: the answer to its record may have been lost."""
        recorded = await self._journal.store.spill.read_folder(self._journal.name)
        return recorded[1] if recorded else None

    async def _create_folder(self, files: SpillFiles) -> str:
        """Create the run's folder and record it; a crash in between leaves an empty folder."""
        journal = self._journal
        folder = f"{journal.name}-{secrets.token_hex(8)}"
        await files.create(folder)
        await journal.store.spill.record(journal.name, journal.check_leading(), files.url, folder)
        return folder

    async def _move(self, files: SpillFiles, folder: str, entries: Sequence[IndexEntry]) -> None:
        """Move frames and late columns of some groups: write files, then replace payloads by stubs."""
        journal, run = self._journal, self._journal.name
        token, numbers = journal.check_leading(), [entry.number for entry in entries]
        sizes, late = self.state.sizes_of(numbers), journal.state.pool.columns.late_of(numbers)
        numbers_by_key: dict[str, int] = {}
        for entry in entries:
            own = entry.strings.payload_key
            columns = [late_column(own, name) for name in late.get(entry.number, ())]
            numbers_by_key |= dict.fromkeys([own, *columns], entry.number)
        data: list[tuple[str, bytes]] = []
        moves: list[Move] = []
        payloads = await journal.store.groups.read_payloads(run, list(numbers_by_key))
        for (key, number), payload in zip(numbers_by_key.items(), payloads, strict=True):
            if payload is not None and not is_stub(payload) and number in sizes:
                path = path_of(folder, number, key)
                data.append((path, payload))
                moves.append(Move(key, number, path, sizes[number]))
        try:
            await files.write(data)
            await journal.store.spill.record(run, token, files.url, folder, moves)
        except BaseException:
            self._keep_unnamed(moves)
            raise
        held = self.state.sizes_of(numbers)
        self.state.mark(sizes)  # missing payloads too: they take no memory
        self.moved += len({move.number for move in moves})
        freed = [move for move in moves if move.number not in held]
        if freed:  # a checkpoint freed them during the move, and did not know of their files
            self._doomed += [move.path for move in freed]
            await journal.store.spill.forget(run, token, sorted({move.number for move in freed}))

    def _keep_unnamed(self, moves: Sequence[Move]) -> None:
        """Remember the files of a move that failed, to delete them with their groups: Redis may not name them."""
        held = self.state.sizes_of([move.number for move in moves])
        self._doomed += [move.path for move in moves if move.number not in held]
        for move in moves:
            if move.number in held:
                self._strays.setdefault(move.number, set()).add(move.path)


async def check_folder(store: SpillStore, url: str) -> None:
    """Write and delete a file in the spill folder of a new run. Raises `Invalid` if that fails, and on a cluster."""
    store.check_supported()
    files = SpillFiles(url)
    try:
        await files.probe()
    except ServiceUnavailable as error:
        raise Invalid(f"spill.url is {url!r}: {error.detail}", name="spill.url", value=url) from error
    finally:
        files.close()
