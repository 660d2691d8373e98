"""Cursors of one run: the leader keeps them in Redis, and answers what follows each of them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable

import msgspec

from replaybuf.errors import NotFound, NotLeader
from replaybuf.kernel.cursors import (
    Cursor,
    Kept,
    Page,
    Position,
    check_kind,
    check_room,
    describe,
    find_kept,
    find_page,
    new_cursor,
    parse_position,
)
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.long_polls import Gone, LongPolls, Round, Waiter
from replaybuf.wire.cursors import CursorGap, CursorKind, CursorList, CursorState

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Cursor).decode


class Cursors:
    """Named cursors of readers. They change nothing in the run, but a checkpoint keeps bytes for them.

    Redis changes first, then memory. If the outcome of a write is unknown, the next call reads all of them again.
    `missed` counts what readers missed since this process started: groups and steps that are trimmed, freed groups.
    """

    def __init__(self, journal: Journal) -> None:
        self.missed = 0
        self._journal = journal
        self._cursors: dict[str, Cursor] | None = None
        self._missed_at: dict[str, Position] = {}
        self._changing = asyncio.Lock()
        self._polls = LongPolls(journal)

    def forget(self) -> None:
        """Read the cursors again before the next use: another server may have changed them."""
        self._cursors = None

    async def _loaded(self) -> dict[str, Cursor]:
        if self._cursors is None:
            found = map(_decode, await self._journal.store.cursors.read(self._journal.name))
            self._cursors = {cursor.name: cursor for cursor in found}
        return self._cursors

    async def _find(self, name: str) -> Cursor:
        cursor = (await self._loaded()).get(name)
        if cursor is None:
            raise NotFound(f"run {self._journal.name} has no cursor {name!r}", name="name", value=name)
        return cursor

    async def _write(self, name: str, cursor: Cursor | None) -> None:
        journal, raw = self._journal, b"" if cursor is None else _encode(cursor)
        cursors, self._cursors = await self._loaded(), None  # unknown until Redis has answered
        try:
            with journal.recording_loss():
                await journal.store.cursors.write(journal.name, journal.check_leading(), name, raw)
        except NotLeader:
            journal.follow(None)
            raise
        cursors.pop(name, None)
        self._cursors = cursors if cursor is None else cursors | {name: cursor}

    # ------------------------------------------------------------------ calls

    async def open(self, name: str, kind: CursorKind | None) -> None:
        """Create a cursor unless it exists. Raises `Conflict` for another kind, and for too many cursors."""
        async with self._changing:
            self._journal.check_leading()
            cursors = await self._loaded()
            if name in cursors:
                check_kind(cursors[name], kind)
                return
            check_room(len(cursors))
            await self._write(name, new_cursor(self._journal.state, name, kind or "stored"))

    async def page(self, name: str, limit: int, wait_s: float, gone: Gone | None = None) -> Page:
        """Return what follows a cursor; wait up to `wait_s` for the first group. Raises `NotFound`."""
        serve, state = functools.partial(self._serve, name), self._journal.state
        question = self._polls.question(name, serve, lambda: (state.stored, state.entries, self._cursors))
        return await question.answer(limit, wait_s, gone)

    async def _serve(self, name: str, waiters: Iterable[Waiter[int, Page]]) -> Round[int, Page]:
        cursor = await self._find(name)
        served: list[tuple[Waiter[int, Page], Page]] = []
        for waiter in waiters:
            page = find_page(self._journal.state, cursor, waiter.request)
            if page.empty:
                return Round(served, page)
            served.append((waiter, page))
            await asyncio.sleep(0)
        return Round(served)

    def count_missed(self, name: str, position: Position, gap: CursorGap) -> None:
        """Count what the page up to a position misses, once."""
        if self._missed_at.get(name) != position:
            self._missed_at[name] = position
            self.missed += gap.groups + gap.steps + gap.freed

    async def advance(self, name: str, text: str) -> CursorState:
        """Record that all groups up to a position are done; an older position changes nothing. Raises `Invalid`."""
        async with self._changing:
            self._journal.check_leading()
            cursor = await self._find(name)
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
                await self._write(name, None)
                self._missed_at.pop(name, None)

    async def list_all(self) -> CursorList:
        """List the cursors by name."""
        self._journal.check_leading()
        return CursorList(cursors=self.describe(await self._loaded()))

    def describe(self, cursors: dict[str, Cursor] | None = None) -> list[CursorState]:
        """Render the cursors that are in memory, by name."""
        known = self._cursors if cursors is None else cursors
        return [describe(self._journal.state, cursor) for _, cursor in sorted((known or {}).items())]

    async def kept(self, step: int, keep: int) -> Kept:
        """Return what a checkpoint at `step` keeps for the cursors."""
        cursors, state = await self._loaded(), self._journal.state
        oldest = sorted({*state.checkpoints, step})[-keep:][0]
        return find_kept(state, list(cursors.values()), oldest)
