"""The generator's main loop: take tickets, make groups, deliver them, and return every ticket that fails.

A ticket holds one of `max_inflight_groups` slots from start to end, so everything that waits is bounded::

    ticket ──► generating ──► scored ──► [stages] ──► Delivery ──► stored
                   └─────────────┴───────────┴───────────┴──► ticket returned, with a reason

`Concurrency` limits how many of these groups are generating. All tasks run in one TaskGroup; a fault that is not one
group's own ends them all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from replaybuf.client.client import AsyncClient
from replaybuf.client.producers.failures import describe_failure
from replaybuf.errors import (
    EngineAway,
    EngineFault,
    EngineUnfit,
    GroupAborted,
    PromptFault,
    RewardFault,
    RunFinished,
    counted,
    first_error,
)
from replaybuf.generator.daemon_options import DaemonOptions
from replaybuf.generator.delivery import EARLY_SHARE, Delivery
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.scoring import Scoring
from replaybuf.generator.failures import PRODUCER_FAULT, Failures
from replaybuf.generator.fleet import Fleet, ServerStatus
from replaybuf.generator.fleet.concurrency import Concurrency
from replaybuf.generator.group_maker import GroupMaker
from replaybuf.generator.heartbeats import Heartbeats
from replaybuf.generator.inflight import InFlight, Job
from replaybuf.generator.progress import Progress, append_status, log_status
from replaybuf.generator.prompts import Encoder, PromptOrder
from replaybuf.generator.stage.aggregation import Window
from replaybuf.generator.stage.stages import Rollout, Stage, Stages, rollouts_of, with_columns
from replaybuf.generator.staleness import Doomed
from replaybuf.generator.threads import contained, was_cancelled
from replaybuf.kernel.state.tickets import prompt_key
from replaybuf.tracing import spans
from replaybuf.wire.contract import Ticket, WaitingAnswer

logger = logging.getLogger(__name__)

FINISH_S = 2.0
"""Time for groups in flight to finish after a stop; with `inflight.RETURN_S` the process ends within 4 s."""
_ENGINE_POLL_S = 1.0
_LOAD_EVERY_S = 1.0
_HELD_EVERY_S = 1.0


class Follower(Protocol):
    """A loop beside the generator's own, such as evaluations."""

    async def follow(self, inflight: InFlight, fleet: Fleet, published: Callable[[], int | None]) -> None:
        """Run until a stop; `published` returns the published version, None while unknown."""


