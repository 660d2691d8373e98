"""The trainer's side of a run: attach and fence, ack, publish versions, record checkpoints."""

from __future__ import annotations

import logging
from typing import Any, Literal

from replaybuf.errors import Conflict, Invalid, StrategyFault, WrongStep
from replaybuf.kernel.rates import Rates
from replaybuf.kernel.selection import Selector
from replaybuf.service.run.batches import Batches
from replaybuf.service.run.eviction import Eviction
from replaybuf.service.run.history_lock import HistoryLock
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.tickets import check_adapter
from replaybuf.wire.contract import AttachRequest, WaitingAnswer
from replaybuf.wire.ledger import AckRecord, AttachRecord, CheckpointRecord, PolicyRecord, RewindRecord
from replaybuf.wire.metadata import check_metadata

logger = logging.getLogger(__name__)


LARGEST_PRIORITY = 1e30
"""Sums of a million of them, and their powers, stay within 32-bit floats."""


class Session:
    """What the attached trainer may change. Every call of an older epoch raises `Fenced`."""

    def __init__(
        self,
        journal: Journal,
        selector: Selector,
        eviction: Eviction,
        batches: Batches,
        rates: Rates,
        history_lock: HistoryLock,
    ) -> None:
        self._journal = journal
        self._state = journal.state
        self._selector = selector
        self._eviction = eviction
        self._batches = batches
        self._history_lock = history_lock
        self._rates = rates

    async def attach(self, request: AttachRequest) -> dict[str, Any]:
        """Give the run to a trainer, fence older epochs, restore history to its step.

        Raises `WrongStep` for a step that cannot be resumed, `Conflict` where standing batches do not fit its rows.
        """
        journal, state = self._journal, self._state
        async with journal.decision():
            step = state.step if request.resume_step is None else request.resume_step
            if not state.oldest_step <= step <= state.step:
                raise WrongStep(
                    f"resume_step is {step}; steps {state.oldest_step} (oldest kept checkpoint) to {state.step} "
                    "(next unacked) can be resumed",
                    name="resume_step",
                    value=step,
                    bound=[state.oldest_step, state.step],
                )
            attached = self._attached(request, step)
            redeliver = request.on_resume == "redeliver"
            if redeliver:
                await self._check_rows_fit(step, attached.seq_len)
            # ATTACH first: should we die before REWIND, the older trainer is fenced and this one asks again.
            await journal.append(attached)
            if step < state.step or (not redeliver and state.next_step > step):
                async with self._history_lock.exclusive():
                    await self._rewind(step, request.on_resume)
            self._batches.forget()
            self._rates.forget_steps()
        await self._eviction.judge_all()
        await journal.notify()
        logger.info("trainer attached run=%s epoch=%d step=%d", journal.name, attached.epoch, step)
        return {
            "epoch": attached.epoch,
            "step": step,
            "generation": state.generation,
            "published_version": state.published[""],
            "dp_world_size": attached.dp_world_size,
            "seq_len": attached.seq_len,
            "pad_to_multiple_of": attached.pad_to_multiple_of,
            "look_ahead": self._selector.bounds.look_ahead,
        }

    async def _rewind(self, step: int, on_resume: Literal["redeliver", "resample"]) -> None:
        """Go back to a step. What was let in by the history that ends here is folded first: the rewind reaches it."""
        journal, state = self._journal, self._state
        await journal.pull()
        rewind = RewindRecord(
            step=step,
            generation=state.generation + 1,
            on_resume=on_resume,
            version=0 if journal.config.adapters else journal.config.version_of(step),
            versions={name: state.version_at(step, name) for name in journal.config.adapters},
            until=state.stored,
            at_s=journal.clock(),
        )
        await journal.append(rewind)

    def _attached(self, request: AttachRequest, step: int) -> AttachRecord:
        """Make the record of an attach, with the run's layout where none is asked for. Raises `Invalid`."""
        batch = self._journal.config.batch
        seq_len = batch.seq_len if request.seq_len is None else request.seq_len
        multiple = batch.pad_to_multiple_of if request.pad_to_multiple_of is None else request.pad_to_multiple_of
        if seq_len % multiple:
            raise Invalid(
                f"pad_to_multiple_of is {multiple}; it must be a divisor of seq_len = {seq_len}",
                name="pad_to_multiple_of",
                value=multiple,
                bound=f"a divisor of seq_len = {seq_len}",
            )
        if request.cost is not None:
            request.cost.check()
        return AttachRecord(
            epoch=self._state.epoch + 1,
            step=step,
            dp_world_size=request.dp_world_size,
            seq_len=seq_len,
            pad_to_multiple_of=multiple,
            cost=request.cost,
            at_s=self._journal.clock(),
        )

    async def _check_rows_fit(self, step: int, seq_len: int) -> None:
        truncates = self._journal.config.batch.overlong == "truncate"
        for standing in [standing for standing in self._state.batches if standing >= step]:
            held, longest = "rollout", self._batches.longest_rollout(standing)
            if longest > seq_len and truncates:  # a completion is cut to one token at least
                held, longest = "prompt with one completion token", 1 + await self._batches.longest_prompt(standing)
            if longest > seq_len:
                raise Conflict(
                    f"seq_len is {seq_len}; batch {standing}, to be redelivered, holds a {held} of {longest} tokens",
                    name="seq_len",
                    value=seq_len,
                    bound=longest,
                )

    async def ack(self, step: int, epoch: int, feedback: dict[str, Any] | None) -> dict[str, Any]:
        """Count a step as trained, once. Raises `WrongStep` out of order or for a step never served."""
        check_metadata("feedback", feedback or {})
        journal, state = self._journal, self._state
        async with journal.decision():
            self._batches.check_epoch(epoch)
            unserved = step == state.step and step not in state.batches
            if step < 0 or step > state.step or unserved:
                raise WrongStep(
                    f"step is {step}; "
                    + ("its batch was never served" if unserved else f"the next step to ack is {state.step}"),
                    name="step",
                    value=step,
                    bound=state.step,
                )
            if step == state.step:
                record = AckRecord(
                    step=step,
                    epoch=epoch,
                    feedback=feedback,
                    priorities=await self._priorities(step, feedback or {}),
                    at_s=journal.clock(),
                )
                await journal.append(record)
                self._rates.record_ack(
                    journal.clock(),
                    waited_s=self._batches.waited_for_others_s,
                    stored=state.stored,
                    too_stale=state.evicted["too_stale"],
                )
                if feedback:
                    await self._observe()
        await journal.notify()
        return {"step": step, "state": "acked"}

    async def _observe(self) -> None:
        try:
            _ = self._selector.strategy  # built anew, it observes
        except StrategyFault as fault:  # the step is acked all the same
            await self._journal.pause(fault)

    async def _priorities(self, step: int, feedback: dict[str, Any]) -> dict[int, float]:
        """Read `feedback["priorities"]`, a number >= 0 per group id of the batch, as priorities by group number."""
        given = feedback.get("priorities")
        if given is None:
            return {}
        record = await self._journal.batch_record(self._state.batches[step].entry)
        numbers = {entry.group_id: entry.number for entry in record.groups}
        if not isinstance(given, dict):
            raise Invalid(
                f"feedback.priorities is {type(given).__name__}; it must be an object of group ids and numbers",
                name="feedback.priorities",
                bound="object",
            )
        for group_id, value in given.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST_PRIORITY
            if group_id not in numbers or not number:
                raise Invalid(
                    f"feedback.priorities[{group_id!r}] is {value!r}; batch {step} needs ids of its groups and numbers "
                    f"from 0 to {LARGEST_PRIORITY:g}",
                    name=f"feedback.priorities.{group_id}",
                    value=str(value),
                    bound=[0, LARGEST_PRIORITY],
                )
        return {numbers[group_id]: float(value) for group_id, value in given.items()}

    async def publish(self, version: int, epoch: int, weights_uri: str | None, adapter: str) -> dict[str, Any]:
        """Record that the engines loaded a version. Raises `Conflict` where it goes back or too far."""
        journal, state = self._journal, self._state
        async with journal.decision():
            self._batches.check_epoch(epoch)
            check_adapter(adapter, journal.config)
            published, newest = state.published[adapter], state.version_at(state.step, adapter)
            if not published <= version <= newest:
                why = "versions only grow" if version < published else "ack the steps before it first"
                raise Conflict(
                    f"version is {version}; published is {published}, the next unacked step trains {newest}: {why}",
                    name="version",
                    value=version,
                    bound=[published, newest],
                )
            if version > published:
                record = PolicyRecord(
                    version=version, weights_uri=weights_uri, adapter=adapter, epoch=epoch, at_s=journal.clock()
                )
                await journal.append(record)
        await journal.notify()
        return self.policy(adapter)

    def policy(self, adapter: str = "") -> dict[str, Any]:
        """Render the published policy, with the version of an adapter where one is named."""
        return {
            "version": self._state.published[adapter],
            "weights_uri": self._state.weights_uri[adapter],
            "adapters": {name: version for name, version in self._state.published.items() if name},
            "generation": self._state.generation,
        }

    async def policy_after(self, after: int | None, wait_s: float, adapter: str = "") -> dict[str, Any]:
        """Return the policy, or that of an adapter, once its version is above `after`, or when the wait is over."""
        if adapter:
            check_adapter(adapter, self._journal.config)

        async def attempt() -> dict[str, Any] | WaitingAnswer:
            if after is None or self._state.published[adapter] > after:
                return self.policy(adapter)
            return self._selector.explain("awaiting_publication", adapter=adapter)

        outcome = await self._journal.until(attempt, wait_s)
        return self.policy(adapter) if isinstance(outcome, WaitingAnswer) else outcome

    async def checkpoint(self, step: int, epoch: int, keep: int) -> dict[str, Any]:
        """Keep what the newest `keep` checkpoints may need; what is older may go. Raises `WrongStep`."""
        journal, state = self._journal, self._state
        async with journal.decision():
            self._batches.check_epoch(epoch)
            if not state.oldest_step <= step <= state.step:
                raise WrongStep(
                    f"step is {step}; a checkpoint can be recorded for {state.oldest_step} to {state.step}",
                    name="step",
                    value=step,
                    bound=[state.oldest_step, state.step],
                )
            if sorted({*state.checkpoints, step})[-keep:] != state.checkpoints:
                await journal.append(CheckpointRecord(step=step, keep=keep, at_s=journal.clock()))
        await journal.notify()
        return {"checkpoints": state.checkpoints, "oldest_step": state.oldest_step}
