"""Tickets in flight, and the calls to the service that every part of the generator makes about them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from replaybuf.client.client import AsyncClient
from replaybuf.client.producers.failures import describe_failure, redact
from replaybuf.client.retries import Backoff
from replaybuf.errors import (
    DataLost,
    GroupAborted,
    NoRoom,
    NotFound,
    NotLeader,
    ReplaybufError,
    ServiceUnavailable,
    UnsupportedServer,
    counted,
)
from replaybuf.generator.progress import Progress
from replaybuf.kernel.state.return_reasons import is_failure
from replaybuf.tracing import spans
from replaybuf.wire.contract import ProducerFailure, Ticket, Tickets
from replaybuf.wire.group import Group

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETURN_S = 1.5
"""Time limit for returning the remaining tickets at the end."""
PATIENCE_S = 3600.0
"""Time to wait for a service that is away, or for lost data that only an operator can restore."""
GATHER_S = 0.05
"""Pause between two calls about several groups, while few groups wait for the second call."""
_GATHER_SHARE = 8
_REASON_CHARS = 200


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """One ticket in flight; `expires_at_s` by the event loop's clock; `group` once it is scored.

    `rewound_to`: a rewind during the flight took back all later versions, so groups that hold them are lost.
    `sampled`: its completions are there. `begun_by`: newest version that can have sampled its first token, None =
    unknown. `aborted`: why the group is not wanted any more. `span`: its trace, if spans are recorded.
    """

    ticket: Ticket
    expires_at_s: float
    group: Group | None = None
    task: asyncio.Task[None] | None = None
    rewound_to: int | None = None
    sampled: bool = False
    begun_by: int | None = None
    aborted: GroupAborted | None = None
    span: Span | None = None

    @property
    def started_at_s(self) -> float:
        """Time when the ticket was issued, by the event loop's clock."""
        return self.expires_at_s - self.ticket.expires_in_s

    @property
    def scored(self) -> Group:
        """The group. Raises `ReplaybufError` where it is not scored yet."""
        if self.group is None:
            raise ReplaybufError(f"ticket {self.ticket.ticket} has no group yet", name="ticket")
        return self.group


