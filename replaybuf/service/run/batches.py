"""Batches of one run: assemble on first request, record in the ledger, serve the same bytes from then on."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable

import msgspec
import numpy as np

from replaybuf.errors import Conflict, Invalid, ReplaybufError, StrategyFault
from replaybuf.kernel.decide.config import decide_end
from replaybuf.kernel.decide.records import check_requestable, decide_dead_letters, decide_overlong, draft_batch
from replaybuf.kernel.figures.waits import TrainerWaits
from replaybuf.kernel.state.history import BatchState, RecordedBatch
from replaybuf.kernel.state.lookups import entry_of_batch, find_batch_status, find_group_state
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.kernel.strategy.waiting_answer import BatchTimeout
from replaybuf.service.bodies.assembly import (
    FetchedGroups,
    PackedBatch,
    complete_record,
    fetch_groups,
    join_fetched,
    pack_beside,
)
from replaybuf.service.bodies.explanation import describe_batch
from replaybuf.service.bodies.writer import Bodies, Part
from replaybuf.service.report.candidates import count_candidates
from replaybuf.service.run.append.eviction import Eviction
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.long_polls import Gone, LongPolls, Round, Waiter
from replaybuf.service.run.next_batch import NextBatch
from replaybuf.service.run.tickets import Tickets
from replaybuf.service.turns import call_beside
from replaybuf.tracing import spans
from replaybuf.wire.answer.browse import StepRecord
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.ledger import BatchRecord
from replaybuf.wire.wait_reasons import WAIT_REASONS

logger = logging.getLogger(__name__)

KEPT_BATCHES = 3
"""Packed batches held in memory: the step in training, the prefetched one, one spare."""
LOGGED_GROUPS = 20
"""Unusable groups named in one line of the log; `GET .../dead-letters` lists all."""
KEPT_BYTES = 2 << 30
"""Bound on their frames and bodies. The newest batch is held whatever its size."""

EARLIEST_TIMER_S = 0.005
"""More than a timer of the event loop may be early; the time-out may also end between two looks at the clock."""

_Answer = PackedBatch | WaitingAnswer


class Batches:
    """Batches of one run, and how long trainers waited for them."""

    def __init__(self, journal: Journal, selector: Selector, eviction: Eviction, tickets: Tickets) -> None:
        self.waits = TrainerWaits()
        self._journal = journal
        self._state = journal.state
        self._selector = selector
        self._eviction = eviction
        self._tickets = tickets
        self._bodies = Bodies(journal.name)
        self._packed: OrderedDict[int, PackedBatch] = OrderedDict()
        self.next_batch = NextBatch(journal, selector, self._bodies)
        self._packing = asyncio.Lock()
        self._polls = LongPolls(journal)
        self._batch_timeout = BatchTimeout()
        self._alarm: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ serving

    async def part(
        self, step: int, epoch: int, rank: int, wait_s: float, *, as_body: bool = True, gone: Gone | None = None
    ) -> Part | WaitingAnswer:
        """Return one rank's part of the batch of `step`, or after `wait_s` why there is none yet.

        `as_body`: the caller wants the body, not only the plan, and will want the next one too. All ranks share one
        answer. `gone` raises when the caller leaves.
        Raises `Fenced`, `WrongStep`, `RunFinished`, `Gone`, and `Invalid` for a rank outside the world.
        """
        journal = self._journal
        journal.check_epoch(epoch)
        ranks = self._state.attachment.dp_world_size if self._state.attachment else 0
        if not 0 <= rank < ranks:
            raise Invalid(f"dp_rank is {rank}; dp_world_size is {ranks}", name="dp_rank", value=rank, bound=ranks)

        serve = functools.partial(self._serve, step, epoch)
        question = self._polls.question(
            (step, epoch), serve, lambda: (journal.changes, self._selector.moment, self._left_s(step) == 0)
        )
        outcome = await question.answer(rank, wait_s, gone)
        self._account_wait(step, outcome)
        if isinstance(outcome, WaitingAnswer):
            return journal.presence.name_missing(outcome, attached=True)
        self._bound_memory()
        self.next_batch.expect_request(as_body=as_body)
        return Part(outcome, rank, self._bodies)

    async def _serve(self, step: int, epoch: int, ranks: Iterable[Waiter[int, _Answer]]) -> Round[int, _Answer]:
        try:
            outcome = await self._answer(step, epoch)
        except ReplaybufError as error:
            if error.status < 500 and self._journal.leading:
                await self._journal.prove_lead()
            raise
        if isinstance(outcome, WaitingAnswer):
            return Round([], outcome)
        return Round([(rank, outcome) for rank in ranks])

    async def _answer(self, step: int, epoch: int) -> PackedBatch | WaitingAnswer:
        """Return the batch of `step`, assembled if it can be, or why there is none."""
        journal = self._journal
        journal.check_epoch(epoch)
        if not journal.leading and self._is_settled(step):
            packed = await self._get_packed(step)  # a recorded batch is the same from any server
            journal.check_epoch(epoch)
            return packed
        journal.check_leading()
        self._check_requestable(step)
        outcome = await self._batch(step, epoch)
        journal.check_epoch(epoch)  # an attach during the read may have changed the layout
        self._account_wait(step, outcome)
        return outcome

    def _is_settled(self, step: int) -> bool:
        """Return whether the batch of a step is recorded, and no rewind that belongs to the attach may take it back."""
        attached = self._state.attachment
        rewound = attached is None or attached.generation <= self._state.generation
        return rewound and step in self._state.batches

    def _check_requestable(self, step: int) -> None:
        check_requestable(self._state, step, self._selector.bounds.look_ahead)

    async def _batch(self, step: int, epoch: int) -> PackedBatch | WaitingAnswer:
        state, pace = self._state, self._polls.pace
        # A recorded batch may be further ahead: it was made before a live change of the strategy.
        if step not in state.batches and step > state.step + self._selector.bounds.look_ahead:
            with pace.work():
                return self._selector.explain("awaiting_ack" if state.phase == "running" else state.phase)
        try:
            async with self._journal.decision():
                self._journal.check_epoch(epoch)  # an attach may have rewound the history to before this step
                while state.next_step <= step:
                    with pace.work():
                        waits = await self._assemble_next(overdue=self._left_s(step) == 0)
                    if waits:
                        await self._finish_if_ended()
                        self._check_requestable(step)  # the run may be finished now
                        return self._record_wait(step, waits)
        except StrategyFault:
            return self._selector.explain("paused")  # the decision has paused the run
        return await self._get_packed(step)

    async def end_if_exhausted(self) -> None:
        """Finish a run that has no prompts left, no ticket out and too few groups for a batch."""
        state = self._state
        if state.phase != "running" or state.next_step > state.step:
            return  # a batch is in training: check again after its ack
        async with self._journal.decision():
            if self._selector.why_waiting():
                await self._finish_if_ended()

    async def _finish_if_ended(self) -> None:
        ended = False
        for record in decide_end(self._state, self._selector, self._journal.clock.wall()):
            await self._journal.append(record)
            ended = True
        if ended:
            logger.info("run finished run=%s reason=prompts step=%d", self._journal.name, self._state.step)
            self._journal.notify()

    # ------------------------------------------------------------------ time-out

    def _left_s(self, step: int) -> float | None:
        """Return the time until the batch of `step` may be short; None = no time-out is coming."""
        return self._batch_timeout.left_s(self._state, step, self._journal.clock.monotonic())

    def _record_wait(self, step: int, waits: WaitingAnswer) -> WaitingAnswer:
        """Count the trainer's wait from the first answer on; ask again for it when its time is over."""
        self._batch_timeout.record(self._state, step, waits, self._journal.clock.monotonic())
        left_s = self._left_s(step)
        if left_s is None:
            return waits
        if self._alarm:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_later(left_s + EARLIEST_TIMER_S, self._polls.wake)
        return msgspec.structs.replace(waits, timeout_in_s=left_s)

    @property
    def waited_for_others_s(self) -> float:
        """Seconds that trainers waited for anybody but themselves."""
        return sum(s for reason, s in self.waits.total_s.items() if WAIT_REASONS[reason].blocked_on != "trainer")

    def _account_wait(self, step: int, outcome: object) -> None:
        """Count the time since the last waiting answer under the reason of that answer.

        A step ahead is a prefetch, and the trainer is busy, unless the answer is to ack first.
        """
        reason = outcome.reason if isinstance(outcome, WaitingAnswer) else None
        if step != self._state.step and reason != "awaiting_ack":
            return
        self.waits.answer(reason, self._journal.clock.monotonic())

    def forget(self) -> None:
        """Drop what was packed for the trainer before."""
        self._packed.clear()
        self.next_batch.drop()
        self.waits.forget_last()

    # ------------------------------------------------------------------ assembling

    async def _assemble_next(self, *, overdue: bool) -> WaitingAnswer | None:
        """Assemble the batch of the next step, or return why not. Called within a decision.

        `overdue`: the trainer has waited so long that the batch may be short.
        """
        began_ns = time.time_ns()
        while True:
            await self._tickets.refresh()
            await self._eviction.before_batch()
            chosen = self._selector.choose(overdue=overdue)
            if isinstance(chosen, WaitingAnswer):
                return chosen
            candidates = count_candidates(self._state, self._selector, self._tickets.rejected)
            await asyncio.sleep(0)  # choosing among a million groups takes a while
            numbers = chosen.rows.tolist()
            prepared = await self.next_batch.fetched(numbers)
            await asyncio.sleep(0)
            fetched = await self._fetch_rest(numbers, prepared)
            if fetched.broken:
                await self._dead_letter(fetched.broken)
                continue
            overlong = await self._overlong(fetched)
            if overlong:
                await self._journal.append(decide_overlong(self._state, overlong, self._journal.clock.wall()))
                continue
            draft = draft_batch(self._state, self._selector, chosen, self._journal.clock.wall())
            record = await call_beside(len(numbers), complete_record, draft, fetched)
            await self._journal.append(record, candidates)
            packed = self.next_batch.take(record, len(prepared.groups))
            if packed:
                self._keep(packed)
            else:
                await self._pack(record, fetched)
            await self._trace(record, began_ns)
            await self._eviction.evict()
            self._journal.notify()  # uses that groups have left bound how many more may start
            return None

    async def _trace(self, record: BatchRecord, began_ns: int) -> None:
        if spans.enabled():
            run, groups = self._journal.name, [entry.group_id for entry in record.groups]
            await call_beside(len(groups), spans.assemble, run, record.generation, record.step, groups, began_ns)

    async def _fetch(self, numbers: list[int]) -> FetchedGroups:
        journal = self._journal
        return await fetch_groups(journal.store, journal.name, numbers, self._state.pool.columns)

    async def _fetch_rest(self, numbers: list[int], fetched: FetchedGroups) -> FetchedGroups:
        missing = [number for number in numbers if number not in fetched.groups]
        if not missing:
            return fetched
        return join_fetched(numbers, fetched, await self._fetch(missing))

    async def _overlong(self, fetched: FetchedGroups) -> list[int]:
        """List groups whose prompt leaves no completion token in the trainer's rows.

        The index has the lengths of whole rollouts. Where completions are truncated, only the frames have the prompt's.
        """
        if self._journal.config.batch.overlong != "truncate":
            return []
        seq_len = self._selector.inputs.seq_len
        prompts = await call_beside(len(fetched.groups), _longest_prompts, fetched)
        return sorted(number for number, longest in prompts.items() if longest >= seq_len)

    async def _dead_letter(self, broken: dict[int, str]) -> None:
        shown = dict(list(broken.items())[:LOGGED_GROUPS])
        logger.error("groups are unusable run=%s count=%d reasons=%s", self._journal.name, len(broken), shown)
        await self._journal.append(decide_dead_letters(broken, self._journal.clock.wall()))

    async def _get_packed(self, step: int) -> PackedBatch:
        """Return a batch of the current history; fetch and pack it again if it is not in memory."""
        async with self._packing:  # all ranks of a trainer ask at the same time
            recorded, packed = self._state.batches.get(step), self._packed.get(step)
            if recorded is None:
                self._check_requestable(step)
                raise Conflict(f"batch {step} was taken back by a rewind; request it again", name="step", value=step)
            # A follower learns of an attach or a rewind from the ledger, so an older packed batch may still be here.
            if packed and packed.layout is self._state.attachment and packed.record.generation == recorded.generation:
                return packed
            record = await self._journal.batch_record(recorded.entry)
            numbers = [entry.number for entry in record.groups]
            fetched = await self._fetch(numbers)
            if fetched.broken and self._journal.leading:
                await self._dead_letter_of(step, recorded, fetched.broken)
            return await self._pack(record, fetched)

    def held(self, step: int, made: RecordedBatch) -> PackedBatch | None:
        """Return a batch of the current history if it is in memory."""
        packed = self._packed.get(step)
        return packed if packed and packed.record.generation == made.generation else None

    async def _dead_letter_of(self, step: int, recorded: BatchState, broken: dict[int, str]) -> None:
        """Record groups of a batch that broke after it was assembled; once, however often it is requested."""
        async with self._journal.decision():
            if self._state.batches.get(step) is not recorded:
                return  # a checkpoint freed the batch and its bytes during the read
            unrecorded = {
                n: reason for n, reason in broken.items() if find_group_state(self._state, n)[0] != "dead_lettered"
            }
            if unrecorded:
                logger.error("batch cannot be served run=%s step=%d: resample to replace it", self._journal.name, step)
                await self._dead_letter(unrecorded)
        self._journal.notify()

    async def _pack(self, record: BatchRecord, fetched: FetchedGroups) -> PackedBatch:
        layout = self._state.attachment
        if layout is None:
            raise Conflict(f"run {self._journal.name} has no trainer attached", name="epoch", value=0, bound=1)
        return self._keep(await pack_beside(record, fetched, layout))

    def _keep(self, batch: PackedBatch) -> PackedBatch:
        self._packed[batch.record.step] = batch
        self._packed.move_to_end(batch.record.step)
        self._bound_memory()
        return batch

    def _bound_memory(self) -> None:
        held = [batch.nbytes for batch in self._packed.values()]
        while len(held) > KEPT_BATCHES or (len(held) > 1 and sum(held) > KEPT_BYTES):
            self._packed.popitem(last=False)
            held.pop(0)

    # ------------------------------------------------------------------ queries

    async def record(self, step: int, generation: int | None) -> StepRecord:
        """Return the record of a batch. Raises `NotFound` if that history has no such step, `Gone` once trimmed."""
        state = self._state
        entry = entry_of_batch(state, step, generation)
        record = await self._journal.batch_record(entry)
        status = find_batch_status(state, step, entry)
        packed = await self._get_packed(step) if status != "voided" and step in state.batches else None
        return await asyncio.to_thread(describe_batch, self._journal.name, record, status, packed)

    def longest_rollout(self, step: int) -> int:
        """Return the tokens of the longest rollout in the batch of `step`."""
        rows = self._state.index.rows_of(self._state.batches[step].numbers)
        return int(np.max(self._state.index["longest_tokens"][rows], initial=0))

    async def longest_prompt(self, step: int) -> int:
        """Return the tokens of the longest prompt in the batch of `step`, read from its frames."""
        numbers = self._state.batches[step].numbers.tolist()
        fetched = await self._fetch(numbers)
        prompts = await call_beside(len(numbers), _longest_prompts, fetched)
        return max(prompts.values(), default=0)


def _longest_prompts(fetched: FetchedGroups) -> dict[int, int]:
    """Return the tokens of the longest prompt of each group, by number."""
    return {number: int(np.max(group.prompt_lengths, initial=0)) for number, group in fetched.groups.items()}
