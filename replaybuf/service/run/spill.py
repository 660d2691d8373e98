"""Spill of one run: moves frames out of Redis while they exceed `limits.max_bytes_in_memory`.

The leader moves, in one background task per run, so a folder that hangs delays nobody else. `kernel.spill` chooses the
groups, `store.spill` has the order of writes. What the folder cannot take stays in Redis: moving is tried again every
`RETRY_S`, the state shows why, and appends beyond the limit get 429 meanwhile.

Files that nothing names are left by a crash, or by a folder that was away when their groups were freed. They are
deleted when this server starts to lead, and when the folder is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence

import numpy as np

from replaybuf.errors import Invalid, ReplaybufError, ServiceUnavailable, SpillAway, StrategyFault
from replaybuf.kernel.groups import Groups
from replaybuf.kernel.index import SPILLED, Numbers
from replaybuf.kernel.selection import Selector
from replaybuf.kernel.spill import START, SpillState, choose_moves, list_movable
from replaybuf.service.run.journal import Journal
from replaybuf.store import IndexEntry
from replaybuf.store.chunks import split_chunks
from replaybuf.store.spill import SpillFiles
from replaybuf.wire.run_status import SpillStatus
from replaybuf.wire.spill import number_in, path_of, stub_path

logger = logging.getLogger(__name__)

MOVED_AT_ONCE = 256
"""Groups of one chunk, which has at most 8 MiB of frames."""
DELETED_AT_ONCE = 1_000
MOST_DOOMED = 100_000
"""Files waiting to be deleted. Beyond, all files are compared with the spilled groups instead."""
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
        self._orphans = False
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
        found = await store.read_folder(run)
        self._folder = found[1] if found else None
        numbers = await store.read_numbers(run)
        self.state.load(numbers)
        # An older leader may have died between a move and the check of what was freed during it.
        freed = np.setdiff1d(numbers, self._journal.state.index["number"][self._held(numbers)])
        if len(freed):
            await store.forget(run, self._journal.token, freed.tolist())
        self._orphans = found is not None

    async def make_room(self, nbytes: int) -> None:
        """Start to move frames when they come near the limit; wait a moment for it if `nbytes` more would exceed it."""
        limit = self._journal.config.limits.max_bytes_in_memory
        if self.files is None or limit is None or self.state.use.in_memory + nbytes <= limit * START:
            return
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_WAIT_S):
                while self._moving and not self.failing and self.state.use.in_memory + nbytes > limit:
                    await self._progress.wait()

    async def forget(self, entries: Sequence[IndexEntry]) -> None:
        """Forget freed groups that are spilled, and delete their files in the background."""
        if self.files is None or self._folder is None:
            return
        store, journal = self._journal.store.spill, self._journal
        keys = {entry.number: entry.strings.payload_key for entry in entries}
        spilled = await store.find_spilled(journal.name, list(keys))
        await store.forget(journal.name, journal.token, spilled)
        self._doomed += [path_of(self._folder, number, keys[number]) for number in spilled]
        if len(self._doomed) > MOST_DOOMED:
            self._doomed, self._orphans = [], True

    def start(self) -> None:
        """Do in the background what there is to do, unless that is going on."""
        if self.files is None or not self._journal.leading or self._moving:
            return
        now_s = self._journal.clock.monotonic()
        rested = now_s >= self._next_s
        if (self.failing and not rested) or not (rested or self._excess or self._orphans or self._doomed):
            return
        self._next_s = now_s + (RETRY_S if self.failing else CHECK_S)
        self._progress.clear()
        self._task = asyncio.create_task(self._work(self.files), name=f"spill {self._journal.name}")

    @property
    def _moving(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def _excess(self) -> int:
        limit = self._journal.config.limits.max_bytes_in_memory
        return 0 if limit is None else self.state.excess(limit)

    def _held(self, numbers: Sequence[int]) -> Numbers:
        return self._journal.state.index.rows_of(numbers)

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
        while self._doomed:
            await files.delete(self._doomed[:DELETED_AT_ONCE])
            del self._doomed[:DELETED_AT_ONCE]
        if self._orphans and self._folder:
            deleted = await files.delete_some(self._folder, self._list_orphans)
            logger.info("orphans deleted run=%s files=%d", self._journal.name, deleted)
        self._orphans = False

    def _list_orphans(self, paths: Sequence[str]) -> list[str]:
        """List the files of no spilled group, and those that were not written to their end."""
        index, numbers = self._journal.state.index, [number_in(path) for path in paths]
        rows = self._held([number for number in numbers if number is not None])
        spilled = set(index["number"][rows[index[SPILLED][rows] != 0]].tolist())
        return [path for path, number in zip(paths, numbers, strict=True) if number not in spilled]

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
            self._folder = await self._create_folder(files)
        entries = await self._journal.store.groups.read_entries(self._journal.name, numbers.tolist())
        for chunk in split_chunks(entries, lambda entry: int(entry.values["frame_bytes"]), MOVED_AT_ONCE):
            await self._move(files, self._folder, chunk)
            self._wake()

    async def _create_folder(self, files: SpillFiles) -> str:
        """Create the run's folder and record it; a crash in between leaves an empty folder."""
        journal = self._journal
        folder = f"{journal.name}-{secrets.token_hex(8)}"
        await files.create(folder)
        await journal.store.spill.record(journal.name, journal.check_leading(), files.url, folder)
        return folder

    async def _move(self, files: SpillFiles, folder: str, entries: Sequence[IndexEntry]) -> None:
        """Move the frames of some groups: write files, then replace payloads by stubs."""
        journal, run = self._journal, self._journal.name
        token, keys = journal.check_leading(), [entry.strings.payload_key for entry in entries]
        data: list[tuple[str, bytes]] = []
        moves: list[tuple[str, int, str]] = []
        for entry, payload in zip(entries, await journal.store.groups.read_payloads(run, keys), strict=True):
            if payload is not None and stub_path(payload) is None:
                path = path_of(folder, entry.number, entry.strings.payload_key)
                data.append((path, payload))
                moves.append((entry.strings.payload_key, entry.number, path))
        await files.write(data)
        await journal.store.spill.record(run, token, files.url, folder, moves)
        numbers = [entry.number for entry in entries]
        self.state.mark(numbers)  # missing payloads too: they take no memory
        self.moved += len(moves)
        held = set(journal.state.index["number"][self._held(numbers)].tolist())
        freed = [(number, path) for _, number, path in moves if number not in held]
        if freed:  # a checkpoint freed them during the move, and did not know of their files
            await journal.store.spill.forget(run, token, [number for number, _ in freed])
            self._doomed += [path for _, path in freed]


async def check_folder(url: str) -> None:
    """Write and delete a file in the spill folder of a new run. Raises `Invalid` if that fails."""
    files = SpillFiles(url)
    try:
        await files.probe()
    except ServiceUnavailable as error:
        raise Invalid(f"spill.url is {url!r}: {error.detail}", name="spill.url", value=url) from error
    finally:
        files.close()
