"""Inputs of a strategy: buffer view, usable groups, rates, budget, random generator.

The core's own bounds (`usability`) are applied here: a strategy never sees a group that breaks them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from replaybuf.errors import NotFound
from replaybuf.kernel.rows.column_bits import have_all
from replaybuf.kernel.rows.live_groups import LiveTotals
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.tickets import TicketBook
from replaybuf.kernel.strategy.contract import Budget, BufferView, Flow, Groups
from replaybuf.kernel.strategy.plugin_set import Ask, PluginSet, build_plugins
from replaybuf.kernel.strategy.rates import MeasuredRates, Rates
from replaybuf.kernel.strategy.usability import UsabilityRule, usability_rules
from replaybuf.wire.config import LARGEST_INTEGER, RunConfig
from replaybuf.wire.contract import Amount
from replaybuf.wire.group import hash_name

SAMPLED_GROUPS = 256
"""Means per group are taken over this many newest groups."""
_HISTORY_BATCHES = 16
_MEASURED = tuple(field.name for field in dataclasses.fields(MeasuredRates))


class ArrivalBounds(NamedTuple):
    """What a new group must keep: at most so many `tokens`, and the rules of eviction."""

    tokens: int
    rules: tuple[UsabilityRule, ...]


class StrategyInputs:
    """Builds the strategy of run `name` and its inputs from the state. The caller updates `rates`.

    `max_tokens`: most tokens that a producer samples per rollout, as producers announced it; 0 = unknown.
    """

    def __init__(
        self, name: str, state: RunState, book: TicketBook, clock: Callable[[], float], rates: Rates, ask: Ask
    ) -> None:
        self.max_tokens = 0
        self._counted: dict[str, tuple[tuple[int, int], int]] = {}
        self._evicting: dict[str, tuple[int, tuple[UsabilityRule, ...]]] = {}
        self._arriving: tuple[int, ArrivalBounds | None] = -1, None
        self._rates = rates
        self._name = name
        self._state = state
        self._book = book
        self._clock = clock
        self._ask = ask
        self._plugins: PluginSet | None = None
        self._drawing: tuple[list[int], np.random.Generator, Any] = [], np.random.Generator(np.random.Philox(0)), None

    @property
    def config(self) -> RunConfig:
        """Configuration in force. Raises `NotFound` before there is one."""
        if self._state.config is None:
            raise NotFound(f"run {self._name} has no configuration yet", name="run", value=self._name)
        return self._state.config

    @property
    def plugins(self) -> PluginSet:
        """Plug-ins of the configuration in force; a strategy that observes has observed the feedback of the state."""
        built, config, feedback = self._plugins, self.config, self._state.feedback
        observed = built.observed if built else None
        if built is None or built.config is not config or (observed is not None and observed is not feedback):
            built = self._plugins = build_plugins(config, feedback, self._ask)
        return built

    @property
    def seq_len(self) -> int:
        """Tokens of a micro-batch: of the attached trainer, or of the configuration."""
        attached = self._state.attachment
        return attached.seq_len if attached else self.config.batch.seq_len

    def tokens_per_group(self) -> float:
        """Return the mean over the last groups; before the first one an estimate, at most what fills a batch.

        It is low rather than high, because an estimate that is too high leaves engines without work: completions of
        the announced `max_tokens`, at most half-full rollouts.
        """
        recent, config = self._state.index["tokens"][-SAMPLED_GROUPS:], self.config
        if len(recent):
            return max(1.0, float(recent.mean()))
        tokens = (config.group_size or 8) * min(config.batch.seq_len / 2, self.max_tokens or math.inf)
        if (budget := self._state.token_budget) is not None:
            groups = max(config.groups_per_batch_of(name) or 1 for name in config.adapter_names)
            tokens = min(tokens, budget / groups)
        return max(1.0, tokens)

    def flow(self) -> Flow:
        """Return the measured rates for admission."""
        now_s = self._clock()
        measured = self._rates.measure(now_s)
        return Flow(
            now_s=now_s,
            tokens_per_group=self.tokens_per_group(),
            max_tokens_live=self.config.limits.max_tokens_live,
            **{name: getattr(measured, name) for name in _MEASURED},
        )

    def view(self, step: int, groups: Groups | None = None, adapter: str = "", *, overdue: bool = False) -> BufferView:
        """Return an adapter's view of the buffer for the run's `step`; live counts are of `groups`, None = all live."""
        state, config, pool = self._state, self.config, self._state.pool
        live = pool.live.totals(adapter)
        if groups is not None and len(groups) < live.groups:
            live = LiveTotals.of(groups.tokens, groups.times_sampled)
        newest = reversed(list(itertools.islice(reversed(state.batches.values()), _HISTORY_BATCHES)))
        groups_per_batch = config.groups_per_batch_of(adapter)
        used = [*(batch.rotation.progress(adapter).used for batch in newest), state.rotation.progress(adapter).used]
        progress = state.progress_at(step, adapter)
        return BufferView(
            step=progress.steps,
            version=state.version_at(step, adapter),
            published_version=state.published[adapter],
            steps_per_publish=config.steps_per_publish_of(adapter),
            groups_live=live.groups,
            tokens_live=live.tokens,
            tickets_out=self._book.out_of(adapter),
            budget=Budget(state.token_budget, groups_per_batch, self.seq_len),
            batches=tuple(after - before for before, after in itertools.pairwise(used)),
            groups_stored=pool.stored_of(adapter),
            groups_used=used[-1],
            groups_fresh=live.fresh,
            uses_live=live.uses,
            steps_done=state.own_step(state.step, adapter),
            groups_given=progress.groups,
            tickets_due=self._book.due_of(adapter),
            awaited=self._book.first_awaited(adapter, groups_per_batch or 1),
            overdue=overdue,
            sources_live=pool.live.count_sources(adapter, self.plugins.sources),
        )

    def prompts_issued(self, adapter: str) -> int:
        """Return how many prompts of an adapter got a ticket; their indexes are below."""
        return self._book.next_index.get(adapter, 0)

    def own_budget(self, adapter: str) -> Budget:
        """Return the budget of what an adapter's next batch still lacks."""
        groups = self.config.groups_per_batch_of(adapter)
        if groups is not None:
            groups -= self._state.progress_at(self._state.next_step, adapter).groups
        return Budget(self._state.token_budget, groups, self.seq_len)

    def seed(self, step: int) -> list[int]:
        """Return the seed of the generator of `step`: (run seed, generation, step)."""
        return [self.config.seed, self._state.generation, step]

    def generator(self, step: int, adapter: str) -> np.random.Generator:
        """Return the generator of `step` at its start; built once, however often the step is decided.

        The seed of a named adapter also holds the hash of its name.
        """
        seed = self.seed(step) + ([hash_name(adapter)] if adapter else [])
        if self._drawing[0] != seed:
            made = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
            self._drawing = seed, made, made.bit_generator.state
        _, rng, start = self._drawing
        rng.bit_generator.state = start
        return rng

    def usability_rules(self, step: int, adapter: str) -> Iterator[UsabilityRule]:
        """Yield the rules for usable groups of an adapter at `step`."""
        yield from (rule for rule in self._core_rules(step, adapter) if rule.when != "evict")
        if required := self.plugins.all_required:
            bits = self._state.pool.columns.bits_of(required)
            rule = f"selects only groups with the columns {', '.join(required)}"
            yield UsabilityRule(rule, ("columns",), lambda values: have_all(values, bits), "missing_columns")

    def arrival_bounds(self) -> ArrivalBounds | None:
        """Return the bounds that alone decide about new groups; None if plug-ins or adapters decide too.

        Each arrival asks for them, and only a ledger record changes them. Raises `StrategyFault`.
        """
        since, bounds = self._arriving
        if since != self._state.entries:
            config, bounds = self.config, None
            if not (config.adapters or config.admissions or config.filters or self.plugins.evicts):
                budget = self._state.token_budget or LARGEST_INTEGER
                bounds = ArrivalBounds(budget, tuple(self.eviction_rules("")))
            self._arriving = self._state.entries, bounds
        return bounds

    def eviction_rules(self, adapter: str) -> Sequence[UsabilityRule]:
        """List the rules at the next step after which groups of an adapter are evicted, the first reason first.

        Each arrival asks for them, and only a ledger record changes them.
        """
        since, rules = self._evicting.get(adapter, (-1, ()))
        if since != self._state.entries:
            rules = tuple(rule for rule in self._core_rules(self._state.next_step, adapter) if rule.when != "select")
            self._evicting[adapter] = self._state.entries, rules
        return rules

    def incomplete(self, step: int, adapter: str) -> Amount:
        """Count the groups of an adapter that would be usable at `step` with the columns that they lack."""
        if not self.plugins.all_required:
            return Amount()
        index = self._state.index
        *others, complete = self.usability_rules(step, adapter)
        lacks = ~complete.holds(index)
        for rule in others:
            lacks &= rule.holds(index)
        return Amount(int(np.count_nonzero(lacks)), int(index["tokens"][lacks].sum(dtype=np.int64)))

    def waits_for_columns(
        self, usable: Groups, reason: str, adapter: str, budget: Budget, *, exhausted: bool
    ) -> Amount | None:
        """Return the groups that lack columns if the next batch waits for them alone: they would fill the budget.

        `reason`: the strategy's. `exhausted`: producers bring no more groups, so any group that lacks columns counts.
        """
        lacking = self.incomplete(self._state.next_step, adapter)
        if not lacking.groups or reason not in ("no_groups", "too_few_groups", "too_few_tokens"):
            return None
        full = budget.groups is not None and len(usable) + lacking.groups >= budget.groups
        tokens = int(usable.tokens.sum(dtype=np.int64)) + lacking.tokens
        full = full or (budget.tokens is not None and tokens >= budget.tokens)
        return lacking if full or exhausted else None

    def _core_rules(self, step: int, adapter: str) -> Iterator[UsabilityRule]:
        return usability_rules(self._state, self.config, self.plugins.bounds, self.seq_len, step, adapter)

    def usable(self, step: int, adapter: str) -> Groups:
        """Return the live groups, of an adapter, that keep all `usability_rules` at `step`."""
        index = self._state.index
        each = (rule.holds(index) for rule in self.usability_rules(step, adapter))
        fits = next(each)
        for kept in each:
            fits &= kept
        groups = index.groups(None if fits.all() else np.flatnonzero(fits))
        self._counted[adapter] = (self._state.entries, self._state.stored), len(groups)
        return groups

    def usable_count(self, adapter: str) -> int | None:
        """Return how many groups `usable` found for the next step; None if it was not called since the last change."""
        seen, count = self._counted.get(adapter, ((-1, -1), 0))
        return count if seen == (self._state.entries, self._state.stored) else None
