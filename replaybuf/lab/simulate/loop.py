"""Event loop of a simulation: producers, trainer and ticket deadlines as events in one heap.

Order of events at one time: groups arrive, the trainer's step or publication ends, tickets expire, the trainer requests
its batch, free slots request tickets. Groups arrive at the nearest round (every `Workload.round_s`), so thousands of
slots cost a few decisions per step.

Slot:    ticket -> generate -> group stored, or ticket given back, or lost -> free
Trainer: request -> train (a prefetch at its start) -> ack -> publish if a version is due -> request
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from replaybuf.errors import StrategyFault, counted
from replaybuf.kernel.state.limits import Load
from replaybuf.kernel.state.tickets import Ticket
from replaybuf.lab.simulate.engines import Engines
from replaybuf.lab.simulate.figures import Figures, Meter, changed_options
from replaybuf.lab.simulate.virtual import VirtualRun
from replaybuf.lab.simulate.workload import Attempt, Supply
from replaybuf.plugins.time_limit import CALL_LIMIT_S
from replaybuf.wire.config import RunConfig
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.ledger import BatchRecord
from replaybuf.wire.wait_reasons import WAIT_REASONS

logger = logging.getLogger(__name__)

ROUNDS_PER_STEP = 10
_SAMPLES_PER_STEP = 10
PACKED_BATCHES = 8
"""Number of batches that are packed, spread evenly over the simulation."""
_FRUITLESS = 20
"""A simulation ends after so many batches' worth of groups without a batch."""

_ENDED, _GENERATED, _TRAINED, _PUBLISHED, _EXPIRES, _OVERDUE = range(6)


class Job(NamedTuple):
    """A ticket, the policy version at its start, and the attempt."""

    ticket: Ticket
    version: int
    attempt: Attempt


