"""Tickets and counters of one run, which Redis keeps beside the streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from replaybuf.kernel.state.tickets import TicketBook, TicketChange
from replaybuf.service.run.journal import Journal
from replaybuf.store import RunTickets


class SideState:
    """Ticket book and counters in memory, with their copies in Redis.

    Memory changes first, then Redis. If the outcome of the Redis call is unknown, `uncertain` is set, and the next
    decision about tickets reloads all of it: what was written counts, the rest did not happen.
    A restart of Redis has the same effect: it may have lost a removal, and followers would go on showing the ticket.
    `rejected` counts rejected groups by reason, `duplicates` repeated appends; both since the run was created.
    """

    def __init__(self, journal: Journal, book: TicketBook) -> None:
        self.book = book
        self.rejected: Counter[str] = Counter()
        self.duplicates = 0
        self.uncertain = False
        self._to_remove: dict[str, None] = {}
        self._writing = asyncio.Lock()
        self._journal = journal
        self._process_id = journal.store.connection.process_id

    @property
    def must_reload(self) -> bool:
        """Whether Redis may hold something else than memory."""
        return self.uncertain or self._process_id != self._journal.store.connection.process_id

    async def reload(self) -> None:
        """Replace tickets and counters with those in Redis."""
        self.uncertain = False  # first: a failure during the read, or a restart of Redis, sets it again
        self._process_id = self._journal.store.connection.process_id
        self.restore(await self._journal.store.tickets.read_one(self._journal.name))

    async def reload_followed(self) -> None:
        """Replace a follower's tickets and counters by those of the leader."""
        term = self._journal.terms
        self.restore_followed(await self._journal.store.tickets.read_one(self._journal.name), term)

    def restore_followed(self, stored: RunTickets, term: int) -> None:
        """Replace a follower's tickets and counters by those that were read in `term`; a leader has newer ones."""
        if not self._journal.token and self._journal.terms == term:
            self.restore(stored)

    def restore(self, stored: RunTickets) -> None:
        """Replace tickets and counters with those that were read from Redis."""
        self.restore_appends(stored.counts)
        self.book.restore(stored.tickets, stored.counts, self._journal.clock.monotonic())
        self._journal.mark_freed(stored.counts.get("freed_through", 0))

    def restore_appends(self, counts: Mapping[str, int]) -> None:
        """Replace the counts of appends, which each server adds to."""
        self.duplicates = counts.get("duplicate", 0)
        self.rejected.clear()
        self.rejected.update({k.removeprefix("rejected:"): v for k, v in counts.items() if k.startswith("rejected:")})

    async def count_rejected(self, reasons: Counter[str]) -> None:
        """Count rejected groups by reason. Raises `NotLeader` where a newer leader may accept them."""
        if reasons:
            journal = self._journal
            counts = {f"rejected:{name}": count for name, count in reasons.items()}
            with journal.recording_refusals(), self.uncertain_on_failure():
                await journal.store.counters.add(journal.name, counts, journal.token)
            self.rejected.update(reasons)

    def remove_later(self, texts: Iterable[str]) -> None:
        """Remove the tickets of stored prompts with the next change or tick; the next leader removes them again."""
        self._to_remove |= dict.fromkeys(texts)

    async def write_removed(self) -> None:
        """Remove the tickets of stored prompts that no change has removed yet."""
        if self._to_remove:
            await self._write(TicketChange(), durably=False)

    async def save(self, change: TicketChange) -> None:
        """Write a change of the book to Redis, durably. Raises `NotLeader` if a newer leader has fenced this server."""
        if change:
            await self._write(change, durably=True)

    async def _write(self, change: TicketChange, *, durably: bool) -> None:
        journal = self._journal
        left_s = dict.fromkeys(change.texts_to_add, self.book.ttl_s) | dict.fromkeys(map(str, change.due), 0.0)
        async with self._writing:  # commands of two connections may arrive in any order
            removed = dict(self._to_remove)
            with journal.recording_refusals():
                await journal.store.tickets.change(
                    journal.name,
                    journal.token,
                    drop=[*removed, *change.texts_to_drop],
                    # The group of a prompt may have arrived after the decision to issue it again.
                    left_s={ticket: ticket_s for ticket, ticket_s in left_s.items() if ticket not in removed},
                    counts=change.counts,
                    durably=durably,
                )
            for ticket in removed:  # some were added meanwhile
                self._to_remove.pop(ticket, None)

    @contextlib.contextmanager
    def uncertain_on_failure(self) -> Iterator[None]:
        """Reload before the next decision if the body fails or is cancelled: Redis may hold what it wrote."""
        try:
            yield
        except (Exception, asyncio.CancelledError):
            self.uncertain = True
            raise
