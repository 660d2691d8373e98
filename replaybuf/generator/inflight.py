"""The tickets in flight, and what every part of the generator does with them: wait, ask the service, give back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from replaybuf.client.client import AsyncClient, Backoff
from replaybuf.errors import (
    DataLost,
    NoRoom,
    NotFound,
    NotLeader,
    ReplaybufError,
    ServiceUnavailable,
    UnsupportedServer,
)
from replaybuf.generator.progress import Progress
from replaybuf.wire.contract import Ticket, Tickets
from replaybuf.wire.group import Group

logger = logging.getLogger(__name__)

T = TypeVar("T")

GIVE_BACK_S = 1.5
"""At the end, giving back what is left may take so long."""
PATIENCE_S = 3600.0
"""A service that is away, or whose Redis lost data that only an operator can bring back, is waited for so long."""
GATHER_S = 0.05
"""Between two calls of a kind that can be about many groups, as long as few are waiting for the second."""
_GATHER_SHARE = 8
_REASON_CHARS = 200


@dataclasses.dataclass(slots=True, eq=False)
class Work:
    """One ticket in flight; `expires_at_s` by the event loop's clock; `group` once it is scored.

    `rewound_to`: later versions than this one were taken back while it was in flight, so those it holds are lost.
    """

    ticket: Ticket
    expires_at_s: float
    group: Group | None = None
    task: asyncio.Task[None] | None = None
    rewound_to: int | None = None

    @property
    def taken_at_s(self) -> float:
        """When the ticket was taken, by the event loop's clock."""
        return self.expires_at_s - self.ticket.expires_in_s

    @property
    def scored(self) -> Group:
        """The group. Raises `ReplaybufError` where there is none yet."""
        if self.group is None:
            raise ReplaybufError(f"ticket {self.ticket.ticket} has no group yet", name="ticket")
        return self.group