class Simulation:
    """One run of `steps` steps with one strategy; `meter` measures it."""

    def __init__(
        self, config: RunConfig, supply: Supply, steps: int, report: Callable[[int], None] | None = None
    ) -> None:
        self.run = VirtualRun(config, supply.workload.ranks)
        self.meter = Meter()
        self.ended: str | None = None
        self._supply = supply
        self._workload = supply.workload
        self._steps = steps
        self._report = report
        step_s, round_s = self._cycle_s()
        self._round_s = self._workload.round_s or round_s
        self._sample_every_s, self._sample_at_s = step_s / _SAMPLES_PER_STEP, 0.0
        self._events: list[tuple[float, int, int, Any]] = []
        self._serial = itertools.count()
        self._free = self._workload.slots
        self._engines = Engines[Job](self._workload.slots, self._workload.load_share)
        self._generated_s = math.inf
        self._training: BatchRecord | None = None
        self._ready: dict[int, BatchRecord] = {}
        self._asking = True
        self._alarmed = -1
        self._last_wait: tuple[str, float] | None = None
        self._group_size = len(supply.lengths(0, 1))
        self._attempts: dict[int, int] = {}
        self._held: list[Job] = []
        self._fruitless = 0
        self._most_fruitless = _FRUITLESS * (self._groups_per_batch() + self._workload.slots)

    def _groups_per_batch(self) -> int:
        batch = self.run.config.batch
        return batch.groups_per_batch or math.ceil((self.run.state.token_budget or 0) / self._supply.tokens_per_group)

    def _cycle_s(self) -> tuple[float, float]:
        """Estimate the time of a step, that of trainer or producers, and a round that is short against both."""
        w, groups = self._workload, self._groups_per_batch()
        trains_s = w.train_s + w.train_token_s * groups * self._supply.tokens_per_group + w.publish_s
        longer, shorter = sorted((trains_s, groups * self._supply.duration_s / w.slots), reverse=True)
        return longer, max(shorter, longer / ROUNDS_PER_STEP) / ROUNDS_PER_STEP

    # ------------------------------------------------------------------ the clock

    def simulate(self) -> Figures:
        """Run to the end of the last step, or until nothing more can happen. Raises `StrategyFault`."""
        self._act()
        while self.ended is None:
            if not self._events:
                self.ended = self._last_wait[0] if self._last_wait else "no_producers"
                break
            self._advance()
        self._account_wait(None)
        return self._figures()

    def _advance(self) -> None:
        """Go to the time of the next events and process them."""
        now = self._events[0][0]
        self.meter.idle_slot_s += self._free * (now - self.run.now_s)
        self.run.now_s = now
        if now >= self._sample_at_s:
            self._sample_at_s = now + self._sample_every_s
            self._sample()
        ended: list[Job] = []
        while self._events and self._events[0][0] == now:
            _, kind, _, what = heapq.heappop(self._events)
            if kind == _ENDED:
                ended.append(what)
            elif kind == _GENERATED:
                ended += self._generated()
            else:
                self._finish(ended)
                ended = []
                if kind == _TRAINED:
                    self._trained()
                elif kind == _PUBLISHED:
                    self._published()
                elif kind == _EXPIRES:
                    self.run.expire_tickets()
        self._finish(ended)
        if self.run.state.step >= self._steps and self._asking:
            self.ended = "steps"
        else:
            self._act()

    def _act(self) -> None:
        """Let everybody who waits ask again."""
        if self._asking:
            self._ask()
        while self._retry_held() and self._asking:
            self._ask()
        if self._free and self.ended is None:
            self._start(self.run.take_tickets(self._free))
        self._count_evicted()

    def _at(self, at_s: float, kind: int, what: Any = None) -> None:
        heapq.heappush(self._events, (at_s, kind, next(self._serial), what))

    # ------------------------------------------------------------------ producers

    def _start(self, tickets: list[Ticket]) -> None:
        now, version = self.run.now_s, self.run.published_version
        ttl_s = self.run.book.ttl_s
        for ticket in tickets:
            attempt = self._supply.attempt(ticket.prompt_index, ticket.attempt)
            job = Job(ticket, version, attempt)
            if self._workload.load_share:
                self._engines.start(now, attempt.duration_s - attempt.reward_s, job)
                ends_s = now + attempt.duration_s + self._round_s  # at the latest
            else:
                ends_s = self._round(now + attempt.duration_s)
                self._at(ends_s, _ENDED, job)
            if attempt.fate == "lost" or ends_s - now >= ttl_s:
                self._at(now + ttl_s, _EXPIRES)
        self._free -= len(tickets)
        self._expect_generated()

    def _round(self, end_s: float) -> float:
        """Return the round nearest to `end_s`, so that no length is favoured, but later than now."""
        return max(round(end_s / self._round_s), math.floor(self.run.now_s / self._round_s) + 1) * self._round_s

    def _expect_generated(self) -> None:
        """Look when the next group has generated: each start and each end changes that, and a look may be in vain."""
        end_s = self._engines.next_end_s()
        if end_s is not None and (round_s := self._round(end_s)) < self._generated_s:
            self._generated_s = round_s
            self._at(round_s, _GENERATED)

    def _generated(self) -> list[Job]:
        """Return the groups that end in this round; others wait for their rewards."""
        now, ended = self.run.now_s, list[Job]()
        if now != self._generated_s:  # an earlier look took its place
            return ended
        self._generated_s, latest_s = math.inf, now + self._round_s / 2
        for generated_s, job in self._engines.finish(now, latest_s):
            end_s = generated_s + job.attempt.reward_s
            if end_s <= latest_s:
                ended.append(job)
            else:
                self._at(self._round(end_s), _ENDED, job)
        self._expect_generated()
        return ended

    def _finish(self, jobs: list[Job]) -> None:
        """Store generated groups; give back the tickets of failed and rejected ones."""
        if not jobs:
            return
        self._free += len(jobs)
        self._fruitless += len(jobs)
        if self._fruitless > self._most_fruitless:
            self.ended = f"nothing usable in {counted(self._fruitless, 'group')}"
        run, meter, arrived = self.run, self.meter, []
        for job in jobs:
            attempt = job.attempt
            meter.generated(attempt.tokens, self._group_size)
            reason: str | None = attempt.fate
            if reason == "stored":
                rejection = run.rejection(attempt.tokens, attempt.longest_tokens)
                reason = rejection.reason if rejection else None
            if reason is None:
                arrived.append(job)
                continue
            meter.wasted_group(reason, attempt.tokens, self._group_size)
            if reason != "lost":
                run.return_ticket(job.ticket, reason)
        self._store(arrived)

    def _retry_held(self) -> bool:
        """Retry groups for which there was no room; return whether any was stored."""
        held, self._held = self._held, []
        self._free += len(held)
        self._store(held)
        return len(self._held) < len(held)

    def _store(self, jobs: list[Job]) -> None:
        """Store groups as far as there is room; the others occupy their slots until then."""
        jobs_by_prompt: dict[int, Job] = {}
        for job in jobs:
            prompt = job.attempt.prompt_index
            if prompt in jobs_by_prompt or self.run.has_group(prompt):
                self.meter.wasted_group("duplicate", job.attempt.tokens, self._group_size)
            else:
                jobs_by_prompt[prompt] = job
        if not jobs_by_prompt:
            return
        entries = self._supply.entries([job.attempt for job in jobs_by_prompt.values()])
        sizes = zip(entries["tokens"].tolist(), entries["frame_bytes"].tolist(), strict=True)
        fits = self.run.fitting([Load(1, *size) for size in sizes])
        jobs = list(jobs_by_prompt.values())
        self._held += jobs[fits:]
        self._free -= len(jobs) - fits
        self.meter.held.update(job.attempt.prompt_index for job in jobs[fits:])
        if fits:
            self._append(jobs[:fits], entries[:fits])

    def _append(self, jobs: list[Job], entries: npt.NDArray[Any]) -> None:
        entries["policy_version"] = [job.version for job in jobs]
        entries["policy_version_max"] = self.run.published_version
        entries["staleness_at_write"] = self.run.published_version - entries["policy_version"]
        entries["arrival_s"] = self.run.now_s
        self._attempts |= {f.attempt.prompt_index: f.attempt.number for f in jobs if f.attempt.number > 1}
        self.run.append(entries)
        self.meter.tokens_live_max = max(self.meter.tokens_live_max, self.run.state.pool.live.totals().tokens)

    def _count_evicted(self) -> None:
        for reason, tokens, rollouts in self.run.take_evicted():
            for size, count in zip(tokens.tolist(), rollouts.tolist(), strict=True):
                self.meter.wasted_group(reason, size, count)

    # ------------------------------------------------------------------ trainer

    def _ask(self) -> None:
        """Request the batch of the next unacked step; train it if there is one."""
        step = self.run.state.step
        outcome = self._ready.pop(step, None) or self._assemble(step)
        self._account_wait(outcome)
        if isinstance(outcome, WaitingAnswer):
            if outcome.reason == "finished":
                self.ended = "finished"
            left_s = self.run.left_s(step)
            if left_s and step > self._alarmed:
                self._alarmed = step
                self._at(self.run.now_s + left_s, _OVERDUE)
            return
        self._asking, self._training, w = False, outcome, self._workload
        seconds = w.train_s + w.train_token_s * outcome.tokens
        self.meter.train_s += seconds
        self._at(self.run.now_s + seconds, _TRAINED)
        if w.prefetch and step + 1 < self._steps:
            ahead = self._assemble(step + 1)
            if isinstance(ahead, BatchRecord):
                self._ready[step + 1] = ahead

    def _assemble(self, step: int) -> BatchRecord | WaitingAnswer:
        outcome = self.run.batch(step)
        if isinstance(outcome, BatchRecord):
            self._fruitless = 0
            self.meter.batch(outcome, self._group_size)
            if step % max(1, self._steps // PACKED_BATCHES) == 0:
                prompts = [group.prompt_index for group in outcome.groups if group.prompt_index is not None]
                lengths = np.concatenate([self._supply.lengths(p, self._attempts.get(p, 1)) for p in prompts])
                self.meter.pack(lengths, self.run.selector.inputs.seq_len, self._workload.ranks)
        return outcome

    def _trained(self) -> None:
        run, w, trained = self.run, self._workload, self._training
        self._training = None
        waited = self.meter.waited_s.items()
        feedback = None
        if trained and run.selector.inputs.plugins.observed is not None:  # it observes
            feedback = self._supply.feedback(trained.step) or run.feedback(trained)
        run.ack(sum(seconds for reason, seconds in waited if WAIT_REASONS[reason].blocked_on != "trainer"), feedback)
        if self._report:
            self._report(run.state.step)
        if run.state.step % w.checkpoint_steps == 0:
            run.checkpoint()
        if run.config.version_of(run.state.step) > run.published_version:
            self.meter.publish_s += w.publish_s
            self._at(self.run.now_s + w.publish_s, _PUBLISHED)
        else:
            self._asking = True

    def _published(self) -> None:
        self.run.publish()
        self._asking = True

    def _account_wait(self, outcome: object) -> None:
        """Count the time since the last waiting answer under its reason."""
        now = self.run.now_s
        if self._last_wait:
            reason, since_s = self._last_wait
            self.meter.waited_s[reason] += now - since_s
        self._last_wait = (outcome.reason, now) if isinstance(outcome, WaitingAnswer) else None

    # ------------------------------------------------------------------ measuring

    def _sample(self) -> None:
        live = self.run.state.pool.live.totals()
        self.meter.buffer(self.run.now_s, live.groups, live.tokens, self.run.book.out)

    def _figures(self) -> Figures:
        run, meter, state = self.run, self.meter, self.run.state
        seconds = max(run.now_s, 1e-12)
        waited = {reason: s / seconds for reason, s in sorted(meter.waited_s.items()) if s > 0}
        generated, used, dropped = meter.lengths()
        uses, waste = state.totals.histograms.groups_by_uses(), meter.waste()
        staleness = {age: count for age, count in sorted(state.totals.used_staleness.items()) if count}
        live_mean, live_max = meter.live()
        strategy = run.config.strategy
        return Figures(
            strategy=strategy.name,
            options=strategy.options,
            changed_options=changed_options(run.selector.strategy.options),
            ended=self.ended or "",
            steps=state.step,
            seconds=run.now_s,
            train_share=meter.train_s / seconds,
            publish_share=meter.publish_s / seconds,
            wait_share=sum(waited.values()),
            wait_by_reason=waited,
            idle_share=meter.idle_slot_s / (seconds * self._workload.slots),
            generated_groups=meter.generated_groups,
            generated_tokens=meter.generated_tokens,
            stored_groups=state.stored,
            used_tokens=meter.used_tokens,
            staleness=staleness,
            staleness_mean=sum(age * n for age, n in staleness.items()) / max(1, sum(staleness.values())),
            uses=uses,
            waste=waste,
            waste_share=sum(part.tokens for part in waste.values()) / max(1, meter.generated_tokens),
            live_mean=live_mean,
            live_max=live_max,
            tokens_live_max=meter.tokens_live_max,
            held_groups=len(meter.held),
            buffer=meter.series(),
            generated_lengths=generated,
            used_lengths=used,
            dropped_lengths=dropped,
            coverage=state.totals.histograms.coverage(run.book.next_index.get("", 0), len(state.failed.prompts)),
            packing=meter.packing(),
        )


def simulate(config: RunConfig, supply: Supply, steps: int, report: Callable[[int], None] | None = None) -> Figures:
    """Simulate `steps` steps. Raises `Invalid` for the configuration, `StrategyFault` with the step.

    `report` is called with the number of trained steps after each step.
    Plug-ins have no time limit here: a busy host must not end a study. A call above the limit is logged.
    """
    simulation = Simulation(config, supply, steps, report)
    try:
        figures = simulation.simulate()
    except StrategyFault as fault:
        detail = f"{fault.detail}; the run would be paused at step {simulation.run.state.next_step}"
        raise StrategyFault(detail, name=fault.name, value=fault.value, bound=fault.bound) from fault
    slowest_s = simulation.run.selector.slowest_call_s
    if slowest_s > CALL_LIMIT_S:
        logger.warning(
            "plug-in slow strategy=%s took_s=%.2f bound_s=%g: a service would pause the run if it is so twice",
            figures.strategy,
            slowest_s,
            CALL_LIMIT_S,
        )
    return figures
