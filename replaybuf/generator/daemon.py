"""The generator's loop: tickets in, groups out, and nothing lost in between.

One ticket's way; a slot (of `max_inflight_groups`) is held from the first to the last station, so everything that waits
here is bounded::

    ticket ──► generating ──► scored ──► [stages] ──► ready ──► stored
                   │             │           │         ▲ │
                   └─────────────┴───────────┤         │ └─ not published yet ──► held ──┐
                                             ▼         └────── version published ◄───────┤
                                     given back (reason)  ◄── ticket's life over ────────┘

Tasks, all in one TaskGroup: `_take_tickets`, one `_make` per ticket, `_append_ready`, `_follow_policy`, `_report`,
`_heed`. All wait on one condition or inside one bounded call. A fault that is not one group's ends them all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from replaybuf.aggregation import Window
from replaybuf.client import AppendResult, AsyncClient, Backoff, Ticket, Tickets
from replaybuf.errors import (
    EngineAway,
    EngineFault,
    EngineUnfit,
    Invalid,
    Malformed,
    NoRoom,
    NotFound,
    NotLeader,
    ReplaybufError,
    RewardFault,
    RunFinished,
    ServiceUnavailable,
    TooLarge,
    UnsupportedServer,
)
from replaybuf.generator.engines import Sampling
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.groups import new_group
from replaybuf.generator.progress import Progress, append_status, log_status
from replaybuf.generator.prompts import Encoder, Prompts
from replaybuf.generator.scoring import Scorer
from replaybuf.generator.stages import Rollout, Stage, Stages
from replaybuf.group import Group

logger = logging.getLogger(__name__)

T = TypeVar("T")

APPEND_GROUPS = 64
"""So many groups go in one append at most."""
FINISH_S = 2.0
"""After a stop, work in flight may still finish for so long."""
GIVE_BACK_S = 1.5
"""Then giving the rest back may take so long; together the process ends within 4 s."""
FAULTS_IN_A_ROW = 64
"""So many groups failing one after another, none succeeding, mean that something is broken for good."""
_ENGINE_POLL_S = 1.0
_EARLY_ANSWER = 0.9
_REASON_CHARS = 200
_EARLY_PAUSE_S = 0.2
_UNKNOWN = -1
_ABOVE_PUBLISHED = "version_above_published"
_AWAY_ERRORS = (NoRoom, ServiceUnavailable, NotLeader)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """How to generate.

    `producer` names this process to the service; `poll_wait_ms`: how long the service may hold a call for tickets or
    the policy, short enough that a stop can wait for the answer and give its tickets back.
    """

    producer: str
    sampling: Sampling
    advantage: str
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_inflight_groups: int = 64
    poll_wait_ms: int = 1000
    report_every_s: float = 10.0
    metrics_file: Path | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Work:
    """One ticket in flight; `expires_at_s` by the loop's clock."""

    ticket: Ticket
    expires_at_s: float
    group: Group | None = None
    task: asyncio.Task[None] | None = None

    @property
    def scored(self) -> Group:
        if self.group is None:
            raise ReplaybufError(f"ticket {self.ticket.ticket} has no group yet", name="ticket")
        return self.group


