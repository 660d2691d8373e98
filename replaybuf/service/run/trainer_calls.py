"""Calls of the trainer of a run: attach and fence, ack, publish versions, record checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

from replaybuf.errors import Conflict, ReplaybufError, StrategyFault, counted
from replaybuf.kernel.decide.records import (
    check_adapter,
    decide_ack,
    decide_attach,
    decide_checkpoint,
    decide_policy,
    decide_rewind,
    read_priorities,
)
from replaybuf.kernel.strategy.rates import Rates
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.service.run.append.eviction import Eviction
from replaybuf.service.run.batches import Batches
from replaybuf.service.run.cursors import Cursors
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.long_polls import Gone, LongPolls, Round, Waiter
from replaybuf.service.run.samples import Samples
from replaybuf.store.copying import EPOCH_BASE
from replaybuf.wire.column.metadata import check_metadata
from replaybuf.wire.contract import AckedStep, Attachment, AttachRequest, Checkpoints, Policy

logger = logging.getLogger(__name__)


class TrainerCalls:
    """Calls of the attached trainer. A call with an older epoch raises `Fenced`."""

    def __init__(
        self,
        journal: Journal,
        selector: Selector,
        eviction: Eviction,
        batches: Batches,
        rates: Rates,
        cursors: Cursors,
        samples: Samples,
    ) -> None:
        self._journal = journal
        self._state = journal.state
        self._selector = selector
        self._eviction = eviction
        self._batches = batches
        self._rates = rates
        self._cursors = cursors
        self._samples = samples
        self._polls = LongPolls(journal)

    async def attach(self, request: AttachRequest) -> Attachment:
        """Give the run to a trainer, fence older epochs, restore history to its step.

        Raises `WrongStep` for a step that cannot be resumed, `Conflict` if a batch to redeliver does not fit `seq_len`.
        """
        journal, state = self._journal, self._state
        async with self._deciding():
            counts = await journal.store.counters.read(journal.name)
            attached = decide_attach(state, request, journal.clock.wall(), counts.get(EPOCH_BASE, 0))
            if request.on_resume == "redeliver":
                await self._check_fit(attached.step, attached.seq_len)
            # ATTACH first: if we die before REWIND, the older trainer is fenced and this one attaches again.
            await journal.append(attached)
            journal.presence.record_trainer()
            if attached.rewinds:
                await journal.append(decide_rewind(state, attached.step, request.on_resume, journal.clock.wall()))
            # Of a million groups, the rewind, what was packed, and the check take 10 to 40 ms each.
            await asyncio.sleep(0)
            self._batches.forget()
            self._rates.forget_steps()
        await asyncio.sleep(0)
        await self._eviction.evict_all()
        journal.notify()
        logger.info("trainer attached run=%s epoch=%d step=%d", journal.name, attached.epoch, attached.step)
        return Attachment(
            epoch=attached.epoch,
            step=attached.step,
            generation=state.generation,
            published_version=state.published[""],
            dp_world_size=attached.dp_world_size,
            seq_len=attached.seq_len,
            pad_to_multiple_of=attached.pad_to_multiple_of,
            look_ahead=self._selector.bounds.look_ahead,
        )

    @contextlib.asynccontextmanager
    async def _deciding(self) -> AsyncIterator[None]:
        """Decide. What the body refuses is refused only if no newer leader may accept it: then raises `NotLeader`."""
        journal = self._journal
        async with journal.decision():
            try:
                yield
            except ReplaybufError as error:
                if error.status < 500:
                    await journal.prove_lead()
                raise

    async def _check_fit(self, step: int, seq_len: int) -> None:
        """Raise `Conflict` if a batch from `step` on holds a rollout that does not fit `seq_len`."""
        truncates = self._journal.config.batch.overlong == "truncate"
        for kept in [kept for kept in self._state.batches if kept >= step]:
            what, longest = "rollout", self._batches.longest_rollout(kept)
            if longest > seq_len and truncates:  # truncation leaves at least one completion token
                what, longest = "prompt with one completion token", 1 + await self._batches.longest_prompt(kept)
            if longest > seq_len:
                detail = (
                    f"seq_len is {seq_len}; batch {kept}, to be redelivered, holds a {what} of "
                    f"{counted(longest, 'token')}"
                )
                raise Conflict(detail, name="seq_len", value=seq_len, bound=longest)

    async def ack(
        self,
        step: int,
        epoch: int,
        feedback: dict[str, Any] | None,
        metrics: dict[str, float | None] | None = None,
    ) -> AckedStep:
        """Count a step as trained, once. Raises `WrongStep` out of order or for a batch that was never served."""
        check_metadata("feedback", feedback or {})
        journal, state, waits = self._journal, self._state, self._batches.waits
        async with self._deciding():
            journal.check_epoch(epoch)
            priorities: dict[int, float] = {}
            if feedback and "priorities" in feedback and step == state.step and step in state.batches:
                batch = await journal.batch_record(state.batches[step].entry)
                priorities = read_priorities(feedback["priorities"], batch)
            now_s, waited_s = journal.clock.wall(), waits.of_step_s()
            record = decide_ack(state, step, epoch, feedback, priorities, now_s, waited_s, metrics)
            if record:
                await journal.append(record)
                self._samples.hold(step)
                waits.end_step()
                self._rates.record_ack(
                    journal.clock.monotonic(),
                    waited_s=self._batches.waited_for_others_s,
                    stored=state.stored,
                    too_stale=state.totals.evicted["too_stale"],
                )
                if feedback:
                    await self._observe()
        journal.notify()
        return AckedStep(step=step)

    async def _observe(self) -> None:
        """Let the strategy observe the feedback now: if it fails, the run pauses, and the step stays acked."""
        try:
            _ = self._selector.strategy
        except StrategyFault as fault:
            await self._journal.pause(fault)

    async def publish(self, version: int, epoch: int, weights_uri: str | None, adapter: str) -> Policy:
        """Record that the engines have loaded a version. Raises `Conflict` if it is too low or too high."""
        journal = self._journal
        async with self._deciding():
            journal.check_epoch(epoch)
            record = decide_policy(self._state, version, epoch, weights_uri, adapter, journal.clock.wall())
            if record:
                await journal.append(record)
        journal.notify()
        return self.policy(adapter)

    def policy(self, adapter: str = "") -> Policy:
        """Return the published policy of an adapter."""
        return Policy(
            version=self._state.published[adapter],
            weights_uri=self._state.weights_uri[adapter],
            adapters={name: version for name, version in self._state.published.items() if name},
            generation=self._state.generation,
        )

    async def policy_after(
        self, after: int | None, wait_s: float, adapter: str = "", gone: Gone | None = None
    ) -> Policy:
        """Return the policy once its version is above `after`, or after `wait_s`.

        `gone` raises when the caller leaves.
        """
        state = self._state
        if adapter:
            check_adapter(adapter, self._journal.config)
        if after is None or state.published[adapter] > after:
            return self.policy(adapter)
        serve = functools.partial(self._serve_policy, adapter)
        question = self._polls.question(adapter, serve, lambda: (state.generation, *state.published.items()))
        return await question.answer(after, wait_s, gone)

    async def _serve_policy(self, adapter: str, waiters: Iterable[Waiter[int, Policy]]) -> Round[int, Policy]:
        policy = self.policy(adapter)
        newer = [(waiter, policy) for waiter in waiters if self._state.published[adapter] > waiter.request]
        return Round(newer, policy)

    async def checkpoint(self, step: int, epoch: int, keep: int) -> Checkpoints:
        """Keep what the newest `keep` checkpoints may need; older history may be deleted. Raises `WrongStep`."""
        journal, state = self._journal, self._state
        async with self._deciding():
            journal.check_epoch(epoch)
            kept = await self._cursors.kept(step, keep)
            record = decide_checkpoint(state, step, keep, journal.clock.wall(), kept)
            if record:
                await journal.append(record)
        journal.notify()
        return Checkpoints(checkpoints=state.checkpoints, oldest_step=state.oldest_step)
