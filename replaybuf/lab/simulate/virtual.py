"""A run without a store: state, ticket book, selector and decisions of the service, on a virtual clock.

Each call makes the decision of the service (`kernel.decide`) and applies its record. There are no payloads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from replaybuf.errors import Invalid
from replaybuf.kernel.decide.config import decide_create, decide_end
from replaybuf.kernel.decide.eviction import decide_removals
from replaybuf.kernel.decide.intake import decide_room, decide_tickets
from replaybuf.kernel.decide.prompts import decide_failed_prompt
from replaybuf.kernel.decide.records import (
    GroupLabel,
    decide_ack,
    decide_attach,
    decide_checkpoint,
    decide_policy,
    draft_batch,
)
from replaybuf.kernel.rows.index import Numbers
from replaybuf.kernel.state.limits import Load
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.tickets import Ticket, TicketBook, TicketChange, prompt_key
from replaybuf.kernel.strategy.rates import Rates
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.kernel.strategy.waiting_answer import BatchTimeout
from replaybuf.wire.config import RunConfig
from replaybuf.wire.contract import AttachRequest, WaitingAnswer
from replaybuf.wire.group_check import GroupLimits, Rejection, check_token_limits
from replaybuf.wire.ledger import AnyRecord, BatchRecord, EvictRecord

EPOCH = 1


class VirtualRun:
    """One run at the virtual time `now_s`. Raises `Invalid` for a configuration that the service would reject."""

    def __init__(self, config: RunConfig, ranks: int) -> None:
        self.now_s = 0.0
        created = decide_create(config, self.now_s)
        if config.adapters:
            names = sorted(config.adapters)
            raise Invalid(f"adapters is {names}; the simulator has one policy", name="adapters", value=names)
        self.state = RunState()
        self.book = TicketBook(config.tickets.ttl_s, config.tickets.max_attempts, config.supplies)
        self.rates = Rates(self.now_s)
        self.selector = Selector("simulated", self.state, self.book, lambda: self.now_s, self.rates, limited=False)
        self._evicted: list[tuple[str, npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []
        self._stored_prompts: set[int] = set()
        self._batch_timeout = BatchTimeout()
        self._apply(created)
        self._apply(decide_attach(self.state, AttachRequest(dp_world_size=ranks), self.now_s))
        batch = self.config.batch
        self._bounds = GroupLimits(
            seq_len=batch.seq_len if batch.overlong == "reject" else None, tokens_per_batch=self.state.token_budget
        )

    @property
    def config(self) -> RunConfig:
        """Configuration with its defaults filled in."""
        return self.selector.config

    @property
    def published_version(self) -> int:
        """Newest version that the trainer announced."""
        return self.state.published[""]

    def _apply(self, record: AnyRecord | None) -> None:
        if record:
            self.state.apply(self.state.entries + 1, record)

    # ------------------------------------------------------------------ producers

    def take_tickets(self, count: int) -> list[Ticket]:
        """Issue up to `count` tickets. Raises `StrategyFault`."""
        self.selector.last_asked_s[""] = self.now_s
        change = decide_tickets(self.state, self.book, self.selector, "", count, self.now_s)
        return change.issued if isinstance(change, TicketChange) else []

    def return_ticket(self, ticket: Ticket, reason: str) -> None:
        """Take a ticket back if it is still out."""
        if self.book.holds(ticket):
            self._fail(self.book.give_back(ticket, reason), reason)

    def expire_tickets(self) -> None:
        """Take back tickets past their deadline."""
        self._fail(self.book.expire(self.now_s), "expired")

    def _fail(self, change: TicketChange, reason: str) -> None:
        for ticket in change.failed:
            self._apply(decide_failed_prompt(self.state, ticket, reason, self.now_s))

    def rejection(self, tokens: int, longest_tokens: int) -> Rejection | None:
        """Return why the service would reject a group of this size."""
        return check_token_limits(tokens, longest_tokens, self._bounds)

    def has_group(self, prompt_index: int) -> bool:
        """Return whether the group of a prompt is stored: another one is a duplicate."""
        return prompt_index in self._stored_prompts and ("", prompt_index) not in self.state.reissues.waiting

    def fitting(self, coming: Sequence[Load]) -> int:
        """Return how many of the first groups fit under the limits; the others have to retry."""
        return decide_room(self.state, self.selector, coming)[0]

    def append(self, entries: npt.NDArray[Any]) -> None:
        """Store groups, `ENTRY` [n], of prompts without a group; evict those that came too late."""
        if not len(entries):
            return
        first = self.state.stored + 1
        numbers: Numbers = np.arange(first, first + len(entries), dtype=np.int64)
        self.state.store(numbers, entries)
        indexes = entries["prompt_index"].tolist()
        self._stored_prompts.update(indexes)
        prompts = [("", index) for index in indexes]
        change = self.book.complete(prompts, {prompt: self.state.reissues.count(prompt) for prompt in prompts})
        self.rates.record_durations(self.now_s - issued_s for issued_s in change.issue_times_s)
        self.rates.record_stored(self.now_s, len(entries))
        self._evict(numbers)

    def _evict(self, only: Numbers | None = None) -> None:
        removals = decide_removals(self.state, self.selector, self.now_s, only)
        self._remove(itertools.chain.from_iterable(removals))

    def _remove(self, records: Iterable[AnyRecord]) -> None:
        """Apply records, and keep the sizes of the groups that they evict unused."""
        index = self.state.index
        for record in records:
            if isinstance(record, EvictRecord):
                for reason, numbers in record.numbers.items():
                    rows = index.rows_of(numbers)
                    unused = rows[index["times_sampled"][rows] == 0]
                    self._evicted.append((reason, index["tokens"][unused].copy(), index["rollouts"][unused].copy()))
            self._apply(record)
        self.book.reissue(self.state.reissues)

    def take_evicted(self) -> list[tuple[str, npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """Return what was evicted unused since the last call: reason, tokens and rollouts of each group."""
        evicted, self._evicted = self._evicted, []
        return evicted

    # ------------------------------------------------------------------ trainer

    def batch(self, step: int) -> BatchRecord | WaitingAnswer:
        """Assemble the batch of `step`, the next one, or return why not. Raises `StrategyFault`."""
        if step > self.state.step + self.selector.bounds.look_ahead:
            return self.selector.explain("awaiting_ack")
        overdue = self.left_s(step) == 0
        chosen = self.selector.choose(overdue=overdue)
        if isinstance(chosen, WaitingAnswer):
            self._batch_timeout.record(self.state, step, chosen, self.now_s)
            self._remove(decide_end(self.state, self.selector, self.now_s))
            return self.selector.explain("finished") if self.state.phase == "finished" else chosen
        index = self.state.index
        prompts = index["prompt_index"][index.rows_of(chosen.rows)].tolist()
        labels = [GroupLabel(prompt_key("", prompt)) for prompt in prompts]
        record = draft_batch(self.state, self.selector, chosen, self.now_s).complete(labels, "")
        self._apply(record)
        self._evict()
        return record

    def left_s(self, step: int) -> float | None:
        """Return the time until the batch of `step` may be short; None = no time-out is coming."""
        return self._batch_timeout.left_s(self.state, step, self.now_s)

    def feedback(self, record: BatchRecord) -> dict[str, Any]:
        """Make up the feedback of a trainer: the mean |advantage| of each group of its batch as priority."""
        index = self.state.index
        rows = index.rows_of([group.number for group in record.groups])
        means = index["advantage_abs_mean"][rows].tolist()
        return {"priorities": {group.group_id: mean for group, mean in zip(record.groups, means, strict=True)}}

    def ack(self, waited_s: float, feedback: dict[str, Any] | None = None) -> None:
        """Ack the next unacked step; `waited_s`: total time it waited for others.

        The strategy observes `feedback`. The priorities in it are not applied: recorded ones name other groups.
        """
        state = self.state
        self._apply(decide_ack(state, state.step, EPOCH, feedback, {}, self.now_s))
        self.rates.record_ack(
            self.now_s, waited_s=waited_s, stored=state.stored, too_stale=state.totals.evicted["too_stale"]
        )

    def publish(self) -> None:
        """Publish version(next unacked step)."""
        version = self.config.version_of(self.state.step)
        self._apply(decide_policy(self.state, version, EPOCH, None, "", self.now_s))

    def checkpoint(self) -> None:
        """Record a checkpoint of the next unacked step, and keep no older one."""
        self._apply(decide_checkpoint(self.state, self.state.step, 1, self.now_s))
