"""Calls the strategy for the groups of a batch, and explains why a batch waits.

Reads the state (`inputs`), checks the answers (`answer_checks`) and changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numpy as np

from replaybuf.errors import StrategyFault
from replaybuf.kernel.state.rotation import AdapterShare, share_batch
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.tickets import TicketBook
from replaybuf.kernel.strategy.answer_checks import check_selection
from replaybuf.kernel.strategy.contract import Budget, Groups, Selection, Strategy, Waiting
from replaybuf.kernel.strategy.inputs import StrategyInputs
from replaybuf.kernel.strategy.plugin_set import Bounds
from replaybuf.kernel.strategy.rates import Rates
from replaybuf.kernel.strategy.waiting_answer import name_columns, nearest, waiting, waits_for_groups
from replaybuf.plugins.time_limit import PLUGIN_ERRORS, TookTooLong, call_twice_limited
from replaybuf.wire.config import MOST_GROUPS, RunConfig
from replaybuf.wire.contract import Amount, WaitingAnswer
from replaybuf.wire.group import hash_name

logger = logging.getLogger(__name__)

T = TypeVar("T")

PRODUCER_SILENCE_S = 60.0
"""Time without a request for tickets after which an adapter counts as one without producers."""


SHORT_TRIES = 4
"""Calls of a strategy for one short share: its rules may leave fewer groups than it reported as usable."""


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSelection(Selection):
    """Groups of a batch, those of one adapter after those of another; `turn`: the adapter with the next turn.

    `short`: why the batch is not full; `ending`: the adapters whose last groups complete their step.
    """

    turn: str = ""
    short: Literal["", "tail", "timeout"] = ""
    ending: frozenset[str] = frozenset()


class Selector:
    """Calls to the strategy of run `name`. `last_asked_s`: by adapter, when a producer last asked for a ticket.

    The service and the simulator own the state, the book, the clock and the rates, and feed them.
    """

    def __init__(
        self,
        name: str,
        state: RunState,
        book: TicketBook,
        clock: Callable[[], float],
        rates: Rates,
        *,
        limited: bool = True,
    ) -> None:
        self.slowest_call_s = 0.0
        self._limited = limited
        self.last_asked_s: defaultdict[str, float] = defaultdict(lambda: -math.inf)
        self.inputs = StrategyInputs(name, state, book, clock, rates, self.ask)
        self._name = name
        self._state = state
        self._book = book
        self._clock = clock

    @property
    def config(self) -> RunConfig:
        """Configuration in force. Raises `NotFound` before there is one."""
        return self.inputs.config

    @property
    def strategy(self) -> Strategy[Any]:
        """Strategy of the configuration in force, with the feedback so far. Raises `StrategyFault`."""
        return self.inputs.plugins.strategy

    @property
    def bounds(self) -> Bounds:
        """Bounds of that strategy, which the core enforces."""
        return self.inputs.plugins.bounds

    def ask(self, what: str, call: Callable[[], T], plugin: str | None = None) -> T:
        """Call a plug-in, by default the strategy, within the time limit; the call changes nothing in it.

        Raises `StrategyFault` if it raises an error, or is too slow twice.
        """
        started_s = time.monotonic()
        try:
            return call_twice_limited(call) if self._limited else call()
        except StrategyFault:
            raise
        except PLUGIN_ERRORS as error:
            logger.exception("plug-in failed run=%s call=%s", self._name, what)
            why = f"in {what}: {error}" if isinstance(error, TookTooLong) else f"raised in {what}: {error!r}"
            plugin = plugin or f"strategy {self.config.strategy.name!r}"
            raise StrategyFault(f"{plugin} {why}", name=what, value=repr(error)) from error
        finally:
            self.slowest_call_s = max(self.slowest_call_s, time.monotonic() - started_s)

    @property
    def moment(self) -> tuple[int, int, int]:
        """Ledger entries, groups stored and tickets out: what a strategy sees follows from them and from time."""
        return self._state.entries, self._state.stored, self._book.out

    # ------------------------------------------------------------------ selection

    def choose(self, *, overdue: bool = False) -> BatchSelection | WaitingAnswer:
        """Choose the groups of the next step: of one adapter after another. Raises `StrategyFault`.

        The last groups of an adapter without prompts make a short share, if the run trains its tail. `overdue`: the
        trainer has waited for `batch.timeout_s`, so any groups may make a short batch.
        """
        if self._state.phase != "running":
            return self.explain(self._state.phase)
        if not self.config.active_adapters:
            return self.explain("paused")
        waits: dict[str, WaitingAnswer] = {}
        ending: set[str] = set()

        def offer(adapter: str, budget: Budget) -> Selection | None:
            outcome = self._choose(adapter, budget)
            if not isinstance(outcome, WaitingAnswer):
                return outcome
            waits[adapter] = outcome
            tail = self._choose_tail(adapter, budget, outcome)
            if tail:
                ending.add(adapter)
            return tail

        shares, following = self._share(offer)
        ending &= shares.keys()  # `share_batch` may ask an adapter and give it no share
        short: Literal["", "tail", "timeout"] = "tail" if ending else ""
        if not shares and overdue:
            shares, following = self._share(
                lambda adapter, budget: self._choose_fewer(adapter, budget, waits[adapter], overdue=True)
            )
            short = "timeout"
        if not shares or (short == "timeout" and _count(shares) < self.config.batch.min_groups):
            ended = self._state.next_step > self._state.step and self.batches_exhausted()
            return self.explain("awaiting_ack") if ended else nearest(waits)
        amounts = list(shares.values())
        weights = None
        if any(share.weights is not None for share in amounts):
            weights = np.concatenate([s.weights if s.weights is not None else np.ones(len(s.numbers)) for s in amounts])
        rows = np.concatenate([share.numbers for share in amounts])[:MOST_GROUPS]
        weights = None if weights is None else weights[:MOST_GROUPS]
        return BatchSelection(rows, weights, following, short, frozenset(ending))

    def _share(self, offer: Callable[[str, Budget], Selection | None]) -> tuple[dict[str, AdapterShare], str]:
        """Take the shares of the next batch from the offers of its adapters; return the adapter with the next turn."""

        def take(adapter: str, tokens: int | None, missing: int | None) -> AdapterShare | None:
            chosen = offer(adapter, Budget(tokens, missing, self.inputs.seq_len))
            if chosen is None:
                return None
            taken = self._state.index["tokens"][self._state.index.rows_of(chosen.rows)]
            return AdapterShare(chosen.rows, chosen.weights, int(taken.sum(dtype=np.int64)))

        config = self.config
        sizes = {name: config.groups_per_batch_of(name) for name in config.active_adapters}
        return share_batch(self._state.rotation, sizes, self._state.token_budget, take)

    def _choose_tail(self, adapter: str, budget: Budget, waits: WaitingAnswer) -> Selection | None:
        """Choose the last groups of an adapter that will get no more; None if there are none to train.

        At least one of them was never used, so the tail of a strategy that uses groups again comes to an end.
        """
        if self.config.batch.tail != "train" or not self._groups_exhausted(adapter):
            return None
        chosen = self._choose_fewer(adapter, budget, waits)
        if chosen is None:
            return None
        uses = self._state.index["times_sampled"][self._state.index.rows_of(chosen.rows)]
        return chosen if (uses == 0).any() else None

    def _choose_fewer(
        self, adapter: str, budget: Budget, waits: WaitingAnswer, *, overdue: bool = False
    ) -> Selection | None:
        """Choose the groups of an adapter that do not fill `budget`: ask for as many as the strategy can use now."""
        most = waits.have.groups
        for _ in range(SHORT_TRIES):
            if waits.blocked_on != "producers" or most < 1:
                return None
            fewer = most if budget.groups is None else min(most, budget.groups)
            outcome = self._choose(adapter, dataclasses.replace(budget, groups=fewer), overdue=overdue)
            if not isinstance(outcome, WaitingAnswer):
                return outcome
            waits, most = outcome, min(most - 1, outcome.have.groups)
        return None

    def _choose(
        self, adapter: str, budget: Budget | None = None, *, overdue: bool = False
    ) -> Selection | WaitingAnswer:
        """Ask the strategy for groups of one adapter, by default for the rest of its own batch."""
        state, step = self._state, self._state.next_step
        staleness = self.bounds.max_staleness
        if staleness is not None and state.published[adapter] < state.version_at(step, adapter) - staleness:
            return self.explain("awaiting_publication", adapter=adapter)
        groups = self.inputs.usable(step, adapter)
        view = self.inputs.view(step, groups, adapter, overdue=overdue)
        budget = budget or self.inputs.own_budget(adapter)
        name, strategy = self.config.strategy.name, self.strategy

        def checked() -> Selection | Waiting:  # checked inside the call: a malformed answer is a fault of the strategy
            rng = self.inputs.generator(step, adapter)
            chosen = strategy.select(groups.unread_copy(), view, dataclasses.replace(budget), rng)
            return check_selection(name, step, chosen, state.index, self.inputs.usability_rules(step, adapter), budget)

        chosen = self.ask("select", checked)
        if isinstance(chosen, Selection):
            return chosen
        exhausted = self._tickets_exhausted(adapter)
        lacking = self.inputs.waits_for_columns(groups, chosen.reason, adapter, budget, exhausted=exhausted)
        if lacking:
            waits = self.explain("awaiting_columns", groups, adapter)
            return name_columns(waits, lacking, self.inputs.plugins.all_required)
        reason = self._reason(groups, chosen.reason, adapter)
        return self.explain(reason, groups, adapter, chosen if reason == chosen.reason else None)

    def list_prefetch_groups(self) -> list[int]:
        """List the oldest groups that the next batch may use, up to its budget, so that they are read early."""
        numbers: list[int] = []
        for adapter in self._state.rotation.order(self.config.active_adapters):
            groups, budget = self.inputs.usable(self._state.next_step, adapter), self.inputs.own_budget(adapter)
            fits = np.ones(len(groups), np.bool_)
            if budget.tokens is not None:
                fits &= np.cumsum(groups.tokens, dtype=np.int64) <= budget.tokens
            numbers += groups.row[fits][: budget.groups].tolist()
        return numbers

    # ------------------------------------------------------------------ explaining

    def why_waiting(self) -> WaitingAnswer | None:
        """Explain why the next batch cannot be made now; None if it can."""
        if self._state.phase == "running" and self._state.next_step > self._state.step + self.bounds.look_ahead:
            return self.explain("awaiting_ack")
        try:
            outcome = self.choose()
        except StrategyFault:
            return self.explain("paused")
        return outcome if isinstance(outcome, WaitingAnswer) else None

    def why_adapter_waits(self, adapter: str) -> WaitingAnswer | None:
        """Explain why an adapter has no groups for a batch of its own; None if it has."""
        if self._state.phase != "running":
            return self.explain(self._state.phase, adapter=adapter)
        if (phase := self.config.phase_of(adapter)) != "running":
            return self.explain(phase, adapter=adapter)
        try:
            outcome = self._choose(adapter)
        except StrategyFault:
            return self.explain("paused", adapter=adapter)
        return outcome if isinstance(outcome, WaitingAnswer) else None

    def silent(self, adapter: str) -> bool:
        """Return whether no producer has asked for a ticket of an adapter for `PRODUCER_SILENCE_S`."""
        return self._clock() - self.last_asked_s[adapter] > PRODUCER_SILENCE_S

    def _tickets_exhausted(self, adapter: str) -> bool:
        """Return whether no prompt of an adapter is left and none of its tickets is out."""
        return not self._book.out_of(adapter) and self._book.prompts_exhausted(adapter)

    def _groups_exhausted(self, adapter: str) -> bool:
        """Return whether an adapter gets no more usable groups, neither from producers nor from stages."""
        return self._tickets_exhausted(adapter) and not self.inputs.incomplete(self._state.next_step, adapter).groups

    def batches_exhausted(self) -> bool:
        """Return whether no batch can come any more: no prompt left, no ticket out, too few groups everywhere."""
        if not all(self._groups_exhausted(name) for name in self.config.kept_adapters):
            return False
        waits = (self.why_adapter_waits(name) for name in self.config.kept_adapters)
        return all(wait is not None and waits_for_groups(wait) for wait in waits)

    def explain(
        self, reason: str, groups: Groups | None = None, adapter: str = "", limit: Waiting | None = None
    ) -> WaitingAnswer:
        """Build the waiting answer of a batch, or of one adapter's part; `groups` are the usable groups.

        `limit`: how many of these may be used now, according to the strategy.
        """
        if self.config.adapters and not adapter:
            live = self._state.pool.live.totals()
            return waiting(reason, Amount(live.groups, live.tokens), self._state)
        have = self.usable_amount(adapter, groups)
        if limit:
            have = Amount(_least(limit.groups, have.groups), _least(limit.tokens, have.tokens))
        missing = self.inputs.own_budget(adapter).groups or 0
        detail = limit.detail if limit else None
        return waiting(reason, have, self._state, adapter=adapter, missing=missing, detail=detail)

    def usable_amount(self, adapter: str, groups: Groups | None = None) -> Amount:
        """Sum up `groups`, by default those that the strategy sees for the next batch."""
        usable = self.inputs.usable(self._state.next_step, adapter) if groups is None else groups
        return Amount(len(usable), int(usable.tokens.sum(dtype=np.int64)))

    def _reason(self, groups: Groups, reason: str, adapter: str) -> str:
        """Return the first reason that holds; `reason` is that of the strategy."""
        if len(groups) or reason == "rate_limited":
            return reason
        if hash_name(adapter) in self._state.pool.stale_adapters:
            return "all_stale"
        left_over = self._state.pool.live.totals(adapter).groups or self._used_up_by_last_batch(adapter)
        if self.bounds.max_uses != 1 and left_over:
            return "reuse_exhausted"
        return "no_producers" if self.silent(adapter) and not self._book.out_of(adapter) else "no_groups"

    def _used_up_by_last_batch(self, adapter: str) -> bool:
        """Return whether the newest batch used groups for the last time."""
        last = self._state.batches.get(self._state.next_step - 1)
        if last is None or self._state.max_uses is None:
            return False
        rows = self._state.index.rows_of(last.numbers)
        if adapter:
            rows = rows[self._state.index["adapter"][rows] == hash_name(adapter)]
        return bool((self._state.index["times_sampled"][rows] >= self._state.max_uses).any())


def _least(limit: int | None, amount: int) -> int:
    return amount if limit is None else min(int(limit), amount)


def _count(shares: dict[str, AdapterShare]) -> int:
    return sum(len(share.numbers) for share in shares.values())
