"""A run as the service keeps one, without a store: the same fold, book of tickets and selector, on a virtual clock.

Every method does what the call of the same purpose does in `service/door.py`, `batches.py` and `session.py`, less the
bytes: decide, write the record, apply it. Groups are numbers alone; there are no payloads to lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import Invalid
from replaybuf.kernel.index import Numbers
from replaybuf.kernel.limits import Load, count_fitting
from replaybuf.kernel.plugin_set import resolve_config
from replaybuf.kernel.rates import Rates
from replaybuf.kernel.selection import Selector
from replaybuf.kernel.state import RunState
from replaybuf.kernel.strategy import Selection
from replaybuf.kernel.tickets import Ticket, TicketBook, TicketChange, prompt_key
from replaybuf.wire.config import RunConfig
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.ledger import (
    AckRecord,
    AnyRecord,
    AttachRecord,
    BatchEntry,
    BatchRecord,
    CheckpointRecord,
    ConfigRecord,
    EvictRecord,
    PolicyRecord,
    TicketRecord,
)

EPOCH = 1


class VirtualRun:
    """One run at the virtual time `now_s`. `evictions` are those not yet taken by `take_evictions`.

    Raises `Invalid` for a configuration that the service would refuse.
    """

    def __init__(self, config: RunConfig, ranks: int) -> None:
        self.now_s = 0.0
        resolved, bounds = resolve_config(config)
        if config.adapters:
            adapters = sorted(config.adapters)
            raise Invalid(f"adapters is {adapters}; the simulator has one policy", name="adapters", value=adapters)
        self.state = RunState()
        self.book = TicketBook(config.tickets.ttl_s, config.tickets.max_attempts, config.tickets.prompts)
        self.rates = Rates(self.now_s)
        self.selector = Selector("simulated", self.state, self.book, lambda: self.now_s, self.rates)
        self.evictions: list[tuple[str, npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []
        self._brought: set[int] = set()
        self._apply(ConfigRecord(config=msgspec.to_builtins(resolved), max_uses=bounds.max_uses))
        self._batch = batch = resolved.batch
        self._apply(
            AttachRecord(
                epoch=EPOCH,
                step=0,
                dp_world_size=ranks,
                seq_len=batch.seq_len,
                pad_to_multiple_of=batch.pad_to_multiple_of,
            )
        )

    @property
    def config(self) -> RunConfig:
        """Configuration with its defaults filled in."""
        return self.selector.config

    @property
    def published_version(self) -> int:
        """Newest version that the trainer announced."""
        return self.state.published[""]

    def _apply(self, record: AnyRecord) -> None:
        self.state.apply(self.state.entries + 1, record)

    # ------------------------------------------------------------------ producers

    def take_tickets(self, count: int) -> list[Ticket]:
        """Issue up to `count` tickets, as far as the strategy admits more groups now. Raises `StrategyFault`."""
        self.selector.last_asked_s[""] = self.now_s
        if self.state.state != "running" or self.book.used_up(""):
            return []
        capacity = self.selector.capacity()
        if capacity < 1:
            return []
        return self.book.issue("", min(count, capacity), self.state.generation, self.now_s).issued

    def return_ticket(self, ticket: Ticket, reason: str) -> None:
        """Take a ticket back where it is still out: a failed attempt."""
        if self.book.holds(ticket):
            self._keep(self.book.give_back(ticket, reason), reason)

    def expire_tickets(self) -> int:
        """Take back tickets past their deadline; return how many."""
        change = self.book.expire(self.now_s)
        self._keep(change, "expired")
        return change.counts["expired"]

    def _keep(self, change: TicketChange, reason: str) -> None:
        for ticket in change.failed:
            self._apply(
                TicketRecord(
                    adapter="",
                    prompt_index=ticket.prompt_index,
                    outcome="failed",
                    attempts=ticket.attempt,
                    reason=reason,
                )
            )

    def refusal(self, tokens: int, longest_tokens: int) -> str | None:
        """Say why the door would refuse a group of this size; None where it would not."""
        batch = self._batch
        if batch.overlong == "reject" and longest_tokens > batch.seq_len:
            return "overlong"
        if batch.tokens_per_batch is not None and tokens > batch.tokens_per_batch:
            return "over_budget"
        return None

    def brought(self, prompt_index: int) -> bool:
        """Say whether the group of a prompt is stored already: another one is a duplicate."""
        return prompt_index in self._brought

    def count_fitting(self, coming: Sequence[Load]) -> int:
        """Count the first of these groups that the door has room for; the others are told to come again."""
        limits, state = self.config.limits, self.state
        if limits.max_tokens_live is None and limits.max_bytes_live is None:
            return len(coming)
        held = Load(0, state.live_totals().tokens, state.live_bytes())
        return count_fitting(held, coming, limits, self.selector.lacking)[0]

    def append(self, entries: npt.NDArray[Any]) -> None:
        """Store groups, `ENTRY` [n], whose prompts are not brought yet; evict those that came too late."""
        if not len(entries):
            return
        first = self.state.stored + 1
        numbers: Numbers = np.arange(first, first + len(entries), dtype=np.int64)
        self.state.store(numbers, entries)
        indexes = entries["prompt_index"].tolist()
        self._brought.update(indexes)
        change = self.book.done(("", index) for index in indexes)
        self.rates.record_durations(self.now_s - since_s for since_s in change.done_since_s)
        self.rates.record_stored(self.now_s, len(entries))
        self._evict(numbers)

    def _evict(self, only: Numbers | None = None) -> None:
        by_reason = self.selector.evictable(only)
        if not by_reason:
            return
        index = self.state.index
        for reason, numbers in by_reason.items():
            rows = index.rows_of(numbers)
            unused = rows[index["times_sampled"][rows] == 0]
            self.evictions.append((reason, index["tokens"][unused].copy(), index["rollouts"][unused].copy()))
        self._apply(EvictRecord(step=self.state.next_step, numbers=by_reason))

    def take_evictions(self) -> list[tuple[str, npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """Return what was evicted unused since the last call: reason, tokens and rollouts of each group."""
        taken, self.evictions = self.evictions, []
        return taken

    # ------------------------------------------------------------------ trainer

    def batch(self, step: int) -> BatchRecord | WaitingAnswer:
        """Assemble the batch of `step`, the next one, or say why not. Raises `StrategyFault`."""
        if step > self.state.step + self.selector.bounds.look_ahead:
            return self.selector.explain("awaiting_ack")
        chosen = self.selector.choose()
        if isinstance(chosen, WaitingAnswer):
            if step == self.state.step and self.selector.supply_ended(chosen):
                self._finish()
                return self.selector.explain("finished")
            return chosen
        record = self._write_down(chosen)
        self._apply(record)
        self._evict()
        return record

    def _finish(self) -> None:
        self._apply(
            ConfigRecord(
                config=msgspec.to_builtins(self.config),
                max_uses=self.state.max_uses,
                state="finished",
                reason="prompts",
            )
        )

    def _write_down(self, chosen: Selection) -> BatchRecord:
        state, config = self.state, self.config
        step, index = state.next_step, state.index
        version = config.version_of(step)
        rows = index.rows_of(chosen.rows)
        columns: Sequence[list[int]] = [
            index[name][rows].tolist()
            for name in ("number", "prompt_index", "policy_version", "times_sampled", "tokens")
        ]
        held = [
            BatchEntry(
                number=number,
                group_id=prompt_key("", prompt_index),
                prompt_id="",
                prompt_index=prompt_index,
                adapter="",
                policy_version=policy_version,
                staleness=version - policy_version,
                times_sampled=times_sampled + 1,
                tokens=tokens,
                payload_key="",
            )
            for number, prompt_index, policy_version, times_sampled, tokens in zip(*columns, strict=True)
        ]
        return BatchRecord(
            step=step,
            generation=state.generation,
            batch_id=f"{state.generation}-{step}",
            digest="",
            version=version,
            strategy=config.strategy.name,
            options=config.strategy.options,
            seed=self.selector.inputs.seed(step),
            tokens=sum(columns[4]),
            rollouts=int(index["rollouts"][rows].sum()),
            groups=held,
        )

    def feedback(self, record: BatchRecord) -> dict[str, Any]:
        """Make up what a trainer sends with its ack: the mean |advantage| of each group of its batch."""
        index = self.state.index
        numbers = {group.number: group.group_id for group in record.groups}
        rows = index.rows_of(sorted(numbers))
        told = zip(index["number"][rows].tolist(), index["advantage_abs_mean"][rows].tolist(), strict=True)
        return {"priorities": {numbers[number]: advantage for number, advantage in told}}

    def ack(self, waited_s: float, feedback: dict[str, Any] | None = None) -> None:
        """Count the next unacked step as trained; `waited_s`: what it waited for others so far.

        `feedback` is observed by the strategy; priorities in it change nothing else.
        """
        state = self.state
        self._apply(AckRecord(step=state.step, epoch=EPOCH, feedback=feedback))
        self.rates.record_ack(self.now_s, waited_s=waited_s, stored=state.stored, too_stale=state.evicted["too_stale"])

    def publish(self) -> None:
        """Announce version(next unacked step)."""
        version = self.config.version_of(self.state.step)
        if version > self.published_version:
            self._apply(PolicyRecord(version=version, weights_uri=None, adapter="", epoch=EPOCH))

    def checkpoint(self) -> None:
        """Let go what only steps before the next unacked one would need."""
        self._apply(CheckpointRecord(step=self.state.step, keep=1))
