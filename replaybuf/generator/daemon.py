"""The generator's loop: tickets in, groups out, and nothing lost in between.

A slot (of `max_inflight_groups`) is held from a ticket's first to its last station, so all that waits is bounded::

    ticket ──► generating ──► scored ──► [stages] ──► Delivery (see there) ──► stored
                   └─────────────┴───────────┴──────────────┴──► given back, with a reason

Of these slots no more are generating than `Concurrency` says. Tasks, all in one TaskGroup: `_take_tickets`, one `_make`
per ticket, `_follow_load`, `_follow_held`, `_report`, and the loops of `Delivery`. A fault that is not one group's own
ends them all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replaybuf.client.client import AsyncClient
from replaybuf.errors import EngineAway, EngineFault, EngineUnfit, PromptFault, RewardFault, RunFinished
from replaybuf.generator.aggregation import Window
from replaybuf.generator.delivery import Delivery
from replaybuf.generator.engines import Sample, Sampling, request_seed
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.process_rewards import by_text
from replaybuf.generator.environments.scoring import Scores, Scoring
from replaybuf.generator.failures import Setbacks
from replaybuf.generator.fleet import Fleet, ServerStatus
from replaybuf.generator.fleet.concurrency import Bounds, Concurrency
from replaybuf.generator.groups import new_group
from replaybuf.generator.inflight import PATIENCE_S, Flight, Work
from replaybuf.generator.progress import Progress, append_status, log_status
from replaybuf.generator.prompts import Encoder, Prompt, PromptOrder
from replaybuf.generator.schedule import Schedule
from replaybuf.generator.stages import Rollout, Stage, Stages
from replaybuf.generator.staleness import StalenessBound
from replaybuf.generator.threads import asked_to_end, contained
from replaybuf.wire.contract import Ticket, WaitingAnswer
from replaybuf.wire.group import Group

logger = logging.getLogger(__name__)

FINISH_S = 2.0
"""After a stop, work in flight may still finish for so long; with `flight.GIVE_BACK_S` the process ends within 4 s."""
_ENGINE_POLL_S = 1.0
_LOAD_EVERY_S = 1.0
_HELD_LOOK_S = 1.0
_EARLY_ANSWER = 0.9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """How to generate.

    `producer` names this process to the service, `adapter` whose groups it makes ("" = of a run without adapters),
    `advantage` an estimator of `kernel.advantages`; `metadata` goes into every group, `compress` says whether frames
    are compressed. `poll_wait_ms`: how long the service may hold a call for tickets or the policy, short enough that a
    stop can wait for the answer and give its tickets back.
    `request_seed`: what the seed of every request is derived from; None = the engines choose their own.
    `max_inflight_groups` slots, of which `min_inflight_groups` up to all are generating, as the engines' gauges say;
    None = all, whatever they say. `service_patience_s`: how long a service that is away is waited for.
    """

    producer: str
    sampling: Sampling
    adapter: str = ""
    advantage: str = "grpo"
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_inflight_groups: int = 64
    min_inflight_groups: int | None = None
    compress: bool = False
    request_seed: int | None = None
    poll_wait_ms: int = 1000
    service_patience_s: float = PATIENCE_S
    report_every_s: float = 10.0
    metrics_file: Path | None = None

    @property
    def bounds(self) -> Bounds:
        """How many groups may be generated at the same time. Raises `Invalid`."""
        least = self.max_inflight_groups if self.min_inflight_groups is None else self.min_inflight_groups
        return Bounds(least, self.max_inflight_groups)


class Daemon:
    """Generates groups for the tickets of one run until it is stopped or the supply is finished; use once.

    `run` raises, in an exception group, what waiting cannot mend: `EngineUnfit`, `Unauthorized`, `NotFound` where the
    run is gone, `ServiceUnavailable` or `DataLost` where it stays so for `service_patience_s`, `ReplaybufError` where
    group after group fails.
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
        schedule: Schedule | None = None,
        staleness: StalenessBound | None = None,
    ) -> None:
        self._schedule = schedule
        self._staleness = staleness
        self._engine = engine
        self._scorer = scorer
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._options = options
        self._stages = Stages(stages, options.sampling.n) if stages else None
        self._flight = Flight(client, options.service_patience_s)
        self._delivery = Delivery(
            self._flight,
            self._learn_published,
            poll_wait_ms=options.poll_wait_ms,
            compress=options.compress,
            adapter=options.adapter,
        )
        engine.call_on_lost(self._delivery.lose_above)
        self._concurrency = Concurrency(options.bounds)
        self._generating = 0
        self._scoring = 0
        self._setbacks = Setbacks()
        self._denied: str | None = None

    @property
    def progress(self) -> Progress:
        """What was done so far."""
        return self._flight.progress

    @property
    def inflight(self) -> int:
        """Groups from their ticket to the buffer."""
        return len(self._flight.works)

    @property
    def generating(self) -> int:
        """Those of them that are in an engine or a reward."""
        return self._generating

    @property
    def limit(self) -> int:
        """As many may be, for now."""
        return self._concurrency.limit

    @property
    def published(self) -> int | None:
        """The published version; None where it is not known yet."""
        return self._delivery.published

    @property
    def engines(self) -> tuple[ServerStatus, ...]:
        """How every engine is doing."""
        return self._engine.status()

    async def reconfigure(self, *, temperature: float | None = None, **changes: Any) -> None:
        """Sample at another temperature, and take other values for fields of `DaemonOptions`, from the next ticket on.

        Those: `max_inflight_groups`, `min_inflight_groups`, `report_every_s`. Raises `Invalid`, then nothing changes.
        """
        if temperature is not None:
            changes["sampling"] = dataclasses.replace(self._options.sampling, temperature=temperature)
        options = dataclasses.replace(self._options, **changes)
        self._concurrency.set_bounds(options.bounds)
        self._options = options
        await self._flight.wake()

    @property
    def stages(self) -> dict[str, tuple[ServerStatus, ...]]:
        """How the servers of every stage are doing, by column."""
        return {} if self._stages is None else self._stages.status()

    @property
    def waiting(self) -> str | None:
        """Say why less is going on than could."""
        if self._flight.away:
            return self._flight.away
        if not self._engine.up:
            return self._engine.waiting
        if self._stages is not None and self._stages.waiting:
            return self._stages.waiting
        if self._setbacks.in_a_row > 1:
            return "groups_fail"
        return "awaiting_publication" if self._delivery.holding and not self._generating else self._denied

    async def run(self, stop: asyncio.Event) -> None:
        """Generate until `stop` is set or no ticket will come any more; tickets left then are given back."""
        flight, delivery = self._flight, self._delivery
        reason = "producer_fault"
        try:
            async with asyncio.TaskGroup() as self._tasks:
                following = (delivery.follow_policy(), self._follow_held(), self._follow_load())
                loops = (self._take_tickets(), delivery.append_ready(), *following, self._report(), self._heed(stop))
                background = [self._tasks.create_task(loop) for loop in loops]
                if self._schedule is not None:
                    evaluating = self._schedule.follow(flight, self._engine, lambda: delivery.published)
                    background.append(self._tasks.create_task(evaluating))
                if self._staleness is not None:
                    background.append(self._tasks.create_task(self._staleness.follow(flight, self._engine)))
                await flight.until(lambda: flight.stopping or flight.done)
                if not flight.done:
                    await flight.until(lambda: flight.done, FINISH_S)
                making = [work.task for work in flight.works.values() if work.task is not None]
                for task in (*background, *making):
                    task.cancel()
            reason = "shutdown"
        finally:
            await flight.give_back_rest(reason)
            self._tell_status()

    def _learn_published(self, version: int) -> None:
        self._engine.learn_published(version)
        if self._stages is not None:
            self._stages.learn_published(version)

    # ------------------------------------------------------------------ tickets

    async def _take_tickets(self) -> None:
        flight, clock, last_s = self._flight, asyncio.get_running_loop().time, -math.inf
        while not (flight.stopping or flight.no_more_tickets):
            await flight.until(lambda: flight.stopping or self._room > 0)
            await self._rest()
            await flight.gather(lambda: self._room, lambda: self.limit, last_s)
            if not flight.stopping and await self._engine_up():
                await self._take_some()
                last_s = clock()
        flight.no_more_tickets = True
        await flight.wake()

    async def _rest(self) -> None:
        """Wait after setbacks; a group that began before them may end that."""
        while not self._flight.stopping and (rest_s := self._setbacks.rest_s(asyncio.get_running_loop().time())) > 0:
            await self._flight.until(lambda: self._flight.stopping or not self._setbacks.in_a_row, rest_s)

    @property
    def _room(self) -> int:
        together = 1 if self._setbacks.in_a_row else self.limit
        return min(self._options.max_inflight_groups - self.inflight, together - self._generating)

    async def _engine_up(self) -> bool:
        """Wait a moment for the engine: a ticket is worth taking only when its group can be made."""
        try:
            await self._engine.wait_ready(_ENGINE_POLL_S)
            if self._stages is not None:
                await self._stages.wait_ready(_ENGINE_POLL_S)
        except EngineAway:
            return False
        return True

    async def _take_some(self) -> None:
        flight, options, clock = self._flight, self._options, asyncio.get_running_loop().time
        asked_s, count = clock(), self._room
        try:
            answer = await flight.patiently(
                "tickets",
                lambda: flight.take_tickets(options.producer, count, options.adapter, options.poll_wait_ms),
            )
        except RunFinished:
            flight.no_more_tickets = True
            return
        if answer is None:
            return
        self._delivery.learn_published(answer.published_version)
        for ticket in answer.tickets:
            self._start(ticket)
        self._denied = None
        if answer.waiting is not None and not answer.tickets:
            self._denied = answer.waiting.reason
            await self._heed_denial(answer.waiting, clock() - asked_s)

    async def _heed_denial(self, waiting: WaitingAnswer, took_s: float) -> None:
        flight = self._flight
        if waiting.reason == "finished" and waiting.blocked_on != "producers":
            logger.info("no more tickets: the run is finished; %d groups are still in flight", len(flight.works))
            flight.no_more_tickets = True
        elif took_s < _EARLY_ANSWER * self._options.poll_wait_ms / 1000:
            # Answered before its time, so asking again at once would only be answered at once again.
            await flight.until(lambda: flight.stopping, waiting.retry_after_s)

    def _start(self, ticket: Ticket) -> None:
        work = self._flight.hold(ticket)
        if not self._flight.stopping:  # else it came with the last answer, and goes back with the rest
            self._generating += 1
            work.task = self._tasks.create_task(self._make(work))

    # ------------------------------------------------------------------ groups

    async def _make(self, work: Work) -> None:
        try:
            work.group = await self._generated(work.ticket)
            if self._stages is None:  # else it is not whole yet
                self._setbacks.succeeded()
        except EngineUnfit:
            raise
        except (EngineFault, PromptFault, RewardFault) as fault:
            await self._fail(work, fault)
        except asyncio.CancelledError:
            if asked_to_end():
                raise
            # Left alone, this task would count as cancelled, the TaskGroup would ignore it, and its slot be lost.
            await self._fail(work, RewardFault("reward_raised", "something let out a CancelledError of its own"))
        finally:
            self._generating -= 1
        await contained(self._pass_on(work))

    async def _generated(self, ticket: Ticket) -> Group:
        options = self._options
        prompt = self._prompts.at(ticket.prompt_index)
        if isinstance(self._scorer, Episodes):
            check_use = self._engine.check_use
            sample, scores = await self._scorer.play(self._engine, prompt, self._sampling(ticket), check_use)
        else:
            sample = await self._engine.generate(prompt.token_ids, self._sampling(ticket))
            scores = await self._scored(self._scorer, prompt, sample)
        return new_group(
            ticket,
            prompt,
            sample,
            scores,
            temperature=options.sampling.temperature,
            advantage=options.advantage,
            metadata=options.metadata,
            adapter=options.adapter,
        )

    async def _scored(self, scorer: Scoring, prompt: Prompt, sample: Sample) -> Scores:
        clock = asyncio.get_running_loop().time
        self._scoring += 1
        began_s = clock()
        try:
            scores = await scorer.score(prompt, self._tokenizer.decode(sample.completions))
        finally:
            self._scoring -= 1
            self.progress.reward_s.add(clock() - began_s)
        return by_text(prompt, scores, sample.completions, self._tokenizer) if scores.process_rewards else scores

    def _sampling(self, ticket: Ticket) -> Sampling:
        options = self._options
        if options.request_seed is None:
            return options.sampling
        seed = request_seed(options.request_seed, ticket.prompt_index, ticket.attempt)
        return dataclasses.replace(options.sampling, seed=seed)

    async def _fail(self, work: Work, fault: EngineFault | PromptFault | RewardFault) -> None:
        """Give a ticket back; raises `ReplaybufError` where too many failed in a row."""
        clock = asyncio.get_running_loop().time
        self._setbacks.failed(fault.reason, fault.detail, work.taken_at_s, clock())
        await self._flight.give_back(work, fault.reason, fault.detail)
        self._setbacks.check(fault.detail)

    async def _pass_on(self, work: Work) -> None:
        """Deliver a group, through the stages where there are any.

        They get what fills a window, or what is left when nothing else is being generated that could fill it.
        """
        if self._stages is None:
            await self._delivery.put([work] if work.group is not None else [])
            return
        taken = self._stages.add(work.group) if work.group is not None else None
        if taken is None and not self._generating:
            taken = self._stages.flush()
        if taken is None:
            await self._flight.wake()  # there may be room to generate another
        else:
            await self._complete(self._stages, *taken)

    async def _complete(self, stages: Stages, groups: list[Group], window: Window[Rollout]) -> None:
        works = [self._flight.works[group.ticket or ""] for group in groups]
        whole: list[Work] = []
        for work, made in zip(works, await stages.complete(groups, window), strict=True):
            if isinstance(made, EngineFault):
                await self._fail(work, made)
            else:
                work.group = made
                whole.append(work)
                self._setbacks.succeeded()
        await self._delivery.put(whole)

    # ------------------------------------------------------------------ stop and status

    async def _heed(self, stop: asyncio.Event) -> None:
        await stop.wait()
        logger.info("stopping: %d groups are in flight", len(self._flight.works))
        await self._flight.stop()

    async def _follow_load(self) -> None:
        while True:
            await asyncio.sleep(_LOAD_EVERY_S)
            loads = await self._engine.read_loads() if self._concurrency.adaptive else []
            sampling = self._generating - self._scoring
            if loads and self._concurrency.update(loads, sampling=sampling, scoring=self._scoring):
                await self._flight.wake()

    async def _follow_held(self) -> None:
        """Loop: while groups wait for their version to be published, see that engines have not lost it."""
        while True:
            await asyncio.sleep(_HELD_LOOK_S)
            if self._delivery.holding:
                await self._engine.find_lost_versions()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._options.report_every_s)
            self._tell_status()

    def _tell_status(self) -> None:
        status = self.progress.line(time.time(), self.waiting, self.engines, self.stages)
        log_status(status)
        if self._options.metrics_file is not None:
            append_status(self._options.metrics_file, status)
