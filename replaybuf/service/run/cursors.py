"""Cursors of one run: the leader keeps them in Redis, and answers what follows each of them."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterable

import msgspec

from replaybuf.errors import NotFound
from replaybuf.kernel.decide.cursors import Kept, find_kept, find_superfluous
from replaybuf.kernel.state.cursors import (
    Cursor,
    Page,
    Position,
    check_kind,
    describe,
    find_page,
    new_cursor,
    parse_position,
)
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.long_polls import Gone, LongPolls, Round, Waiter
from replaybuf.wire.answer.cursors import CursorGap, CursorKind, CursorList, CursorState

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Cursor).decode

LONGEST_TICK_S = 5.0
"""A longer time between two looks does not count: the server was stopped, and nobody could use a cursor."""


class Cursors:
    """Named cursors of readers. They change nothing in the run, but a checkpoint keeps bytes for them.

    Redis changes first, then memory. If the outcome of a write is unknown, the next call reads all of them again. One
    call at a time reads or writes them: a reply from before a write would bring back what the write replaced.
    Time without use is counted by the leader alone, from its takeover on: never too much, whatever clocks do.
    `missed` counts what readers missed since this process started: groups and steps that are trimmed, freed groups.
    """

    def __init__(self, journal: Journal) -> None:
        self.missed = 0
        self._journal = journal
        self._cursors: dict[str, Cursor] | None = None
        self._missed_at: dict[str, Position] = {}
        self._idle_s: dict[str, float] = {}
        self._looked_s = journal.clock.monotonic()
        self._changing = asyncio.Lock()
        self._polls = LongPolls(journal)

    async def take_over(self) -> None:
        """Read the cursors again: another server may have changed them. Called while taking over."""
        async with self._changing:
            self._cursors, self._idle_s = None, {}
            await self._loaded()

    async def _current(self) -> dict[str, Cursor]:
        """Return the cursors by name, once no call changes them."""
        if self._cursors is not None:
            return self._cursors
        async with self._changing:
            return await self._loaded()

    async def _loaded(self) -> dict[str, Cursor]:
        """Return the cursors by name; the caller holds `_changing`."""
        if self._cursors is None:
            read = map(self._decode, await self._journal.store.cursors.read(self._journal.name))
            self._cursors = {cursor.name: cursor for cursor in read if cursor}
        return self._cursors

    def _decode(self, raw: bytes) -> Cursor | None:
        try:
            return _decode(raw)
        except (msgspec.MsgspecError, ValueError) as error:
            logger.warning("a cursor that does not decode is left out run=%s: %s", self._journal.name, error)
            return None

    def _find(self, cursors: dict[str, Cursor], name: str) -> Cursor:
        cursor = cursors.get(name)
        if cursor is None:
            raise NotFound(f"run {self._journal.name} has no cursor {name!r}", name="name", value=name)
        self._idle_s[name] = 0.0
        return cursor

    async def _write(self, name: str, cursor: Cursor | None) -> None:
        journal, raw = self._journal, b"" if cursor is None else _encode(cursor)
        cursors, self._cursors = await self._loaded(), None  # unknown until Redis has answered
        with journal.recording_refusals():
            await journal.store.cursors.write(journal.name, journal.check_leading(), name, raw)
        cursors.pop(name, None)
        self._idle_s.pop(name, None)
        self._cursors = cursors if cursor is None else cursors | {name: cursor}

    async def expire(self) -> None:
        """Forget the cursors that nobody has used within their lifetime."""
        now_s = self._journal.clock.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, LONGEST_TICK_S), now_s
        async with self._changing:
            for name, cursor in (await self._loaded()).items():
                if cursor.lifetime_s is not None:
                    self._idle_s[name] = self._idle_s.get(name, 0.0) + passed_s
                    if self._idle_s[name] > cursor.lifetime_s:
                        await self._forget(name, f"unused for its lifetime of {cursor.lifetime_s} s")
                        return

    async def _forget(self, name: str, why: str) -> None:
        await self._write(name, None)
        self._missed_at.pop(name, None)
        logger.info("cursor forgotten run=%s cursor=%s: %s", self._journal.name, name, why)

    # ------------------------------------------------------------------ calls

    async def open(self, name: str, kind: CursorKind | None, lifetime_s: int | None = None) -> None:
        """Create a cursor unless it exists. Raises `Conflict` for another kind, and what `find_superfluous` raises."""
        async with self._changing:
            self._journal.check_leading()
            cursors = await self._loaded()
            if name in cursors:
                check_kind(cursors[name], kind)
                return
            if superfluous := find_superfluous(cursors.values(), lambda other: self._idle_s.get(other, 0.0)):
                await self._forget(superfluous.name, f"it gave way to {name}")
            await self._write(name, new_cursor(self._journal.state, name, kind or "stored", lifetime_s))

    async def page(self, name: str, limit: int, wait_s: float, gone: Gone | None = None) -> Page:
        """Return what follows a cursor; wait up to `wait_s` for the first group. Raises `NotFound`."""
        serve, state = functools.partial(self._serve, name), self._journal.state
        question = self._polls.question(name, serve, lambda: (state.stored, state.entries, self._cursors))
        page = await question.answer(limit, wait_s, gone)
        self._idle_s[name] = 0.0  # it may have waited for most of the lifetime
        return page

    async def _serve(self, name: str, waiters: Iterable[Waiter[int, Page]]) -> Round[int, Page]:
        cursor = self._find(await self._current(), name)
        served: list[tuple[Waiter[int, Page], Page]] = []
        waits = None
        for waiter in waiters:
            page = find_page(self._journal.state, cursor, waiter.request)
            if page.empty:
                waits = page
                break
            served.append((waiter, page))
            await asyncio.sleep(0)
        if served:  # another leader may have advanced the cursor
            await self._journal.prove_lead()
        return Round(served, waits)

    def count_missed(self, name: str, position: Position, gap: CursorGap) -> None:
        """Count what the page up to a position misses, once."""
        if self._missed_at.get(name) != position:
            self._missed_at[name] = position
            self.missed += gap.groups + gap.steps + gap.freed

    async def advance(self, name: str, text: str) -> CursorState:
        """Record that all groups up to a position are done; an older position changes nothing. Raises `Invalid`."""
        async with self._changing:
            self._journal.check_leading()
            cursor = self._find(await self._loaded(), name)
            position = parse_position(self._journal.state, cursor, text)
            if position > cursor.position:
                cursor = msgspec.structs.replace(cursor, position=position)
                await self._write(name, cursor)
            return describe(self._journal.state, cursor)

    async def delete(self, name: str) -> None:
        """Forget a cursor. A repetition does no harm."""
        async with self._changing:
            self._journal.check_leading()
            if name in await self._loaded():
                await self._forget(name, "its reader deleted it")

    async def list_all(self) -> CursorList:
        """List the cursors by name."""
        self._journal.check_leading()
        return CursorList(cursors=self.describe(await self._current()))

    def describe(self, cursors: dict[str, Cursor] | None = None) -> list[CursorState]:
        """Render the cursors that are in memory, by name."""
        known = self._cursors if cursors is None else cursors
        return [describe(self._journal.state, cursor) for _, cursor in sorted((known or {}).items())]

    async def kept(self, step: int, keep: int) -> Kept:
        """Return what a checkpoint at `step` keeps for the cursors."""
        cursors, state = await self._current(), self._journal.state
        oldest = sorted({*state.checkpoints, step})[-keep:][0]
        return find_kept(state, list(cursors.values()), oldest)
