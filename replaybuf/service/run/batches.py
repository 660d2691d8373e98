"""The batches of one run: made when first asked for, written to the ledger, served as the same bytes ever after."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np

from replaybuf.errors import Conflict, Fenced, Gone, Invalid, NotFound, RunFinished, StrategyFault, WrongStep
from replaybuf.kernel.selection import BatchSelection, Selector
from replaybuf.kernel.state_view import BatchState
from replaybuf.kernel.strategy import Selection
from replaybuf.kernel.waiting import BLOCKED_ON
from replaybuf.service.run.assembly import (
    FetchedGroups,
    PackedBatch,
    digest_of,
    entry_in_batch,
    fetch_groups,
    pack_batch,
)
from replaybuf.service.run.bodies import Bodies, Part
from replaybuf.service.run.eviction import Eviction
from replaybuf.service.run.journal import LONGEST_WAIT_S, Journal
from replaybuf.service.run.next_batch import NextBatch
from replaybuf.service.run.record import batch_record
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.group import Group
from replaybuf.wire.ledger import AdapterStep, BatchEntry, BatchRecord, DeadLetterRecord

logger = logging.getLogger(__name__)

KEPT_BATCHES = 3
"""Packed batches held in memory, newest served last: the step in training, the prefetched one, one spare."""
KEPT_BYTES = 2 << 30
"""Frames and bodies of all of them, but for the newest, which is held whatever its size."""


class Batches:
    """Batches of one run. `waited_s` is the time trainers waited, by the reason they were told."""

    def __init__(self, journal: Journal, selector: Selector, eviction: Eviction) -> None:
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self._journal = journal
        self._state = journal.state
        self._selector = selector
        self._eviction = eviction
        self._bodies = Bodies(journal.name)
        self._ready: OrderedDict[int, PackedBatch] = OrderedDict()
        self.next_batch = NextBatch(journal, selector, self._bodies, self._write_down)
        self._packing = asyncio.Lock()
        self._told: tuple[str, float] | None = None

    # ------------------------------------------------------------------ serving

    async def part(
        self, step: int, epoch: int, rank: int, wait_s: float, *, as_body: bool = True
    ) -> Part | WaitingAnswer:
        """Return the part of one rank in the batch of `step`, or why there is none yet.

        `as_body`: its body is wanted, not its plan alone; so will the next one be.
        Raises `Fenced`, `WrongStep`, `RunFinished`, `Gone`, and `Invalid` for a rank outside the world.
        """
        self.check_epoch(epoch)
        ranks = self._state.attachment.dp_world_size if self._state.attachment else 0
        if not 0 <= rank < ranks:
            raise Invalid(f"dp_rank is {rank}; dp_world_size is {ranks}", name="dp_rank", value=rank, bound=ranks)

        async def attempt() -> PackedBatch | WaitingAnswer:
            self.check_epoch(epoch)
            if not self._journal.leading and step in self._state.batches:
                packed = await self._packed(step)  # what is written down is the same from any server
                self.check_epoch(epoch)
                return packed
            self._journal.check_leading()
            self._check_askable(step)
            outcome = await self._batch(step, epoch)
            self.check_epoch(epoch)  # an attach while it was read may have changed its layout
            told = outcome.reason if isinstance(outcome, WaitingAnswer) else None
            if step == self._state.step or told == "awaiting_ack":  # else it is fetched ahead: nobody waits for it
                self._account_wait(outcome)
            return outcome

        outcome = await self._journal.until(attempt, wait_s)
        if isinstance(outcome, WaitingAnswer):
            return outcome
        self._bound_memory()
        self.next_batch.served(as_body=as_body)
        return Part(outcome, rank, self._bodies)

    def check_epoch(self, epoch: int) -> None:
        """Let only the attached trainer pass. Raises `Fenced`; `NotLeader` for an epoch newer than a follower knows."""
        if epoch > self._state.epoch:
            self._journal.check_leading()
        if epoch != self._state.epoch or epoch < 1:
            raise Fenced(
                f"epoch is {epoch}; the run is attached with epoch {self._state.epoch}",
                name="epoch",
                value=epoch,
                bound=self._state.epoch,
            )

    def _check_askable(self, step: int) -> None:
        state, look_ahead = self._state, self._selector.bounds.look_ahead
        if step < 0 or step > state.step + max(1, look_ahead):
            raise WrongStep(
                f"step is {step}; the next unacked step is {state.step} and the strategy looks {look_ahead} ahead",
                name="step",
                value=step,
                bound=state.step + look_ahead,
            )
        if step in state.batches:
            return
        max_steps = self._journal.config.max_steps
        if state.state == "finished" or (max_steps is not None and step >= max_steps):
            raise RunFinished(
                f"run {self._journal.name} is finished after {state.step} steps",
                name="step",
                value=step,
                bound=state.step,
            )
        if step < state.step:
            raise Gone(
                f"the batch of step {step} was freed by a checkpoint; the oldest one kept is {state.oldest_step}",
                name="step",
                value=step,
                bound=state.oldest_step,
            )

    async def _batch(self, step: int, epoch: int) -> PackedBatch | WaitingAnswer:
        standing = step in self._state.batches  # may be: made ahead by a strategy that a live change replaced
        if not standing and step > self._state.step + self._selector.bounds.look_ahead:
            return self._selector.explain("awaiting_ack" if self._state.state == "running" else self._state.state)
        try:
            async with self._journal.decision():
                self.check_epoch(epoch)  # an attach may have come first, with a history that ends long before this step
                while self._state.next_step <= step:
                    waits = await self._assemble_next()
                    if waits and self._state.next_step == self._state.step and self._selector.supply_ended(waits):
                        await self._finish()
                    if waits:
                        self._check_askable(step)  # the run may have been finished, here or meanwhile
                        return waits
        except StrategyFault:
            return self._selector.explain("paused")  # the decision that failed has paused the run
        return await self._packed(step)

    async def end_if_used_up(self) -> None:
        """Finish a run whose prompt supply is used up, with no ticket out and too little for a batch."""
        state = self._state
        if state.state != "running" or state.next_step > state.step:
            return  # a batch is in training; what comes after it is judged when it is acked
        async with self._journal.decision():
            waits = self._selector.why_waiting()
            if waits and state.next_step == state.step and self._selector.supply_ended(waits):
                await self._finish()

    async def _finish(self) -> None:
        logger.info("run finished run=%s reason=prompts step=%d", self._journal.name, self._state.step)
        await self._journal.set_state("finished", "prompts")
        await self._journal.notify()

    @property
    def waited_for_others_s(self) -> float:
        """Seconds that trainers waited for somebody else than themselves."""
        return sum(s for reason, s in self.waited_s.items() if BLOCKED_ON[reason] != "trainer")

    def _account_wait(self, outcome: object) -> None:
        """Book the time since the trainer was last told to wait under the reason it was told then."""
        now = self._journal.clock()
        if self._told:
            reason, since_s = self._told
            self.waited_s[reason] += max(0.0, min(now - since_s, LONGEST_WAIT_S))
        self._told = (outcome.reason, now) if isinstance(outcome, WaitingAnswer) else None

    def forget(self) -> None:
        """Drop what was packed for a trainer that is gone."""
        self._ready.clear()
        self.next_batch.drop()
        self._told = None

    # ------------------------------------------------------------------ making

    async def _assemble_next(self) -> WaitingAnswer | None:
        """Make the batch of the next step, or say why not. Called within a decision."""
        while True:
            await self._eviction.of_unsettled()
            chosen = self._selector.choose()
            if isinstance(chosen, WaitingAnswer):
                return chosen
            numbers = chosen.rows.tolist()
            fetched = await self.next_batch.fetched(numbers)
            loaded = await self._load(numbers, fetched)
            if loaded.broken:
                await self._bury(loaded.broken)
                continue
            overlong = self._overlong(loaded)
            if overlong:
                await self._eviction.record({"overlong": overlong})
                continue
            record = self._write_down(chosen, loaded)
            await self._journal.append(record)
            prepared = self.next_batch.take(record, len(fetched.groups))
            if prepared:
                self._keep(prepared)
            else:
                await self._pack(record, loaded)
            await self._eviction.judge()
            return None

    async def _load(self, numbers: list[int], fetched: FetchedGroups) -> FetchedGroups:
        """Fetch the groups that are not fetched yet."""
        missing = [number for number in numbers if number not in fetched.groups]
        if not missing:
            return fetched
        rest = await fetch_groups(self._journal.store, self._journal.name, missing)
        entries = {entry.number: entry for entry in (*fetched.entries, *rest.entries)}
        return FetchedGroups(
            [entries[number] for number in numbers if number in entries], fetched.groups | rest.groups, rest.broken
        )

    def _overlong(self, loaded: FetchedGroups) -> list[int]:
        """Name the groups with a prompt that leaves no room for a completion in the trainer's rows.

        The index has whole rollouts, so where completions are cut only the frames tell.
        """
        if self._journal.config.batch.overlong != "truncate":
            return []
        seq_len = self._selector.inputs.seq_len
        return sorted(number for number, group in loaded.groups.items() if _longest_prompt(group) >= seq_len)

    def _write_down(self, chosen: Selection, loaded: FetchedGroups) -> BatchRecord:
        state, config = self._state, self._journal.config
        step = state.next_step
        version = 0 if config.adapters else config.version_of(step)
        versions = {name: state.version_at(step, name) for name in config.adapter_names}
        index = state.index
        weights = [None] * len(loaded.entries) if chosen.weights is None else chosen.weights.astype(float).tolist()
        uses = index["times_sampled"][index.rows_of([entry.number for entry in loaded.entries])].tolist()
        held = [
            entry_in_batch(entry, versions[entry.strings.adapter], used + 1, weight)
            for entry, used, weight in zip(loaded.entries, uses, weights, strict=True)
        ]
        digest = digest_of(loaded.entries, step, state.generation)
        return BatchRecord(
            step=step,
            generation=state.generation,
            batch_id=f"{state.generation}-{step}-{digest[:8]}",
            digest=digest,
            version=version,
            strategy=config.strategy.name,
            options=config.strategy.options,
            seed=self._selector.inputs.seed(step),
            tokens=sum(entry.tokens for entry in held),
            rollouts=sum(group.rollouts for group in loaded.groups.values()),
            groups=held,
            adapters=self._adapter_steps(held),
            turn=chosen.turn if isinstance(chosen, BatchSelection) else "",
            at_s=self._journal.clock(),
        )

    def _adapter_steps(self, held: list[BatchEntry]) -> dict[str, AdapterStep]:
        """Tell the part of each adapter in the next batch."""
        state, parts = self._state, {}
        for name, groups in sorted(Counter(entry.adapter for entry in held if entry.adapter).items()):
            progress = state.progress_at(state.next_step, name)
            parts[name] = AdapterStep(
                step=progress.step,
                version=state.version_at(state.next_step, name),
                groups=groups,
                completed=progress.groups + groups == progress.groups_per_batch,
            )
        return parts

    async def _bury(self, broken: dict[int, str]) -> None:
        by_reason: dict[str, list[int]] = {}
        for number, reason in sorted(broken.items()):
            by_reason.setdefault(reason, []).append(number)
        logger.error("groups are unusable run=%s numbers=%s", self._journal.name, by_reason)
        await self._journal.append(DeadLetterRecord(numbers=by_reason, at_s=self._journal.clock()))

    async def _packed(self, step: int) -> PackedBatch:
        """Return a batch of the current history, fetched and packed again where it is not at hand."""
        async with self._packing:  # the ranks of a trainer ask at the same time
            standing, ready = self._state.batches.get(step), self._ready.get(step)
            if standing is None:
                self._check_askable(step)
                raise Conflict(f"batch {step} was taken back by a rewind", name="step", value=step)
            # A follower learns of an attach or a rewind from the ledger: what was packed before it is recognised here.
            if ready and ready.layout is self._state.attachment and ready.record.generation == standing.generation:
                return ready
            record = await self._journal.batch_record(standing.entry)
            loaded = await fetch_groups(
                self._journal.store, self._journal.name, [entry.number for entry in record.groups]
            )
            if loaded.broken and self._journal.leading:
                await self._bury_of(step, standing, loaded.broken)
            return await self._pack(record, loaded)

    async def _bury_of(self, step: int, standing: BatchState, broken: dict[int, str]) -> None:
        """Record groups of a standing batch that broke since it was made; once, however often it is asked for."""
        async with self._journal.decision():
            if self._state.batches.get(step) is not standing:
                return  # a checkpoint freed it, bytes and all, while it was read
            found = {n: reason for n, reason in broken.items() if self._state.group_state(n)[0] != "dead_lettered"}
            if found:
                logger.error("batch cannot be served run=%s step=%d: a resample does without", self._journal.name, step)
                await self._bury(found)
        await self._journal.notify()

    async def _pack(self, record: BatchRecord, loaded: FetchedGroups) -> PackedBatch:
        layout = self._state.attachment
        if layout is None:
            raise Conflict(f"run {self._journal.name} has no trainer attached", name="epoch", value=0, bound=1)
        return self._keep(await asyncio.to_thread(pack_batch, record, loaded, layout))

    def _keep(self, batch: PackedBatch) -> PackedBatch:
        self._ready[batch.record.step] = batch
        self._ready.move_to_end(batch.record.step)
        self._bound_memory()
        return batch

    def _bound_memory(self) -> None:
        held = [batch.nbytes for batch in self._ready.values()]
        while len(held) > KEPT_BATCHES or (len(held) > 1 and sum(held) > KEPT_BYTES):
            self._ready.popitem(last=False)
            held.pop(0)

    # ------------------------------------------------------------------ looking

    async def record(self, step: int, generation: int | None) -> dict[str, Any]:
        """Render the record of a batch. Raises `NotFound` where that history has no such step, `Gone` once trimmed."""
        state = self._state
        entry = state.batch_entry(step, generation)
        if entry is None:
            state.check_record_kept(step)
            where = "the current history" if generation is None else f"generation {generation}"
            raise NotFound(f"{where} has no batch of step {step}", name="step", value=step, bound=state.next_step)
        record = await self._journal.batch_record(entry)
        if state.records.get(step) != entry:
            standing = "voided"
        else:
            standing = "assembled" if step in state.batches and not state.batches[step].acked else "acked"
        at_hand = await self._packed(step) if standing != "voided" and step in state.batches else None
        return batch_record(self._journal.name, record, standing, at_hand)

    def longest_rollout(self, step: int) -> int:
        """Tokens of the longest rollout in the batch of `step`."""
        rows = self._state.index.rows_of(self._state.batches[step].numbers)
        return int(np.max(self._state.index["longest_tokens"][rows], initial=0))

    async def longest_prompt(self, step: int) -> int:
        """Tokens of the longest prompt in the batch of `step`, read from its frames."""
        loaded = await fetch_groups(self._journal.store, self._journal.name, self._state.batches[step].numbers.tolist())
        return max(map(_longest_prompt, loaded.groups.values()), default=0)


def _longest_prompt(group: Group) -> int:
    return int(np.max(group.prompt_lengths, initial=0))