class Daemon:
    """Generates groups for the tickets of one run until a stop or the end of the prompts; use it once.

    `run` raises, in an exception group, faults that waiting does not repair: `EngineUnfit`, `Unauthorized`, `NotFound`
    for a deleted run, `ServiceUnavailable` or `DataLost` after `service_patience_s`, and `ReplaybufError` after too
    many failed groups in a row.
    """

    def __init__(
        self,
        client: AsyncClient,
        engine: Fleet,
        scorer: Scoring | Episodes,
        prompts: PromptOrder,
        tokenizer: Encoder,
        options: DaemonOptions,
        stages: Sequence[Stage] = (),
        followers: Sequence[Follower] = (),
    ) -> None:
        self._engine = engine
        self._options = options
        self._stages = Stages[Job](stages, options.sampling.n) if stages else None
        self._heartbeats = Heartbeats(options.producer, lambda: self.waiting, lambda: self._options.max_inflight_groups)
        self._followers = (*followers, self._heartbeats, Doomed())
        self._inflight = InFlight(client, options.service_patience_s)
        self._maker = GroupMaker(
            engine,
            scorer,
            prompts,
            tokenizer,
            self._inflight.progress.reward_s,
            per_request=options.rollouts_per_request,
            least=options.min_group_size,
            length_penalty=options.length_penalty,
        )
        self._delivery = Delivery(
            self._inflight,
            self._learn_published,
            poll_wait_ms=options.poll_wait_ms,
            compress=options.compress,
            adapter=options.adapter,
        )
        engine.call_on_lost(self._delivery.lose_above)
        self._concurrency = Concurrency(options.bounds)
        self._generating = 0
        self._failures = Failures()
        self._denied: str | None = None

    @property
    def progress(self) -> Progress:
        """Counters since the start."""
        return self._inflight.progress

    @property
    def inflight(self) -> int:
        """Number of groups from their ticket to their append."""
        return len(self._inflight.jobs)

    @property
    def generating(self) -> int:
        """Number of groups in an engine or a reward."""
        return self._generating

    @property
    def limit(self) -> int:
        """Current limit of `generating`."""
        return self._concurrency.limit

    @property
    def published(self) -> int | None:
        """The published version; None while unknown."""
        return self._delivery.published

    @property
    def engines(self) -> tuple[ServerStatus, ...]:
        """Status of every engine."""
        return self._engine.status()

    @property
    def stages(self) -> dict[str, tuple[ServerStatus, ...]]:
        """Status of the servers of every stage, by column."""
        return {} if self._stages is None else self._stages.status()

    @property
    def waiting(self) -> str | None:
        """Why the generator does less than it could; None where it does not."""
        if self._inflight.retry_reason:
            return self._inflight.retry_reason
        if not self._engine.up:
            return self._engine.waiting
        if self._stages is not None and self._stages.waiting:
            return self._stages.waiting
        if self._failures.in_a_row > 1:
            return "groups_fail"
        return "awaiting_publication" if self._delivery.holding and not self._generating else self._denied

    async def reconfigure(self, *, temperature: float | None = None, **changes: Any) -> None:
        """Apply another temperature and other values of `DaemonOptions` fields, from the next ticket on.

        The fields: `max_inflight_groups`, `min_inflight_groups`, `report_every_s`. Raises `Invalid`, and changes
        nothing then.
        """
        if temperature is not None:
            changes["sampling"] = dataclasses.replace(self._options.sampling, temperature=temperature)
        options = dataclasses.replace(self._options, **changes)
        self._concurrency.set_bounds(options.bounds)
        self._options = options
        await self._inflight.notify()

    async def run(self, stop: asyncio.Event) -> None:
        """Generate until `stop` is set or no ticket will come; then return the remaining tickets."""
        inflight, delivery, reason = self._inflight, self._delivery, PRODUCER_FAULT
        try:
            async with asyncio.TaskGroup() as self._tasks:
                loops = [
                    self._take_tickets(),
                    delivery.append_ready(),
                    delivery.follow_policy(),
                    self._check_held(),
                    self._follow_load(),
                    self._report(),
                    self._follow_stop(stop),
                    *(
                        follower.follow(inflight, self._engine, lambda: delivery.published)
                        for follower in self._followers
                    ),
                ]
                background = [self._tasks.create_task(loop) for loop in loops]
                await inflight.until(lambda: inflight.stopping or inflight.done)
                if not inflight.done:
                    await inflight.until(lambda: inflight.done, FINISH_S)
                making = [job.task for job in inflight.jobs.values() if job.task is not None]
                for task in (*background, *making):
                    task.cancel()
            reason = "shutdown"
        except Exception as error:
            inflight.failure = describe_failure(reason, first_error(error))
            raise
        finally:
            last = self._heartbeats.report_failure(inflight, self._engine)
            await asyncio.gather(inflight.return_all(reason), last)
            self._report_once()

    def _learn_published(self, version: int) -> None:
        self._engine.learn_published(version)
        if self._stages is not None:
            self._stages.learn_published(version)

    # ------------------------------------------------------------------ tickets

    async def _take_tickets(self) -> None:
        inflight, clock, last_s = self._inflight, asyncio.get_running_loop().time, -math.inf
        while not (inflight.stopping or inflight.no_more_tickets):
            await inflight.until(lambda: inflight.stopping or self._free_slots > 0)
            await self._rest()
            await inflight.gather(lambda: self._free_slots, lambda: self.limit, last_s)
            if not inflight.stopping and await self._engines_ready():
                with spans.operation("take tickets"):
                    await self._take_some()
                last_s = clock()
        inflight.no_more_tickets = True
        await inflight.notify()

    async def _rest(self) -> None:
        """Pause after failures; a success of a group that started before them ends the pause."""
        inflight, clock = self._inflight, asyncio.get_running_loop().time
        while not inflight.stopping and (rest_s := self._failures.rest_s(clock())) > 0:
            await inflight.until(lambda: inflight.stopping or not self._failures.in_a_row, rest_s)

    @property
    def _free_slots(self) -> int:
        limit = 1 if self._failures.in_a_row else self.limit
        return min(self._options.max_inflight_groups - self.inflight, limit - self._generating)

    async def _engines_ready(self) -> bool:
        """Wait a moment for the engines: a ticket taken without an engine would only expire."""
        try:
            await self._engine.wait_ready(_ENGINE_POLL_S)
            if self._stages is not None:
                await self._stages.wait_ready(_ENGINE_POLL_S)
        except EngineAway:
            return False
        return True

    async def _take_some(self) -> None:
        inflight, options, clock = self._inflight, self._options, asyncio.get_running_loop().time
        asked_s, count = clock(), self._free_slots
        try:
            answer = await inflight.retry(
                "tickets",
                lambda: inflight.take_tickets(
                    options.producer, count, options.adapter, options.poll_wait_ms, options.sampling.max_tokens
                ),
            )
        except RunFinished:
            inflight.no_more_tickets = True
            return
        if answer is None:
            return
        self._delivery.learn_published(answer.published_version)
        for ticket in answer.tickets:
            self._start(ticket)
        self._denied = None
        if answer.waiting is not None and not answer.tickets:
            self._denied = answer.waiting.reason
            await self._wait_after_denial(answer.waiting, clock() - asked_s)

    async def _wait_after_denial(self, waiting: WaitingAnswer, took_s: float) -> None:
        inflight = self._inflight
        if waiting.reason == "finished" and waiting.blocked_on == "nothing":
            logger.info(
                "no more tickets: the run is finished; %s still in flight", counted(len(inflight.jobs), "group")
            )
            inflight.no_more_tickets = True
        elif took_s < EARLY_SHARE * self._options.poll_wait_ms / 1000:
            await inflight.until(lambda: inflight.stopping, waiting.retry_after_s)

    def _start(self, ticket: Ticket) -> None:
        job = self._inflight.add(ticket)
        if not self._inflight.stopping:  # otherwise it came with the last answer, and `return_all` returns it
            self._generating += 1
            group_id = prompt_key(self._options.adapter, ticket.prompt_index, ticket.reissue)
            job.span = spans.begin_group(group_id, attempt=ticket.attempt, producer=self._options.producer)
            job.task = self._tasks.create_task(self._make(job))

    # ------------------------------------------------------------------ groups

    async def _make(self, job: Job) -> None:
        try:
            options = self._options
            with spans.within(job.span):
                job.group = await self._maker.make(
                    job,
                    options.sampling,
                    request_seed_base=options.request_seed,
                    advantage=options.advantage,
                    metadata=options.metadata,
                    adapter=options.adapter,
                )
            if self._stages is None:  # otherwise stages may still fail
                self._failures.record_success()
        except EngineUnfit:
            raise
        except (EngineFault, PromptFault, RewardFault) as fault:
            await self._fail(job, fault)
        except asyncio.CancelledError:
            if not self._inflight.ended_by_abort(job) and was_cancelled():
                raise
            # Raised by the environment. Passed on, the TaskGroup would ignore it, and the job's slot would be lost.
            raised = RewardFault("reward_raised", "the reward raised CancelledError")
            await self._fail(job, job.aborted or raised)
        finally:
            self._generating -= 1
        await contained(self._pass_on(job))

    async def _fail(self, job: Job, fault: EngineFault | PromptFault | RewardFault) -> None:
        """Return a ticket. Raises `ReplaybufError` after too many failures in a row."""
        now_s = asyncio.get_running_loop().time()
        if isinstance(fault, GroupAborted):
            sampling = self._options.sampling
            self.progress.record_aborted(sampling.n, sampling.max_tokens, now_s - job.started_at_s)
        self._failures.record_failure(fault.reason, fault.detail, job.started_at_s, now_s)
        await self._inflight.return_ticket(job, fault.reason, fault.detail, fault)
        self._failures.check(fault.detail)

    async def _pass_on(self, job: Job) -> None:
        """Deliver a group, through the stages if there are any.

        Stages get a full window, or the rest when no group is being generated that could fill the window.
        """
        if self._stages is None:
            await self._delivery.put([job] if job.group is not None else [])
            return
        ready = self._stages.add(job, rollouts_of(job.group)) if job.group is not None else None
        if ready is None and not self._generating:
            ready = self._stages.flush()
        if ready is None:
            await self._inflight.notify()  # a slot for generating is free
        else:
            await self._complete(self._stages, ready)

    async def _complete(self, stages: Stages[Job], window: Window[Job, Rollout]) -> None:
        groups = [job.group for job in window.groups if job.group is not None]
        columns = await stages.compute(window, max(group.policy_version for group in groups))
        completed: list[Job] = []
        for job, group, outcome in zip(window.groups, groups, columns, strict=True):
            if isinstance(outcome, EngineFault):
                await self._fail(job, outcome)
            else:
                job.group = with_columns(group, outcome)
                completed.append(job)
                self._failures.record_success()
        await self._delivery.put(completed)

    # ------------------------------------------------------------------ other loops

    async def _follow_stop(self, stop: asyncio.Event) -> None:
        await stop.wait()
        logger.info("stopping: %s in flight", counted(len(self._inflight.jobs), "group"))
        await self._inflight.stop()

    async def _follow_load(self) -> None:
        while True:
            await asyncio.sleep(_LOAD_EVERY_S)
            loads = await self._engine.read_loads() if self._concurrency.adaptive else []
            scoring = self._maker.scoring
            if loads and self._concurrency.update(loads, sampling=self._generating - scoring, scoring=scoring):
                await self._inflight.notify()

    async def _check_held(self) -> None:
        """Loop: while groups wait for the publication of their version, check that the engines still have it."""
        while True:
            await asyncio.sleep(_HELD_EVERY_S)
            if self._delivery.holding:
                await self._engine.find_lost_versions()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._options.report_every_s)
            self._report_once()

    def _report_once(self) -> None:
        status = self.progress.status(time.monotonic(), time.time(), self.waiting, self.engines, self.stages)
        log_status(status)
        if self._options.metrics_file is not None:
            append_status(self._options.metrics_file, status)
