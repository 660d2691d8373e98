"""The next batch, prepared before anybody asks for it: frames fetched and checked, packed, bodies written.

Nothing is decided here and nothing is written down. What the strategy would choose now is made ready; when the trainer
asks, the decision is made as ever, and what was made ready is used as far as it is the same: the whole batch where its
record is, else the groups that were fetched already. While too few groups are there for a batch, those that are there
are fetched.

Prepared is one batch per run, of at most `MOST_BYTES`, by its leader, once the attached trainer has been served, as far
ahead as the strategy allows. What goes wrong is logged and left to the decision; broken groups too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from replaybuf.errors import ReplaybufError
from replaybuf.kernel.selection import Selector
from replaybuf.kernel.strategy import Selection
from replaybuf.service.run.assembly import FetchedGroups, PackedBatch, fetch_groups, pack_batch
from replaybuf.service.run.bodies import Bodies
from replaybuf.service.run.journal import Journal
from replaybuf.store import IndexEntry
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.group import Group
from replaybuf.wire.ledger import BatchRecord

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 30
"""Frames that are held ready; a batch of more is not prepared to its end."""
_FETCHED_AT_ONCE = 32
"""Groups: what a decision that comes meanwhile waits for."""

OUTCOMES = ("hit", "partial", "miss")
"""Of a decided batch: it was ready; some of its groups were; nothing was."""


@dataclasses.dataclass(slots=True)
class _Ready:
    """What is ready for one step: groups by number, and the batch once it is packed.

    `key` is generation, step and layout. `coming`: what is being fetched. `closed`: a decision takes what there is,
    nothing is to be added any more.
    """

    key: object
    entries: dict[int, IndexEntry] = dataclasses.field(default_factory=dict)
    groups: dict[int, Group] = dataclasses.field(default_factory=dict)
    batch: PackedBatch | None = None
    coming: asyncio.Task[bool] | None = None
    closed: bool = False

    def keep(self, numbers: Sequence[int]) -> None:
        """Let go of all other groups."""
        self.entries = {number: self.entries[number] for number in numbers if number in self.entries}
        self.groups = {number: self.groups[number] for number in numbers if number in self.groups}


class NextBatch:
    """Preparation for one run. `write_down` makes the record of a selection; `outcomes` counts what came of it."""

    def __init__(
        self,
        journal: Journal,
        selector: Selector,
        bodies: Bodies,
        write_down: Callable[[Selection, FetchedGroups], BatchRecord],
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self._journal = journal
        self._state = journal.state
        self._selector = selector
        self._bodies = bodies
        self._write_down = write_down
        self._served_epoch = 0
        self._bodies_epoch = 0
        self._seen: object = None
        self._ready: _Ready | None = None

    # ------------------------------------------------------------------ what a decision takes

    def served(self, *, as_body: bool) -> None:
        """Take note that the attached trainer got a batch: what it asks for next is worth preparing.

        Bodies are, once it took one: a trainer that builds them from plans has no use for ours.
        """
        self._served_epoch = self._state.epoch
        if as_body:
            self._bodies_epoch = self._state.epoch

    async def fetched(self, numbers: Sequence[int]) -> FetchedGroups:
        """Return what is ready of these groups, or on its way; fetching more of them ahead ends here."""
        ready = self._ready = self._ready or _Ready(self._key())
        ready.closed = ready.batch is None
        if ready.coming:
            await asyncio.wait([ready.coming])  # whatever goes wrong with it, the decision fetches itself
        held = [number for number in numbers if number in ready.groups]
        return FetchedGroups(
            [ready.entries[number] for number in held], {number: ready.groups[number] for number in held}, {}
        )

    def take(self, record: BatchRecord, used: int) -> PackedBatch | None:
        """Return the batch of this record if it is ready; `used` of its groups were. Nothing is ready afterwards.

        The time of the decision is the one thing in which the records may differ: no byte depends on it.
        """
        ready, self._ready = self._ready, None
        batch = ready.batch if ready else None
        if (
            batch is not None
            and batch.layout is self._state.attachment
            and msgspec.structs.replace(batch.record, at_s=record.at_s) == record
        ):
            self.outcomes["hit"] += 1
            batch.record = record
            return batch
        self.outcomes["partial" if used else "miss"] += 1
        if ready:
            ready.closed = True
        return None

    def drop(self) -> None:
        """Let go of what is ready, and of what is being made ready."""
        if self._ready:
            self._ready.closed = True
        self._ready = None

    # ------------------------------------------------------------------ preparing

    async def work(self) -> None:
        """Prepare what can be, if anything has changed since; then return. Raises nothing that goes wrong with it."""
        seen = (self._journal.changes, self._state.entries, self._journal.leading, self._served_epoch)
        if self._seen == seen:
            return  # so with most runs, twenty times a second
        self._seen = seen
        if not self._wanted():
            self.drop()
            return
        if self._ready and self._ready.batch and self._ready.key == self._key():
            return
        try:
            await self._prepare()
        except ReplaybufError as error:
            self.drop()
            logger.warning("next batch not prepared run=%s: %s", self._journal.name, error.detail)
        except Exception:  # whatever it is, the decision meets it again and answers for it
            self.drop()
            logger.exception("next batch not prepared run=%s", self._journal.name)

    def _wanted(self) -> bool:
        state = self._state
        return (
            self._journal.leading
            and state.state == "running"
            and 0 < state.epoch == self._served_epoch
            and state.next_step <= state.step + self._selector.bounds.look_ahead
        )

    def _key(self) -> object:
        return (self._state.generation, self._state.next_step, self._state.attachment)

    async def _prepare(self) -> None:
        chosen = self._selector.choose()
        if isinstance(chosen, Selection):
            numbers = chosen.rows.tolist()
        elif chosen.reason in ("too_few_groups", "too_few_tokens"):
            numbers = self._selector.candidates()
        else:
            return
        key, layout = self._key(), self._state.attachment
        if self._ready is None or self._ready.key != key:
            self._ready = _Ready(key)
        elif self._ready.closed:
            return  # to fetch again what a decision is taking would be in its way
        ready = self._ready
        whole = await self._fetch(ready, numbers)
        if not whole or isinstance(chosen, WaitingAnswer) or layout is None or self._key() != key:
            return
        loaded = FetchedGroups([ready.entries[number] for number in numbers], dict(ready.groups), {})
        batch = await asyncio.to_thread(pack_batch, self._write_down(chosen, loaded), loaded, layout)
        if ready.closed:
            return
        ready.batch = batch
        if self._bodies_epoch != self._state.epoch:
            return
        for rank in range(layout.dp_world_size):
            if not ready.closed:
                await self._bodies.body(batch, rank, "identity")

    async def _fetch(self, ready: _Ready, numbers: Sequence[int]) -> bool:
        """Fetch what is not there yet; say whether all of it is there and sound."""
        ready.keep(numbers)
        missing = [number for number in numbers if number not in ready.groups]
        for start in range(0, len(missing), _FETCHED_AT_ONCE):
            if ready.closed:
                return False
            ready.coming = asyncio.create_task(self._fetch_some(ready, missing[start : start + _FETCHED_AT_ONCE]))
            try:
                if not await ready.coming:
                    return False
            finally:
                ready.coming = None
        return not ready.closed

    async def _fetch_some(self, ready: _Ready, numbers: Sequence[int]) -> bool:
        """Fetch some groups; say whether they are sound and there is room for more."""
        loaded = await fetch_groups(self._journal.store, self._journal.name, numbers)
        if loaded.broken:
            return False
        ready.entries |= {entry.number: entry for entry in loaded.entries}
        ready.groups |= loaded.groups
        return sum(int(entry.values["frame_bytes"]) for entry in ready.entries.values()) <= MOST_BYTES
