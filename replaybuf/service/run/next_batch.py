"""Prepare the next batch before the trainer requests it: fetch and check frames, pack, write bodies.

Nothing is decided and nothing is recorded here. What the strategy would choose now is prepared. When the trainer
requests the batch, the decision is made as always and uses what was prepared as far as it is the same: the whole batch
if its record is equal, else the groups that were fetched. While there are too few groups for a batch, those that are
there are fetched.

The leader of a run prepares one batch of at most `MOST_BYTES`, as far ahead as the strategy allows, once the attached
trainer has been served. Failures are logged and left to the decision, and so are broken groups.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from replaybuf.errors import ReplaybufError
from replaybuf.kernel.decide.records import draft_batch
from replaybuf.kernel.strategy.selection import BatchSelection, Selector
from replaybuf.service.bodies.assembly import (
    FetchedGroups,
    PackedBatch,
    complete_record,
    fetch_groups,
    hash_content,
    pack_beside,
)
from replaybuf.service.bodies.writer import Bodies
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.long_polls import Pace
from replaybuf.service.turns import call_beside
from replaybuf.store import IndexEntry
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.group import Group
from replaybuf.wire.ledger import BatchRecord
from replaybuf.wire.plan import PlannedColumn

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 30
"""Frames held; a larger batch is not prepared to its end."""
_FETCH_CHUNK = 32
"""Groups fetched at once: a decision that comes meanwhile waits for one chunk."""

OUTCOMES = ("hit", "partial", "miss")
"""Of an assembled batch: it was prepared; some of its groups were; nothing was."""


@dataclasses.dataclass(slots=True)
class _Prepared:
    """What is prepared for one step: groups by number, and the batch once it is packed.

    `key`: generation, step, layout and configuration. `fetching`: the chunk on its way. `closed`: a decision uses what
    there is, so nothing is added any more.
    """

    key: object
    entries: dict[int, IndexEntry] = dataclasses.field(default_factory=dict)
    groups: dict[int, Group] = dataclasses.field(default_factory=dict)
    late: dict[int, list[PlannedColumn]] = dataclasses.field(default_factory=dict)
    batch: PackedBatch | None = None
    fetching: asyncio.Task[bool] | None = None
    closed: bool = False

    def keep(self, numbers: Sequence[int], columns: Mapping[int, list[str]]) -> None:
        """Drop all other groups, and those that got late columns (`columns`) since they were fetched."""
        outdated = {n for n in numbers if n in self.groups and self._late_names(n) != columns.get(n, [])}
        for number in (self.entries.keys() - set(numbers)) | outdated:
            del self.entries[number], self.groups[number]
            self.late.pop(number, None)

    def fetched(self, numbers: Sequence[int], columns: Mapping[int, list[str]]) -> FetchedGroups:
        """Return those of these groups that are here with all late columns that they have by now (`columns`)."""
        held = [n for n in numbers if n in self.groups and self._late_names(n) == columns.get(n, [])]
        late = {n: self.late[n] for n in held if n in self.late}
        return FetchedGroups([self.entries[n] for n in held], {n: self.groups[n] for n in held}, {}, late)

    def _late_names(self, number: int) -> list[str]:
        return [column.name for column in self.late.get(number, ())]


class NextBatch:
    """Preparation for one run; `outcomes` counts what became of it."""

    def __init__(self, journal: Journal, selector: Selector, bodies: Bodies) -> None:
        self.outcomes: Counter[str] = Counter()
        self._journal = journal
        self._state = journal.state
        self._selector = selector
        self._bodies = bodies
        self._served_epoch = 0
        self._bodies_epoch = 0
        self._pace = Pace()
        self._seen: object = None
        self._prepared: _Prepared | None = None

    # ------------------------------------------------------------------ what a decision uses

    def expect_request(self, *, as_body: bool) -> None:
        """Prepare from now on: the attached trainer was served. Write bodies too once it took one."""
        self._served_epoch = self._state.epoch
        if as_body:
            self._bodies_epoch = self._state.epoch

    async def fetched(self, numbers: Sequence[int]) -> FetchedGroups:
        """Return those of these groups that are prepared or on their way, and stop fetching more."""
        prepared = self._prepared = self._prepared or _Prepared(self._key())
        prepared.closed = prepared.batch is None
        if prepared.fetching:
            await asyncio.wait([prepared.fetching])  # if it fails, the decision fetches itself
        return prepared.fetched(numbers, self._state.pool.columns.late_of(numbers))

    def take(self, record: BatchRecord, used: int) -> PackedBatch | None:
        """Return the prepared batch if it has this record; drop the rest. `used`: prepared groups in the record."""
        prepared, self._prepared = self._prepared, None
        batch = prepared.batch if prepared else None
        if (
            batch is not None
            and batch.layout is self._state.attachment
            and batch.content == hash_content(record, batch.layout)
        ):
            self.outcomes["hit"] += 1
            batch.record = record
            return batch
        self.outcomes["partial" if used else "miss"] += 1
        if prepared:
            prepared.closed = True
        return None

    def drop(self) -> None:
        """Drop what is prepared, and what is being prepared."""
        if self._prepared:
            self._prepared.closed = True
        self._prepared = None

    # ------------------------------------------------------------------ preparing

    async def work(self) -> None:
        """Prepare what is possible if anything has changed since the last call. Log failures."""
        seen = (self._journal.changes, self._state.entries, self._journal.leading, self._served_epoch)
        if self._seen == seen:
            return  # the common case, twenty times a second per run
        if self._pace.resting:
            return
        self._seen = seen
        if not self._wanted():
            self.drop()
            return
        if self._prepared and self._prepared.batch and self._prepared.key == self._key():
            return
        try:
            await self._prepare()
        except ReplaybufError as error:
            self.drop()
            logger.warning("next batch not prepared run=%s: %s", self._journal.name, error.detail)
        except Exception:  # the decision meets the same fault and reports it
            self.drop()
            logger.exception("next batch not prepared run=%s", self._journal.name)

    def _wanted(self) -> bool:
        state = self._state
        return (
            self._journal.leading
            and state.phase == "running"
            and 0 < state.epoch == self._served_epoch
            and state.next_step <= state.step + self._selector.bounds.look_ahead
        )

    def _key(self) -> object:
        return (self._state.generation, self._state.next_step, self._state.attachment, self._state.config)

    async def _prepare(self) -> None:
        key, layout = self._key(), self._state.attachment
        with self._pace.work():
            chosen = self._selector.choose()
        self._pace.end(waits=isinstance(chosen, WaitingAnswer))
        if isinstance(chosen, BatchSelection):
            numbers = chosen.rows.tolist()
        elif chosen.reason in ("too_few_groups", "too_few_tokens"):
            numbers = self._selector.list_prefetch_groups()
        else:
            return
        await asyncio.sleep(0)  # choosing among a million groups takes a while
        if self._key() != key:
            return
        if self._prepared is None or self._prepared.key != key:
            self._prepared = _Prepared(key)
        elif self._prepared.closed:
            return  # a decision uses it: fetching again would be in its way
        prepared = self._prepared
        whole = await self._fetch(prepared, numbers)
        if not whole or isinstance(chosen, WaitingAnswer) or layout is None or self._key() != key:
            return
        fetched = prepared.fetched(numbers, self._state.pool.columns.late_of(numbers))
        if len(fetched.groups) < len(numbers):
            return  # a late column arrived meanwhile; that is a change, so the next call fetches the group again
        draft = draft_batch(self._state, self._selector, chosen, self._journal.clock.wall())
        record = await call_beside(len(numbers), complete_record, draft, fetched)
        batch = await pack_beside(record, fetched, layout)
        if not prepared.closed:
            prepared.batch = batch
            await self._write_bodies(prepared, batch)

    async def _write_bodies(self, prepared: _Prepared, batch: PackedBatch) -> None:
        """Write the bodies of all ranks, if the attached trainer takes bodies."""
        for rank in range(batch.layout.dp_world_size if self._bodies_epoch == self._state.epoch else 0):
            if not prepared.closed:
                await self._bodies.body(batch, rank, "identity")

    async def _fetch(self, prepared: _Prepared, numbers: Sequence[int]) -> bool:
        """Fetch the groups that are missing, within `MOST_BYTES`; return whether all are here and intact."""
        prepared.keep(numbers, self._state.pool.columns.late_of(numbers))
        index = self._state.index
        fitting = int(np.searchsorted(np.cumsum(index["frame_bytes"][index.rows_of(numbers)]), MOST_BYTES, "right"))
        missing = [number for number in numbers[:fitting] if number not in prepared.groups]
        for start in range(0, len(missing), _FETCH_CHUNK):
            if prepared.closed:
                return False
            prepared.fetching = asyncio.create_task(self._fetch_chunk(prepared, missing[start : start + _FETCH_CHUNK]))
            try:
                if not await prepared.fetching:
                    return False
            finally:
                prepared.fetching = None
        return not prepared.closed and fitting == len(numbers)

    async def _fetch_chunk(self, prepared: _Prepared, numbers: Sequence[int]) -> bool:
        """Fetch some groups; return whether they are intact."""
        columns = self._state.pool.columns
        fetched = await fetch_groups(self._journal.store, self._journal.name, numbers, columns)
        if fetched.broken:
            return False
        prepared.entries |= {entry.number: entry for entry in fetched.entries}
        prepared.groups |= fetched.groups
        prepared.late |= fetched.late
        return True