class Flight:
    """Tickets in flight by their text, and one condition on which everybody waits for changes of them.

    `stopping`: an end was asked for; `no_more_tickets`: none is to be taken any more.
    """

    def __init__(self, client: AsyncClient, patience_s: float = PATIENCE_S) -> None:
        self.client = client
        self._patience_s = patience_s
        self.progress = Progress(time.time())
        self.works: dict[str, Work] = {}
        self.stopping = False
        self.no_more_tickets = False
        self._away: dict[str, str] = {}
        self._changed = asyncio.Condition()

    @property
    def away(self) -> str | None:
        """Why a call is being repeated: `service_away`, `no_room` or `data_lost`; None where none is."""
        return next(iter(self._away.values()), None)

    @property
    def done(self) -> bool:
        """Whether nothing is in flight and nothing more will be."""
        return self.no_more_tickets and not self.works

    # ------------------------------------------------------------------ waiting

    async def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for a change that makes the condition true; False where `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True

    async def gather(self, there: Callable[[], int], among: Callable[[], int], last_s: float) -> None:
        """Let what is there wait for more to go in the same call, until `GATHER_S` after the last one at `last_s`.

        It does not wait where it is an eighth of that among which it is counted: neither a group alone nor the slots of
        a small generator are held up. Nor is a stop.
        """
        rest_s = last_s + GATHER_S - asyncio.get_running_loop().time()
        if rest_s > 0:
            await self.until(lambda: self.stopping or there() * _GATHER_SHARE >= among(), rest_s)

    async def wake(self) -> None:
        """Let everybody who waits look again."""
        async with self._changed:
            self._changed.notify_all()

    async def stop(self) -> None:
        """Ask for an end."""
        self.stopping = True
        await self.wake()

    async def patiently(self, what: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """Repeat a call until the service answers it; None where a stop came between two tries.

        Nothing is lost meanwhile: whoever waits here holds slots, and slots are bounded. One that answers but has no
        room is waited for without end: it has room again when the trainer goes on. Raises the last error where the
        service stays away, or without its data, for `patience_s`.
        """
        pauses_s = Backoff().pauses_s()
        absence: _Absence | None = None
        while True:
            try:
                result = await call()
            except UnsupportedServer:
                raise
            except NoRoom as error:
                self._away[what], absence = "no_room", None
                pause_s = max(next(pauses_s), error.retry_after_s or 0.0)
                logger.warning(
                    "waiting %.1f s for room in the service (%s), which the trainer makes; %d groups are in flight: %s",
                    pause_s,
                    what,
                    len(self.works),
                    error,
                )
            except (ServiceUnavailable, NotLeader, DataLost) as error:
                absence = absence or _Absence(what, self._patience_s)
                self._away[what] = absence.of(error, len(self.works))
                pause_s = max(next(pauses_s), error.retry_after_s or 0.0)
                if not absence.lost:
                    logger.warning("waiting %.1f s for the service (%s): %s", pause_s, what, error)
            else:
                self._away.pop(what, None)
                return result
            if await self.until(lambda: self.stopping, pause_s):
                return None

    async def take_tickets(self, producer: str, count: int, adapter: str, wait_ms: int) -> Tickets:
        """Ask for tickets, once.

        Cut off, it waits for the answer all the same, `GIVE_BACK_S` at most: nobody else knows the tickets it brings,
        which go back with the rest.
        """
        asking = asyncio.ensure_future(self.client.take_tickets(producer, count, adapter, wait_ms))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            with contextlib.suppress(ReplaybufError, TimeoutError):
                async with asyncio.timeout(GIVE_BACK_S):
                    for ticket in (await asking).tickets:
                        self.hold(ticket)
            raise

    def hold(self, ticket: Ticket) -> Work:
        """Count a ticket as in flight from now on."""
        work = Work(ticket, asyncio.get_running_loop().time() + ticket.expires_in_s)
        self.works[ticket.ticket] = work
        return work

    # ------------------------------------------------------------------ ends

    async def forget(self, works: Sequence[Work]) -> None:
        """Free the slots of groups that are stored or given up."""
        for work in works:
            self.works.pop(work.ticket.ticket, None)
        await self.wake()

    async def give_back(self, work: Work, reason: str, detail: str) -> None:
        """Return a ticket with its reason; one that cannot be returned expires by itself."""
        self.progress.given_back[reason] += 1
        logger.warning("ticket %s is given back: %s: %s", work.ticket.ticket, reason, detail)
        try:
            await self.client.return_ticket(work.ticket.ticket, f"{reason}: {detail}"[:_REASON_CHARS])
        except NotFound:  # expired meanwhile, and perhaps issued to another producer
            logger.info("ticket %s was not out any more", work.ticket.ticket)
        except ReplaybufError as error:
            logger.warning("ticket %s could not be given back and will expire: %s", work.ticket.ticket, error)
        await self.forget([work])

    async def give_back_rest(self, reason: str) -> None:
        """Return every ticket still in flight, all at once, within `GIVE_BACK_S` seconds."""
        works = list(self.works.values())
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await asyncio.gather(*(self.give_back(work, reason, "the producer ends") for work in works))
        except TimeoutError:
            logger.warning("%d tickets could not be given back in time and will expire", len(self.works))


class _Absence:
    """A time without an answer that helps, from its first error on. `lost`: the last one was `DataLost`."""

    def __init__(self, what: str, patience_s: float) -> None:
        self.lost = False
        self._what = what
        self._patience_s = patience_s
        self._since_s = time.monotonic()

    def of(self, error: ServiceUnavailable | NotLeader | DataLost, groups: int) -> str:
        """Return what to call it, with so many groups in flight; raises the error where it lasts too long."""
        # What was stored is the operator's to bring back; what is in flight here is kept until it is.
        lost = isinstance(error, DataLost)
        whom = "an operator" if lost else f"the service ({self._what})"
        if time.monotonic() - self._since_s >= self._patience_s:
            raise type(error)(
                f"waited {self._patience_s:g} s in vain for {whom}; {groups} groups in flight are given up: "
                f"{error.detail}",
                name=error.name,
                value=error.value,
                bound=self._patience_s,
            ) from error
        if lost and not self.lost:
            logger.error(
                "waiting up to %g s for %s, with %d groups in flight: %s", self._patience_s, whom, groups, error
            )
        self.lost = lost
        return "data_lost" if lost else "service_away"
