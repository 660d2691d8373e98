"""Late columns of one run: check what a stage sends for a stored group, and publish it with a ledger record.

A group gets a column once. The same values again change nothing; other values, and a group that a batch has drawn, are
a conflict. The frames and the record that names them become durable in one step. They count as bytes in memory until
they move to the spill folder, as frames do.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np

from replaybuf.errors import Conflict, Gone, NotFound, ReplaybufError, StrategyFault
from replaybuf.kernel.decide.late_columns import ADDED_AT_ONCE, check_open, check_parts, decide_columns, holds_any
from replaybuf.kernel.rows.index import summarize_scores
from replaybuf.kernel.strategy.advantages import group_advantages
from replaybuf.service.bodies.assembly import fetch_groups
from replaybuf.service.run.append.arrivals import Arrivals
from replaybuf.service.run.append.eviction import Eviction
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.spill import Spill
from replaybuf.store.ledger import NewColumn
from replaybuf.wire.frame import stored_checksum
from replaybuf.wire.group import Group
from replaybuf.wire.late_columns import (
    LateColumns,
    Values,
    add_columns,
    check_columns,
    encode_columns,
    find_column,
)
from replaybuf.wire.ledger import AddedColumns

REPLACING = ("rewards", "advantages")
"""Late columns that replace those of the group's own frame, which every group has."""


@dataclasses.dataclass(slots=True, eq=False)
class _Ready:
    """Checked columns of one group on their way to the ledger.

    `state`: `raced` = another call gave the group one of these columns, so they have to be compared again.
    """

    group_id: str
    added: AddedColumns
    frames: list[NewColumn]
    state: str = "waiting"
    error: ReplaybufError | None = None


class LateColumnWriter:
    """Adds columns to stored groups of one run. `added` counts columns since this process started."""

    def __init__(self, journal: Journal, arrivals: Arrivals, eviction: Eviction, spill: Spill) -> None:
        self.added = 0
        self._spill = spill
        self._journal = journal
        self._arrivals = arrivals
        self._eviction = eviction
        self._waiting: list[_Ready] = []

    async def add(self, late: LateColumns) -> int:
        """Add columns to a group; return how many of them are new when all of them are durable.

        Raises `Invalid` for values that do not fit the group, `Conflict` for other values than those stored and for a
        group that was drawn or dropped, `NotFound`, `Gone` for a group whose bytes are deleted, and `NoRoom`.
        """
        self._journal.check_leading()
        number = await self._find(late.group_id)
        while True:
            ready = await self._check(number, late)
            if ready is None:
                return 0
            await self._write(ready)
            if ready.error:
                raise ready.error
            if ready.state == "written":
                return len(ready.frames)

    async def _find(self, group_id: str) -> int:
        journal = self._journal
        number = (await journal.store.groups.find_numbers(journal.name, [group_id]))[0]
        if number is None:
            raise NotFound(f"run {journal.name} has no group {group_id!r}", name="group_id", value=group_id)
        if number == 0:
            detail = f"the history of group {group_id!r} is trimmed, and its bytes are deleted"
            raise Gone(detail, name="group_id", value=group_id)
        if number > journal.state.stored:
            await self._arrivals.pull()
        return number

    async def _check(self, number: int, late: LateColumns) -> _Ready | None:
        """Compare columns with their group; return what is to be written, None if the group has all of them."""
        journal, state = self._journal, self._journal.state
        if not len(state.index.rows_of([number])):
            check_open(state, number, late.group_id)
        table = state.pool.columns
        held = table.late_of([number]).get(number, [])
        fetched = await fetch_groups(journal.store, journal.name, [number], table)
        if number not in fetched.groups:
            why = fetched.broken.get(number, "missing")
            raise Conflict(f"group {late.group_id!r} is unusable: {why}", name="group_id", value=late.group_id)
        key = fetched.entries[0].strings.payload_key
        rule = journal.config.advantage
        return await asyncio.to_thread(_prepare, number, key, fetched.groups[number], held, late, rule)

    async def _write(self, ready: _Ready) -> None:
        """Write columns to the ledger, with those of other callers: the first one to decide writes for all of them."""
        self._waiting.append(ready)
        try:
            await self._spill.make_room_for_columns(sum(request.added.frame_bytes for request in self._waiting))
            with contextlib.suppress(StrategyFault):  # a filter failed: the columns are stored, and the run is paused
                async with self._journal.decision():
                    if ready.state == "waiting":
                        others = [request for request in self._waiting if request is not ready][: ADDED_AT_ONCE - 1]
                        await self._decide([ready, *others])
        finally:
            self._waiting.remove(ready)
        self._journal.notify()

    async def _decide(self, waiting: Sequence[_Ready]) -> None:
        """Write one record for the columns that may still be added. Called within a decision."""
        journal, accepted = self._journal, dict[int, _Ready]()
        names: set[str] = set()
        for request in waiting:
            number, own = request.added.number, request.added.crc32c.keys()
            if number in accepted or holds_any(journal.state, number, own):
                request.state = "raced"
                continue
            try:
                check_open(journal.state, number, request.group_id)
                check_parts(journal.state, names | own)
            except ReplaybufError as error:
                request.state, request.error = "refused", error
                continue
            accepted[number] = request
            names |= own
        if not accepted:
            return
        record = decide_columns([request.added for request in accepted.values()], journal.clock.wall())
        await journal.append_columns(record, [frame for request in accepted.values() for frame in request.frames])
        for request in accepted.values():
            request.state = "written"
            self.added += len(request.frames)
        # Before a batch may take them: filters that require a column see the groups now.
        await self._eviction.evict(np.array(sorted(accepted), np.int64))


def _prepare(
    number: int, payload_key: str, group: Group, held: Sequence[str], late: LateColumns, rule: str
) -> _Ready | None:
    """Check late columns against their group, and encode those that are new; `held`: columns that came late before."""
    check_columns(group, late)
    fresh: dict[str, Values] = {}
    for name, values in late.columns.items():
        stored = None if name in REPLACING and name not in held else find_column(group, name)
        if stored is None:
            fresh[name] = values
        elif not np.array_equal(stored, values):
            detail = f"group {late.group_id!r} has other values of {name}; a column is added once"
            raise Conflict(detail, name=f"columns.{name}", value=late.group_id, bound="the stored values")
    if not fresh:
        return None
    changed = add_columns(group, fresh)
    if "rewards" in fresh and "advantages" not in {*fresh, *held}:
        fresh["advantages"] = group_advantages(rule, changed)
        changed = add_columns(changed, fresh)
    encoded = {
        name: encode_columns(LateColumns(late.group_id, group.completion_lengths.tolist(), {name: values}))
        for name, values in fresh.items()
    }
    added = AddedColumns(
        number=number,
        crc32c={name: stored_checksum(frame) for name, frame in encoded.items()},
        frame_bytes=sum(map(len, encoded.values())),
        **summarize_scores(changed),
    )
    return _Ready(late.group_id, added, [NewColumn(payload_key, name, frame) for name, frame in encoded.items()])
