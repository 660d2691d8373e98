"""What the strategy is asked, and what it is told: views of the state in, checked answers out.

Reads the state and changes nothing. The core's own bounds (staleness, uses, rows of `seq_len`) are applied here,
before a strategy chooses; its choice is held to the contract afterwards.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np

from replaybuf.advantages import advantages
from replaybuf.config import LARGEST_INTEGER, RunConfig, check_run_config
from replaybuf.errors import Invalid, NotFound, StrategyFault
from replaybuf.flow import TicketBook
from replaybuf.index import LIVE, Numbers
from replaybuf.plugins import build_filter, build_strategy, reported
from replaybuf.rates import Rates
from replaybuf.service import answers
from replaybuf.service.answers import Amount, WaitingAnswer
from replaybuf.service.bounded import TookTooLong, bounded
from replaybuf.state import LiveTotals, RunState
from replaybuf.strategy import (
    REASONS,
    Budget,
    BufferView,
    Evictions,
    Filter,
    Flow,
    Groups,
    Rows,
    Selection,
    Strategy,
    StrategyOptions,
    Waiting,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

PRODUCER_SILENCE_S = 60.0
REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")
"""A reason is a label of a metric."""
_SAMPLED_GROUPS = 256
_HISTORY_BATCHES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class _Built:
    """The plug-ins of a configuration."""

    config: RunConfig
    strategy: Strategy[Any]
    filters: list[Filter[Any]]


class _Unavailable(Strategy[StrategyOptions], Filter[StrategyOptions]):
    """Stands for a plug-in that is not installed any more or does not import: it pauses the run that asks it."""

    def __init__(self, error: Invalid) -> None:
        super().__init__(StrategyOptions())
        self._detail = error.detail

    def _fault(self) -> StrategyFault:
        return StrategyFault(self._detail, name="strategy")

    def admit(self, buffer: BufferView, flow: Flow) -> int:
        """Raise."""
        raise self._fault()

    def evict(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Raise."""
        raise self._fault()

    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Raise."""
        raise self._fault()

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        """Raise."""
        raise self._fault()


def _build(config: RunConfig) -> _Built:
    """Build the plug-ins of a run that exists; those that cannot be built pause it when they are asked."""
    strategy: Strategy[Any]
    try:
        strategy = build_strategy(config.strategy.name, config.strategy.options)
    except Invalid as error:
        strategy = _Unavailable(error)
    filters: list[Filter[Any]] = []
    for spec in config.filters:
        try:
            filters.append(build_filter(spec.name, spec.options))
        except Invalid as error:
            filters.append(_Unavailable(error))
    return _Built(config, strategy, filters)


class Selector:
    """Questions to the strategy of run `name`. `last_asked_s` is when a producer last asked for a ticket.

    It needs a state, a book and a clock, whoever keeps them: the service its journal, a simulation a virtual one. Both
    feed `rates` with what they see happen.
    """

    def __init__(self, name: str, state: RunState, book: TicketBook, clock: Callable[[], float]) -> None:
        self.last_asked_s = -float("inf")
        self.rates = Rates(clock())
        self._name = name
        self._state = state
        self._book = book
        self._clock = clock
        self._built: _Built | None = None
        self._drawing: tuple[list[int], np.random.Generator, Any] = [], np.random.Generator(np.random.Philox(0)), None
        self._recent: tuple[int, tuple[int, ...]] = -1, ()

    @property
    def config(self) -> RunConfig:
        """Configuration in force. Raises `NotFound` before there is one."""
        if self._state.config is None:
            raise NotFound(f"run {self._name} has no configuration yet", name="run", value=self._name)
        return self._state.config

    @property
    def strategy(self) -> Strategy[Any]:
        """Strategy of the configuration in force."""
        return self._plugins().strategy

    def _plugins(self) -> _Built:
        config = self.config
        if self._built is None or self._built.config is not config:
            self._built = _build(config)
        return self._built

    @property
    def seq_len(self) -> int:
        """Room of a micro-batch: what the trainer attached with, or the configuration's."""
        attached = self._state.attached
        return attached.seq_len if attached else self.config.batch.seq_len

    def ask(self, what: str, call: Callable[[], T], plugin: str | None = None) -> T:
        """Call a plug-in, the strategy if none is named. Raises `StrategyFault` for whatever it raises, or too slow."""
        try:
            return bounded(call)
        except StrategyFault:
            raise
        except TookTooLong as error:
            logger.exception("plug-in too slow run=%s call=%s", self._name, what)
            cause: Exception = error
            told = f"in {what}: {error}"
        except Exception as error:  # a plug-in may raise anything; the run pauses with it, the service lives
            logger.exception("plug-in raised run=%s call=%s", self._name, what)
            cause = error
            told = f"raised in {what}: {error!r}"
        plugin = plugin or f"strategy {self.config.strategy.name!r}"
        raise StrategyFault(f"{plugin} {told}", name=what, value=repr(cause)) from cause

    # ------------------------------------------------------------------ admission

    def capacity(self) -> int:
        """Count how many more groups producers may start now."""
        flow = self._flow()

        def checked() -> int:
            admitted = self.strategy.admit(self.view(self._state.next_step), flow)
            whole = isinstance(admitted, int | np.integer) and admitted >= 0
            self._hold([("admits a whole number of groups, 0 or more", whole, repr(admitted))])
            return int(admitted)

        capacity = self.ask("admit", checked)
        granted = min(capacity, self._room())
        if granted < 1 <= capacity:  # whatever the bounds, the next batch can be filled
            granted = min(capacity, self.lacking() - self._book.out)
        return max(0, granted)

    def _room(self) -> int:
        """Count how many more groups of mean size the bounds on what is live have room for, besides the tickets out."""
        limits, state = self.config.limits, self._state
        room = float(LARGEST_INTEGER)
        if limits.max_tokens_live is not None:
            room = (limits.max_tokens_live - state.live_tokens()) / self._tokens_per_group()
        if limits.max_bytes_live is not None:
            recent = state.index["frame_bytes"][-_SAMPLED_GROUPS:]
            mean = max(1.0, float(recent.mean())) if len(recent) else limits.max_group_bytes
            room = min(room, (limits.max_bytes_live - state.live_bytes()) / mean)
        return math.floor(room) - self._book.out

    def lacking(self) -> int:
        """Count the groups for want of which there is no next batch, at least 1; 0 where none is wanted."""
        waits = self.why_waiting()
        if waits is None or waits.blocked_on != "producers":
            return 0
        groups = waits.need.groups - waits.have.groups
        tokens = (waits.need.tokens - waits.have.tokens) / self._tokens_per_group()
        return max(1, groups, math.ceil(tokens))

    def _tokens_per_group(self) -> float:
        """Return the mean of the last groups; until the first: half-full rollouts, and no more than a batch holds."""
        recent, batch = self._state.index["tokens"][-_SAMPLED_GROUPS:], self.config.batch
        if len(recent):
            return max(1.0, float(recent.mean()))
        prior = (self.config.group_size or 8) * batch.seq_len / 2
        return min(prior, float(batch.tokens_per_batch or prior))

    def _flow(self) -> Flow:
        now_s = self._clock()
        return Flow(
            now_s=now_s,
            tokens_per_group=self._tokens_per_group(),
            max_tokens_live=self.config.limits.max_tokens_live,
            **dataclasses.asdict(self.rates.measured(now_s)),
        )

    def view(self, step: int, groups: Groups | None = None) -> BufferView:
        """Describe the buffer for a decision about `step`; counts are of `groups`, live ones, or of all."""
        state, config = self._state, self.config
        live = state.live_totals()
        if groups is not None and len(groups) < live.groups:
            live = LiveTotals.of(groups.tokens, groups.times_sampled)
        return BufferView(
            step=step,
            version=config.version_of(step),
            published_version=state.published[""],
            steps_per_publish=config.steps_per_publish,
            groups_live=live.groups,
            tokens_live=live.tokens,
            tickets_out=self._book.out,
            budget=Budget(config.batch.tokens_per_batch, config.batch.groups_per_batch, self.seq_len),
            batches=self._last_batches(),
            groups_stored=state.stored,
            groups_used=state.uses,
            groups_fresh=live.fresh,
            uses_live=live.uses,
            steps_done=state.step,
        )

    def _last_batches(self) -> tuple[int, ...]:
        entries, batches = self._state.entries, self._state.batches
        if self._recent[0] != entries:
            self._recent = entries, tuple(len(batches[step].numbers) for step in sorted(batches)[-_HISTORY_BATCHES:])
        return self._recent[1]

    # ------------------------------------------------------------------ selection

    def choose(self) -> Selection | WaitingAnswer:
        """Choose the groups of the next step, or say why not. Raises `StrategyFault`."""
        blocked = self._blocked()
        if blocked:
            return blocked
        step = self._state.next_step
        groups = self._usable(step)
        view = self.view(step, groups)
        rng = self._generator(step)

        def checked() -> Selection | Waiting:  # what is malformed is found here, as a fault of the strategy
            chosen = self.strategy.select(groups, view, view.budget, rng)
            self._check(chosen, groups, view.budget)
            return chosen

        chosen = self.ask("select", checked)
        return self.explain(self._reason(groups, chosen.reason), groups) if isinstance(chosen, Waiting) else chosen

    def candidates(self) -> list[int]:
        """List the oldest groups that the next batch may use, as far as its budget reaches."""
        groups, batch = self._usable(self._state.next_step), self.config.batch
        fits = np.ones(len(groups), np.bool_)
        if batch.tokens_per_batch is not None:
            fits &= np.cumsum(groups.tokens, dtype=np.int64) <= batch.tokens_per_batch
        numbers: list[int] = groups.row[fits][: batch.groups_per_batch].tolist()
        return numbers

    def seed(self, step: int) -> list[int]:
        """Seed of the generator that chooses `step`: (run seed, generation, step)."""
        return [self.config.seed, self._state.generation, step]

    def _generator(self, step: int) -> np.random.Generator:
        """Return the generator that chooses `step`, at its start: made once, however often the step is asked for."""
        seed = self.seed(step)
        if self._drawing[0] != seed:
            made = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
            self._drawing = seed, made, made.bit_generator.state
        _, rng, start = self._drawing
        rng.bit_generator.state = start
        return rng

    def _blocked(self) -> WaitingAnswer | None:
        if self._state.state != "running":
            return self.explain(self._state.state)
        wanted = self.config.version_of(self._state.next_step)
        staleness = self.strategy.max_staleness
        if staleness is not None and self._state.published[""] < wanted - staleness:
            return self.explain("awaiting_publication")
        return None

    def _usable(self, step: int) -> Groups:
        """Return the live groups that the strategy's bounds and the trainer's rows allow at `step`."""
        index, version = self._state.index, self.config.version_of(step)
        fits = (index["state"] == LIVE) & (index["policy_version"] <= version)
        if self.strategy.max_staleness is not None:
            fits &= index["policy_version"] >= version - self.strategy.max_staleness
        if self.strategy.max_uses is not None:
            fits &= index["times_sampled"] < self.strategy.max_uses
        if self.config.batch.overlong == "reject":
            fits &= index["longest_tokens"] <= self.seq_len
        return index.groups(None if fits.all() else np.flatnonzero(fits))

    def _check(self, chosen: Selection | Waiting, groups: Groups, budget: Budget) -> None:
        """Hold a strategy to its contract. Raises `StrategyFault` naming the strategy and the rule."""
        if isinstance(chosen, Waiting):
            self._hold([("gives a reason of the closed list", chosen.reason in REASONS, chosen.reason)])
            return
        self._hold([("answers Selection or Waiting", isinstance(chosen, Selection), type(chosen).__name__)])
        rows = np.asarray(chosen.rows, np.int64)
        weights = None if chosen.weights is None else np.asarray(chosen.weights, np.float32)
        unfit = 0 if weights is None else int(np.count_nonzero(~(np.isfinite(weights) & (weights > 0))))
        distinct = np.unique(rows)
        at = _positions(distinct, groups)
        given = at[at >= 0]
        tokens = int(groups.take(given).tokens.sum(dtype=np.int64))
        rules = [
            ("selects at least one group", len(rows) > 0, len(rows)),
            ("selects a group once", len(distinct) == len(rows), len(rows)),
            ("selects only groups it was given", len(given) == len(distinct), rows[:8].tolist()),
            ("keeps the token budget", budget.tokens is None or tokens <= budget.tokens, tokens),
            ("keeps the group budget", budget.groups is None or len(rows) <= budget.groups, len(rows)),
            ("gives one weight per group", weights is None or len(weights) == len(rows), len(rows)),
            ("gives finite weights above 0", not unfit, unfit),
        ]
        self._hold(rules)

    def _hold(self, rules: Iterable[tuple[str, bool, Any]]) -> None:
        name = self.config.strategy.name
        for rule, kept, value in rules:
            if not kept:
                raise StrategyFault(
                    f"strategy {name!r} broke the rule '{rule}' at step {self._state.next_step}: {value}",
                    name=name,
                    value=value,
                    bound=rule,
                )

    # ------------------------------------------------------------------ eviction

    def evictable(self, only: Numbers | None = None, *, filtered: bool = False) -> dict[str, list[int]]:
        """Name, by reason, the live groups (of `only`) that no batch from the next step on may use.

        Filters judge a group when it arrives (`only`), and again where `filtered` says that what they judged is open.
        """
        state, config, built = self._state, self.config, self._plugins()
        index = state.index
        rows = index.live() if only is None else index.rows_of(only)
        if only is not None:
            rows = rows[index["state"][rows] == LIVE]
        by_reason: dict[str, list[int]] = {}
        if not len(rows) or state.state == "paused":
            return by_reason
        groups = index.groups(rows)
        view = self.view(state.next_step)
        asked: list[tuple[str, Callable[[], Evictions]]] = [
            (f"strategy {config.strategy.name!r}", lambda: built.strategy.evict(groups, view))
        ]
        if config.batch.overlong == "reject" and int(groups.longest_tokens.max()) > self.seq_len:
            longer = tuple(groups.row[groups.longest_tokens > self.seq_len].tolist())
            asked.append(("the core", lambda: Evictions(longer, ("overlong",) * len(longer))))
        if filtered or only is not None:
            for spec, one in zip(config.filters, built.filters, strict=True):
                asked.append((f"filter {spec.name!r}", lambda one=one: one.drop(groups, view)))  # type: ignore[misc]
        gone: set[int] = set()
        for plugin, call in asked:
            found = self.ask("evict", lambda call=call, plugin=plugin: _evictions(plugin, call(), groups), plugin)  # type: ignore[misc]
            for number, reason in zip(found.rows, found.reasons, strict=True):
                if number not in gone:  # the first that drops a group names the reason
                    gone.add(number)
                    by_reason.setdefault(reason, []).append(int(number))
        return {reason: sorted(numbers) for reason, numbers in by_reason.items()}

    def oversized(self, only: Numbers | None = None) -> list[int]:
        """Name the live groups (of `only`) that no batch can hold, written to Redis past the door."""
        budget = self.config.batch.tokens_per_batch
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
        return answers.waiting(reason, have, self.config)

    def _reason(self, groups: Groups, told: str) -> str:
        """Choose the first reason that holds when a strategy says it cannot fill a batch."""
        if len(groups) or told == "rate_limited":
            return told
        if self._state.evicted_since_batch.get("too_stale"):
            return "all_stale"
        if self.strategy.max_uses != 1 and (self._state.live_totals().groups or self._used_up_by_last_batch()):
            return "reuse_exhausted"
        silent = self._clock() - self.last_asked_s > PRODUCER_SILENCE_S
        return "no_producers" if silent and not self._book.out else "no_groups"

    def _used_up_by_last_batch(self) -> bool:
        """Say whether the newest batch used groups for the last time: there were groups, and reuse took them."""
        last = self._state.batches.get(self._state.next_step - 1)
        if last is None or self._state.max_uses is None:
            return False
        rows = self._state.index.rows_of(last.numbers)
        return bool((self._state.index["times_sampled"][rows] >= self._state.max_uses).any())