class Daemon:
    """Generates groups for the tickets of one run until it is stopped or the supply is finished; use once.

    Raises what cannot be mended by waiting: `EngineUnfit`, `Unauthorized`, a run that is gone, an environment that
    fails every group.
    """

    def __init__(
        self,
        client: AsyncClient,
        engine: Fleet,
        scorer: Scorer,
        prompts: Prompts,
        tokenizer: Encoder,
        options: DaemonOptions,
        stages: Sequence[Stage] = (),
    ) -> None:
        self._client = client
        self._engine = engine
        self._scorer = scorer
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._options = options
        self._stages = Stages(stages, options.sampling.n) if stages else None
        self.progress = Progress(time.time())
        self._changed = asyncio.Condition()
        self._works: dict[str, _Work] = {}
        self._ready: deque[_Work] = deque()
        self._held: list[_Work] = []
        self._generating = 0
        self._published = 0
        self._faults_in_a_row = 0
        self._stopping = False
        self._no_more_tickets = False
        self._denied: str | None = None
        self._service_away = False

    async def run(self, stop: asyncio.Event) -> None:
        """Generate until `stop` is set or no ticket will come any more; tickets left then are given back."""
        reason = "producer_fault"
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                loops = (self._take_tickets(), self._append_ready(), self._follow_policy(), self._report())
                background = [tasks.create_task(loop) for loop in (*loops, self._heed(stop))]
                await self._until(lambda: self._stopping or self._done)
                if not self._done:
                    await self._until(lambda: self._done, FINISH_S)
                making = [work.task for work in self._works.values() if work.task is not None]
                for task in (*background, *making):
                    task.cancel()
            reason = "shutdown"
        finally:
            await self._give_back_rest(reason)
            self._tell_status()

    @property
    def _done(self) -> bool:
        return self._no_more_tickets and not self._works

    @property
    def _waiting(self) -> str | None:
        """Say why less is going on than could."""
        if self._service_away:
            return "service_away"
        if not self._engine.up:
            return "engine_away"
        if self._held and not self._generating:
            return "awaiting_publication"
        return self._denied

    # ------------------------------------------------------------------ tickets

    async def _take_tickets(self) -> None:
        while not (self._stopping or self._no_more_tickets):
            await self._until(lambda: self._stopping or len(self._works) < self._options.max_inflight_groups)
            if not self._stopping and await self._engine_up():
                await self._take_some()
        self._no_more_tickets = True
        await self._wake()

    async def _engine_up(self) -> bool:
        """Wait a moment for the engine: a ticket is worth taking only when something can be generated for it."""
        try:
            await self._engine.wait_ready(_ENGINE_POLL_S)
        except EngineAway:
            return False
        return True

    async def _take_some(self) -> None:
        options, clock = self._options, asyncio.get_running_loop().time
        asked_s = clock()
        count = options.max_inflight_groups - len(self._works)
        try:
            answer = await self._patiently(
                "tickets", lambda: self._client.take_tickets(options.producer, count, wait_ms=options.poll_wait_ms)
            )
        except RunFinished:
            self._no_more_tickets = True
            return
        if answer is None:
            return
        self._published = max(self._published, answer.published_version)
        for ticket in answer.tickets:
            self._start(ticket)
        self._denied = answer.waiting.reason if answer.waiting and not answer.tickets else None
        if answer.waiting is not None and not answer.tickets:
            await self._heed_denial(answer, clock() - asked_s)

    async def _heed_denial(self, answer: Tickets, took_s: float) -> None:
        waiting = answer.waiting
        if waiting is None:
            return
        if waiting.reason == "finished" and waiting.blocked_on != "producers":
            logger.info("no more tickets: the run is finished; %d groups are still in flight", len(self._works))
            self._no_more_tickets = True
        elif took_s < _EARLY_ANSWER * self._options.poll_wait_ms / 1000:
            # Answered before its time, so asking again at once would only be answered at once again.
            await self._until(lambda: self._stopping, waiting.retry_after_s)

    def _start(self, ticket: Ticket) -> None:
        work = _Work(ticket, asyncio.get_running_loop().time() + ticket.expires_in_s)
        self._works[ticket.ticket] = work
        if not self._stopping:  # else it came with the last answer, and goes back with the rest
            self._generating += 1
            work.task = self._tasks.create_task(self._make(work))

    # ------------------------------------------------------------------ groups

    async def _make(self, work: _Work) -> None:
        try:
            work.group = await self._generated(work.ticket)
            self._faults_in_a_row = 0
        except EngineUnfit:
            raise
        except (EngineFault, RewardFault) as fault:
            await self._give_back(work, fault.reason, fault.detail)
            self._count_fault(fault)
        finally:
            self._generating -= 1
        await self._through_stages(work)

    async def _generated(self, ticket: Ticket) -> Group:
        options = self._options
        prompt = self._prompts.at(ticket.prompt_index)
        sample = await self._engine.generate(prompt.token_ids, options.sampling)
        scores = await self._scorer.score(prompt, self._tokenizer.decode(sample.completions))
        return new_group(
            ticket,
            prompt,
            sample,
            scores,
            temperature=options.sampling.temperature,
            advantage=options.advantage,
            metadata=options.metadata,
        )

    def _count_fault(self, fault: EngineFault | RewardFault) -> None:
        if fault.reason == "engine_away":  # waited out before the next ticket is taken
            return
        self._faults_in_a_row += 1
        if self._faults_in_a_row >= FAULTS_IN_A_ROW:
            raise ReplaybufError(f"{FAULTS_IN_A_ROW} groups in a row failed; the last: {fault.detail}", name="faults")

    async def _through_stages(self, work: _Work) -> None:
        """Complete what fills a window, or what is left when nothing else is being generated that could fill it."""
        if self._stages is None:
            await self._make_ready([work] if work.group is not None else [])
            return
        taken = self._stages.add(work.group) if work.group is not None else None
        if taken is None and not self._generating:
            taken = self._stages.flush()
        if taken is not None:
            await self._complete(self._stages, *taken)

    async def _complete(self, stages: Stages, groups: list[Group], window: Window[Rollout]) -> None:
        works = [self._works[group.ticket or ""] for group in groups]
        try:
            for work, group in zip(works, await stages.complete(groups, window), strict=True):
                work.group = group
        except EngineUnfit:
            raise
        except EngineFault as fault:
            for work in works:
                await self._give_back(work, fault.reason, fault.detail)
            self._count_fault(fault)
        else:
            await self._make_ready(works)

    async def _make_ready(self, works: Sequence[_Work]) -> None:
        """Queue groups for append; those of a version not published yet are held."""
        for work in works:
            above = work.scored.policy_version_max > self._published
            (self._held if above else self._ready).append(work)
        await self._wake()

    # ------------------------------------------------------------------ append

    async def _append_ready(self) -> None:
        going = True
        while going:
            await self._until(lambda: bool(self._ready))
            going = await self._append([self._ready.popleft() for _ in range(min(len(self._ready), APPEND_GROUPS))])

    async def _append(self, works: list[_Work]) -> bool:
        """Append groups, however long the service is away; say False where a stop came first."""
        groups = [work.scored for work in works]
        try:
            results = await self._patiently("append", lambda: self._client.append(groups))
        except RunFinished as error:
            logger.info("%d groups came too late: %s", len(works), error)
            self._forget(works)
            self._no_more_tickets = True
            return True
        except (Invalid, Malformed, TooLarge) as error:
            return await self._append_singly(works, error)
        if results is None:
            return False
        for work, result in zip(works, results, strict=True):
            await self._settle(work, result)
        await self._wake()
        return True

    async def _append_singly(self, works: list[_Work], error: ReplaybufError) -> bool:
        """Find the group that made the service refuse them all."""
        if len(works) == 1:
            await self._give_back(works[0], "append_refused", error.detail)
            return True
        for work in works:
            if not await self._append([work]):
                return False
        return True

    async def _settle(self, work: _Work, result: AppendResult) -> None:
        if result.status == "rejected":
            if result.reason == _ABOVE_PUBLISHED:  # though it was published: only a rewind lowers a version
                await self._rewound(f"version {work.scored.policy_version_max} is not published any more", [work])
            else:
                await self._give_back(work, f"rejected_{result.reason}", result.detail or "")
            return
        if result.status == "stored":
            self.progress.stored(work.scored)
        else:
            self.progress.duplicates += 1
        self._forget([work])

    def _forget(self, works: Sequence[_Work]) -> None:
        for work in works:
            self._works.pop(work.ticket.ticket, None)

    # ------------------------------------------------------------------ policy

    async def _follow_policy(self) -> None:
        """Release held groups when their version is published.

        The trainer loads the engines first and announces the version after, so groups of the next version are normal.
        """
        clock, poll_s = asyncio.get_running_loop().time, self._options.poll_wait_ms / 1000
        while True:
            await self._until(lambda: bool(self._held))
            asked_s, known = clock(), self._published
            policy = await self._patiently(
                "policy", lambda: self._client.get_policy(after=known, wait_ms=self._options.poll_wait_ms)
            )
            if policy is None:
                return
            if policy.version < known:
                await self._rewound(f"the published version fell from {known} to {policy.version}", self._held)
            self._published = policy.version
            await self._release()
            if self._held and clock() - asked_s < _EARLY_ANSWER * poll_s:
                await self._until(lambda: self._stopping, _EARLY_PAUSE_S)

    async def _rewound(self, how: str, works: Sequence[_Work]) -> None:
        """Give back groups of versions that a rewind of the run took back: the same numbers will mean other weights."""
        logger.warning("the run was rewound: %s; giving back %d groups", how, len(works))
        self._held = [work for work in self._held if work not in works]
        self._published = _UNKNOWN
        for work in works:
            await self._give_back(work, "lost_lineage", how)

    async def _release(self) -> None:
        """Pass on the held groups whose version is published now; give back those whose ticket has run out."""
        now_s = asyncio.get_running_loop().time()
        held, self._held = self._held, []
        late = [w for w in held if w.expires_at_s <= now_s and w.scored.policy_version_max > self._published]
        for work in late:
            await self._give_back(work, _ABOVE_PUBLISHED, "not published within the ticket's life")
        await self._make_ready([work for work in held if work not in late])

    # ------------------------------------------------------------------ giving back

    async def _give_back(self, work: _Work, reason: str, detail: str) -> None:
        """Return a ticket with its reason; one that cannot be returned expires by itself."""
        self._forget([work])
        self.progress.given_back[reason] += 1
        logger.warning("ticket %s is given back: %s: %s", work.ticket.ticket, reason, detail)
        try:
            await self._client.return_ticket(work.ticket.ticket, f"{reason}: {detail}"[:_REASON_CHARS])
        except NotFound:  # expired meanwhile, and perhaps issued to another producer
            logger.info("ticket %s was not out any more", work.ticket.ticket)
        except ReplaybufError as error:
            logger.warning("ticket %s could not be given back and will expire: %s", work.ticket.ticket, error)
        await self._wake()

    async def _give_back_rest(self, reason: str) -> None:
        works = list(self._works.values())
        if not works:
            return
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await asyncio.gather(*(self._give_back(work, reason, "the producer ends") for work in works))
        except TimeoutError:
            logger.warning("%d tickets could not be given back in %.1f s and will expire", len(works), GIVE_BACK_S)

    # ------------------------------------------------------------------ waiting

    async def _heed(self, stop: asyncio.Event) -> None:
        await stop.wait()
        logger.info("stopping: %d groups are in flight", len(self._works))
        self._stopping = True
        await self._wake()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._options.report_every_s)
            self._tell_status()

    def _tell_status(self) -> None:
        status = self.progress.line(time.time(), self._waiting)
        log_status(status)
        if self._options.metrics_file is not None:
            append_status(self._options.metrics_file, status)

    async def _patiently(self, what: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """Repeat a call until the service answers it; None where a stop came between two tries."""
        pauses_s = Backoff().pauses_s()
        while True:
            try:
                result = await call()
            except UnsupportedServer:
                raise
            except _AWAY_ERRORS as error:
                self._service_away = True
                pause_s = max(next(pauses_s), error.retry_after_s or 0.0)
                logger.warning("waiting %.1f s for the service (%s): %s", pause_s, what, error)
            else:
                self._service_away = False
                return result
            if await self._until(lambda: self._stopping, pause_s):
                return None

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for a change that makes the condition true; False where `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
