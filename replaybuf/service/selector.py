"""What the strategy is asked, and what it is told: views of the state in, checked answers out.

Reads the state and changes nothing. The core's own bounds (staleness, uses, rows of `seq_len`) are applied here,
before a strategy chooses; its choice is held to the contract afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from replaybuf.advantages import advantages
from replaybuf.config import RunConfig, check_run_config
from replaybuf.errors import Invalid, StrategyFault
from replaybuf.flow import TicketBook
from replaybuf.index import LIVE, Numbers
from replaybuf.plugins import build_strategy
from replaybuf.service import answers
from replaybuf.service.answers import Amount, WaitingAnswer
from replaybuf.service.journal import Journal
from replaybuf.strategy import Budget, BufferView, Evictions, Flow, Groups, Selection, Strategy, Waiting

logger = logging.getLogger(__name__)

T = TypeVar("T")

PRODUCER_SILENCE_S = 60.0
_SAMPLED_GROUPS = 256
_HISTORY_BATCHES = 16


class Selector:
    """Questions to the strategy of one run. `last_asked_s` is when a producer last asked for a ticket."""

    def __init__(self, journal: Journal, book: TicketBook) -> None:
        self.last_asked_s = -float("inf")
        self._journal = journal
        self._state = journal.state
        self._book = book
        self._built: tuple[RunConfig, Strategy[Any]] | None = None

    @property
    def strategy(self) -> Strategy[Any]:
        """Strategy of the configuration in force."""
        config = self._journal.config
        if self._built is None or self._built[0] is not config:
            self._built = (config, build_strategy(config.strategy.name, config.strategy.options))
        return self._built[1]

    @property
    def seq_len(self) -> int:
        """Room of a micro-batch: what the trainer attached with, or the configuration's."""
        attached = self._state.attached
        return attached.seq_len if attached else self._journal.config.batch.seq_len

    def ask(self, what: str, call: Callable[[], T]) -> T:
        """Call the strategy. Raises `StrategyFault` for whatever it raises."""
        try:
            return call()
        except Exception as error:  # a plug-in may raise anything; the run pauses with it, the service lives
            name = self._journal.config.strategy.name
            logger.exception("strategy raised run=%s strategy=%s call=%s", self._journal.name, name, what)
            raise StrategyFault(
                f"strategy {name!r} raised in {what}: {error!r}", name=what, value=repr(error)
            ) from error

    # ------------------------------------------------------------------ admission

    def capacity(self) -> int:
        """Count how many more groups producers may start now."""
        flow = self._flow()
        capacity = self.ask("admit", lambda: self.strategy.admit(self.view(self._state.next_step), flow))
        limit = self._journal.config.limits.max_tokens_live
        if limit is not None:
            coming = self._book.out * flow.tokens_per_group
            room = limit - self._state.live_tokens() - coming
            capacity = min(capacity, int(room // flow.tokens_per_group))
        return capacity

    def _flow(self) -> Flow:
        recent = self._state.index["tokens"][-_SAMPLED_GROUPS:]
        config = self._journal.config
        if len(recent):
            mean = float(recent.mean())
        else:  # until the first groups arrive: half-full rollouts, and no more than the budget holds
            prior = (config.group_size or 8) * config.batch.seq_len / 2
            mean = min(prior, float(config.batch.tokens_per_batch or prior))
        return Flow(now_s=self._journal.clock(), tokens_per_group=mean, max_tokens_live=config.limits.max_tokens_live)

    def view(self, step: int, groups: Groups | None = None) -> BufferView:
        """Describe the buffer for a decision about `step`; counts are of `groups`, or of all live ones."""
        state, config = self._state, self._journal.config
        live = state.count(LIVE) if groups is None else len(groups)
        tokens = state.live_tokens() if groups is None else int(groups.tokens.sum(dtype=np.int64))
        return BufferView(
            step=step,
            version=config.version_of(step),
            published_version=state.published[""],
            steps_per_publish=config.steps_per_publish,
            groups_live=live,
            tokens_live=tokens,
            tickets_out=self._book.out,
            budget=Budget(config.batch.tokens_per_batch, config.batch.groups_per_batch, self.seq_len),
            batches=tuple(len(state.batches[s].numbers) for s in sorted(state.batches)[-_HISTORY_BATCHES:]),
        )

    # ------------------------------------------------------------------ selection

    def choose(self) -> Selection | WaitingAnswer:
        """Choose the groups of the next step, or say why not. Raises `StrategyFault`."""
        blocked = self._blocked()
        if blocked:
            return blocked
        step = self._state.next_step
        groups = self._usable(step)
        view = self.view(step, groups)
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed(step))))
        chosen = self.ask("select", lambda: self.strategy.select(groups, view, view.budget, rng))
        if isinstance(chosen, Waiting):
            return self.explain(self._reason(groups, chosen.reason), groups)
        self._check(chosen, groups, view.budget)
        return chosen

    def seed(self, step: int) -> list[int]:
        """Seed of the generator that chooses `step`: (run seed, generation, step)."""
        return [self._journal.config.seed, self._state.generation, step]

    def _blocked(self) -> WaitingAnswer | None:
        if self._state.state != "running":
            return self.explain(self._state.state)
        wanted = self._journal.config.version_of(self._state.next_step)
        staleness = self.strategy.max_staleness
        if staleness is not None and self._state.published[""] < wanted - staleness:
            return self.explain("awaiting_publication")
        return None

    def _usable(self, step: int) -> Groups:
        """Return the live groups that the strategy's bounds and the trainer's rows allow at `step`."""
        index, rows = self._state.index, self._state.index.live()
        config = self._journal.config
        staleness = config.version_of(step) - index["policy_version"][rows]
        fits = staleness >= 0
        if self.strategy.max_staleness is not None:
            fits &= staleness <= self.strategy.max_staleness
        if self.strategy.max_uses is not None:
            fits &= index["times_sampled"][rows] < self.strategy.max_uses
        if config.batch.overlong == "reject":
            fits &= index["longest_tokens"][rows] <= self.seq_len
        return index.groups(rows[fits])

    def _check(self, chosen: Selection, groups: Groups, budget: Budget) -> None:
        """Hold a strategy to its contract. Raises `StrategyFault` naming the strategy and the rule."""
        name = self._journal.config.strategy.name
        rows = np.asarray(chosen.rows, np.int64)
        given = np.isin(groups.row, rows)
        tokens = int(groups.tokens[given].sum(dtype=np.int64))
        rules = [
            ("selects at least one group", len(rows) > 0, len(rows)),
            ("selects a group once", len(np.unique(rows)) == len(rows), len(rows)),
            ("selects only groups it was given", int(given.sum()) == len(np.unique(rows)), rows[:8].tolist()),
            ("keeps the token budget", budget.tokens is None or tokens <= budget.tokens, tokens),
            ("keeps the group budget", budget.groups is None or len(rows) <= budget.groups, len(rows)),
            ("gives one weight per group", chosen.weights is None or len(chosen.weights) == len(rows), len(rows)),
        ]
        for rule, kept, value in rules:
            if not kept:
                raise StrategyFault(
                    f"strategy {name!r} broke the rule '{rule}' at step {self._state.next_step}: {value}",
                    name=name,
                    value=value,
                    bound=rule,
                )

    # ------------------------------------------------------------------ eviction

    def evictable(self, only: Numbers | None = None) -> dict[str, list[int]]:
        """Name, by reason, the live groups (of `only`) that no batch from the next step on can use."""
        index = self._state.index
        rows = index.live() if only is None else index.rows_of(only)
        rows = rows[index["state"][rows] == LIVE]
        by_reason: dict[str, list[int]] = {}
        if not len(rows):
            return by_reason
        groups = index.groups(rows)
        view = self.view(self._state.next_step)
        found: Evictions = self.ask("evict", lambda: self.strategy.evict(groups, view))
        for number, reason in zip(found.rows, found.reasons, strict=True):
            by_reason.setdefault(reason, []).append(int(number))
        if self._journal.config.batch.overlong == "reject":
            longer = set(groups.row[index["longest_tokens"][rows] > self.seq_len].tolist()) - set(found.rows)
            if longer:
                by_reason["overlong"] = sorted(longer)
        return by_reason

    def oversized(self, only: Numbers | None = None) -> list[int]:
        """Name the live groups (of `only`) that no batch can hold, written to Redis past the door."""
        budget = self._journal.config.batch.tokens_per_batch
        if budget is None:
            return []
        index = self._state.index
        rows = index.live() if only is None else index.rows_of(only)
        numbers: list[int] = index["number"][
            rows[(index["state"][rows] == LIVE) & (index["tokens"][rows] > budget)]
        ].tolist()
        return numbers

    # ------------------------------------------------------------------ explaining

    def why_waiting(self) -> WaitingAnswer | None:
        """Say why the next batch cannot be made now; None where it can."""
        if self._state.state == "running" and self._state.next_step > self._state.step + self.strategy.look_ahead:
            return self.explain("awaiting_ack")
        try:
            outcome = self.choose()
        except StrategyFault:
            return self.explain("paused")
        return outcome if isinstance(outcome, WaitingAnswer) else None

    def supply_ended(self, waits: WaitingAnswer) -> bool:
        """Say whether what is waited for can no longer come: the prompts are used up and no ticket is out."""
        book = self._book
        return waits.blocked_on == "producers" and not book.out and book.used_up("")

    def explain(self, reason: str, groups: Groups | None = None) -> WaitingAnswer:
        """Build the waiting answer of a batch; `groups` are the usable ones."""
        usable = self._usable(self._state.next_step) if groups is None else groups
        have = Amount(len(usable), int(usable.tokens.sum(dtype=np.int64)))
        return answers.waiting(reason, have, self._journal.config)

    def _reason(self, groups: Groups, told: str) -> str:
        """Choose the first reason that holds when a strategy says it cannot fill a batch."""
        if len(groups) or told == "rate_limited":
            return told
        if self._state.evicted_since_batch:
            return "all_stale"
        if self.strategy.max_uses != 1 and self._state.count(LIVE):
            return "reuse_exhausted"
        silent = self._journal.clock() - self.last_asked_s > PRODUCER_SILENCE_S
        return "no_producers" if silent and not self._book.out else "no_groups"


def resolve_config(config: RunConfig) -> tuple[RunConfig, Strategy[Any]]:
    """Check a configuration and fill in the defaults of its strategy's options. Raises `Invalid`."""
    check_run_config(config)
    if config.filters:
        names = [spec.name for spec in config.filters]
        raise Invalid(f"filters is {names}; this release has no filters", name="filters", value=names, bound=[])
    advantages(config.advantage, np.zeros(1))
    strategy = build_strategy(config.strategy.name, config.strategy.options)
    spec = msgspec.structs.replace(config.strategy, options=msgspec.to_builtins(strategy.options))
    return msgspec.structs.replace(config, strategy=spec), strategy