class InFlight:
    """Tickets in flight by their id, and one condition that is notified of all their changes.

    `stopping`: a stop was requested. `no_more_tickets`: no ticket will be requested any more. `failure`: the newest
    one that the service does not know yet.
    """

    def __init__(self, client: AsyncClient, patience_s: float = PATIENCE_S) -> None:
        self.client = client
        self.progress = Progress(time.monotonic())
        self.jobs: dict[str, Job] = {}
        self.stopping = False
        self.no_more_tickets = False
        self.failure: ProducerFailure | None = None
        self._patience_s = patience_s
        self._retried: dict[str, str] = {}
        self._changed = asyncio.Condition()

    @property
    def retry_reason(self) -> str | None:
        """Why a call is being retried: `service_away`, `no_room` or `data_lost`; None while none is."""
        return next(iter(self._retried.values()), None)

    @property
    def done(self) -> bool:
        """Whether nothing is in flight and no ticket will be requested."""
        return self.no_more_tickets and not self.jobs

    def add(self, ticket: Ticket) -> Job:
        """Count a ticket as in flight."""
        job = Job(ticket, asyncio.get_running_loop().time() + ticket.expires_in_s)
        self.jobs[ticket.ticket] = job
        return job

    async def release(self, jobs: Sequence[Job]) -> None:
        """Free the slots of groups that are stored or given up."""
        for job in jobs:
            self.jobs.pop(job.ticket.ticket, None)
            spans.end_group(job.span, "given_up")  # unless it has ended with a better reason
        await self.notify()

    # ------------------------------------------------------------------ aborts

    def sampling(self) -> list[Job]:
        """List the groups that engines sample now."""
        return [job for job in self.jobs.values() if job.task is not None and not (job.sampled or job.aborted)]

    def abort(self, job: Job, reason: str, detail: str) -> None:
        """Abort a group at the engine: closing the request frees its place there. Its ticket is returned."""
        job.aborted = GroupAborted(reason, detail)
        if job.task is not None:
            job.task.cancel()

    def ended_by_abort(self, job: Job) -> bool:
        """Return whether only an abort has cancelled the current task, which makes the group of `job`."""
        task = asyncio.current_task()
        return not (job.aborted is None or task is None or task.uncancel())

    def abort_sampling(self, reason: str, detail: str) -> None:
        """Abort every group that engines sample now."""
        for job in self.sampling():
            self.abort(job, reason, detail)

    # ------------------------------------------------------------------ waiting

    async def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for a change that makes the condition true; return False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True

    async def gather(self, ready: Callable[[], int], among: Callable[[], int], last_s: float) -> None:
        """Wait for more groups to share one call, until `GATHER_S` after the last call at `last_s`.

        Return at once where an eighth of `among` is ready, so that neither a single group nor the few slots of a small
        generator wait, and after a stop.
        """
        rest_s = last_s + GATHER_S - asyncio.get_running_loop().time()
        if rest_s > 0:
            await self.until(lambda: self.stopping or ready() * _GATHER_SHARE >= among(), rest_s)

    async def notify(self) -> None:
        """Let every waiter check its condition again."""
        async with self._changed:
            self._changed.notify_all()

    async def stop(self) -> None:
        """Request a stop."""
        self.stopping = True
        await self.notify()

    # ------------------------------------------------------------------ calls to the service

    async def retry(self, what: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """Repeat a call until the service answers it; return None where a stop comes between two tries.

        Nothing is lost meanwhile, because the waiting groups hold slots, and slots are bounded. A service without room
        is waited for without end: the trainer makes room. Raises the last error where the service is away, or its data
        is lost, for `patience_s`.
        """
        pauses_s = Backoff().pauses_s()
        outage: _Outage | None = None
        while True:
            try:
                result = await call()
            except UnsupportedServer:
                raise
            except NoRoom as error:
                self._retried[what], outage = "no_room", None
                pause_s = max(next(pauses_s), error.retry_after_s or 0.0)
                logger.warning(
                    "waiting %.1f s for room in the service (%s); the trainer makes room; %s in flight: %s",
                    pause_s,
                    what,
                    counted(len(self.jobs), "group"),
                    error,
                )
            except (ServiceUnavailable, NotLeader, DataLost) as error:
                outage = outage or _Outage(what, self._patience_s)
                pause_s = max(next(pauses_s), error.retry_after_s or 0.0)
                self._retried[what] = outage.record(error, len(self.jobs), pause_s)
            else:
                self._retried.pop(what, None)
                return result
            if await self.until(lambda: self.stopping, pause_s):
                return None

    async def take_tickets(
        self, producer: str, count: int, adapter: str, wait_ms: int, max_tokens: int | None = None
    ) -> Tickets:
        """Request tickets once.

        When cancelled, wait up to `RETURN_S` for the answer and count its tickets as in flight: nobody else can return
        them.
        """
        request = asyncio.ensure_future(self.client.take_tickets(producer, count, adapter, wait_ms, max_tokens))
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            with contextlib.suppress(ReplaybufError, TimeoutError):
                async with asyncio.timeout(RETURN_S):
                    for ticket in (await request).tickets:
                        self.add(ticket)
            raise

    def forget(self, failure: ProducerFailure | None) -> None:
        """Forget a failure that was reported, if there is no newer one."""
        if self.failure is failure:
            self.failure = None

    async def return_ticket(self, job: Job, reason: str, detail: str, error: BaseException | None = None) -> None:
        """Return a ticket with its reason; a ticket that cannot be returned expires. `error`: what was raised."""
        if is_failure(reason):
            self.failure = describe_failure(reason, error or detail, job.ticket.prompt_index)
        await self._give_back(job, reason, detail)

    async def _give_back(self, job: Job, reason: str, detail: str) -> None:
        self.progress.given_back[reason] += 1
        spans.end_group(job.span, reason)
        logger.warning("returning ticket %s: %s: %s", job.ticket.ticket, reason, detail)
        line = " ".join(redact(f"{reason}: {detail}").split())  # the service takes no line breaks here
        try:
            await self.client.return_ticket(job.ticket.ticket, line[:_REASON_CHARS])
        except NotFound:  # it has expired, and another producer may have it
            logger.info("ticket %s is no longer out", job.ticket.ticket)
        except ReplaybufError as error:
            logger.warning("ticket %s could not be returned and will expire: %s", job.ticket.ticket, error)
        await self.release([job])

    async def return_all(self, reason: str) -> None:
        """Return every ticket in flight, in parallel, within `RETURN_S` seconds."""
        jobs = list(self.jobs.values())
        try:
            async with asyncio.timeout(RETURN_S):
                await asyncio.gather(*(self._give_back(job, reason, "the producer ends") for job in jobs))
        except TimeoutError:
            logger.warning("%s not returned in time; they will expire", counted(len(self.jobs), "ticket"))


class _Outage:
    """The time since a call's first failed try."""

    def __init__(self, what: str, patience_s: float) -> None:
        self._what = what
        self._patience_s = patience_s
        self._since_s = time.monotonic()
        self._data_lost = False

    def record(self, error: ServiceUnavailable | NotLeader | DataLost, groups: int, pause_s: float) -> str:
        """Log a failed try and return why the call is retried. Raises the error after `patience_s`."""
        lost = isinstance(error, DataLost)
        awaited = "an operator to restore the data" if lost else f"the service ({self._what})"
        if time.monotonic() - self._since_s >= self._patience_s:
            raise type(error)(
                f"waited {self._patience_s:g} s for {awaited}; {counted(groups, 'group')} in flight lost: "
                f"{error.detail}",
                name=error.name,
                value=error.value,
                bound=self._patience_s,
            ) from error
        if not lost:
            logger.warning("waiting %.1f s for %s: %s", pause_s, awaited, error)
        elif not self._data_lost:  # once: nothing changes until the operator acts
            message = "waiting up to %g s for %s, with %s in flight: %s"
            logger.error(message, self._patience_s, awaited, counted(groups, "group"), error)
        self._data_lost = lost
        return "data_lost" if lost else "service_away"