def resolve_config(config: RunConfig) -> tuple[RunConfig, Strategy[Any]]:
    """Check a configuration and fill in the defaults of its plug-ins' options. Raises `Invalid`."""
    check_run_config(config)
    advantages(config.advantage, np.zeros(1))
    strategy = build_strategy(config.strategy.name, config.strategy.options)
    batch = config.batch
    budget = Budget(batch.tokens_per_batch, batch.groups_per_batch, batch.seq_len)
    with reported(config.strategy.name):
        strategy.check(budget, config.steps_per_publish, config.limits.max_tokens_live)
    spec = msgspec.structs.replace(config.strategy, options=msgspec.to_builtins(strategy.options))
    filters = [
        msgspec.structs.replace(one, options=msgspec.to_builtins(build_filter(one.name, one.options).options))
        for one in config.filters
    ]
    return msgspec.structs.replace(config, strategy=spec, filters=filters), strategy


def _positions(rows: Rows, groups: Groups) -> Rows:
    """Find groups by their row, in columns that are sorted by it; -1 for one that is not there."""
    if not len(groups):
        return np.full(len(rows), -1)
    at = np.minimum(np.searchsorted(groups.row, rows), len(groups) - 1)
    return np.where(groups.row[at] == rows, at, -1)


def _evictions(plugin: str, found: Evictions, groups: Groups) -> Evictions:
    """Hold a plug-in to what it may drop. Raises `StrategyFault` naming it and the rule."""
    if not isinstance(found, Evictions):
        rule = "answers Evictions"
        raise StrategyFault(
            f"{plugin} broke the rule '{rule}': {type(found).__name__}",
            name=plugin,
            value=type(found).__name__,
            bound=rule,
        )
    if not found.rows and not found.reasons:
        return found
    rows = np.asarray(found.rows, np.int64)
    strange = rows[_positions(rows, groups) < 0]
    rules = [
        ("gives one reason per group it drops", len(found.rows) == len(found.reasons), len(found.reasons)),
        ("drops only groups it was given", not len(strange), strange[:8].tolist()),
        ("gives words as reasons", all(REASON.fullmatch(reason) for reason in found.reasons), found.reasons[:8]),
    ]
    for rule, kept, value in rules:
        if not kept:
            raise StrategyFault(f"{plugin} broke the rule '{rule}': {value}", name=plugin, value=str(value), bound=rule)
    return found
