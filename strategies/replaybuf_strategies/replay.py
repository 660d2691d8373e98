"""Replay: a group may serve several batches, within bounds of uses, staleness, cooldown and rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from replaybuf.strategy import (
    Budget,
    BufferView,
    Evictions,
    Flow,
    Groups,
    Selection,
    Strategy,
    StrategyOptions,
    Waiting,
    fill,
    source_hash,
    too_few,
)
from replaybuf_strategies.composition import Composed, prefix
from replaybuf_strategies.draws import (
    May,
    Pieces,
    Propensity,
    drawn,
    first_in_first_out,
    in_blocks,
    least_slack_first,
    newest_first,
)
from replaybuf_strategies.fresh import with_fresh
from replaybuf_strategies.mixture import interleave
from replaybuf_strategies.places import Composition
from replaybuf_strategies.prompts import by_prompt, limit_prompts
from replaybuf_strategies.replay_options import ROUNDING, ReplayOptions
from replaybuf_strategies.reuse import Limiter, largest_window, reuse_capacity, slack
from replaybuf_strategies.strict_shares import BEYOND_SHARE, at_most, balanced, beyond, quotas

_NEVER = -1
_FOLLOWING = 64
"""Groups after those of a full batch that may still be added to it, as in `replaybuf.strategy.fill`."""

COLUMN_OF = {"advantage": "advantage_abs_mean", "reward_std": "reward_std", "feedback": "priority"}
"""Column of each `priority`: |advantage| or reward std of the rollouts, or the trainer's feedback."""


class Replay(Strategy[ReplayOptions]):
    """Groups serve up to `max_uses` batches, one step of look-ahead.

    Invariants: 0 <= version(step) - policy_version <= m; times_sampled < u before a use; step - last_step > c;
    fresh groups >= f * groups of the batch; S + B - spi * I <= e.

    Waits with `reuse_exhausted` if the cooldown or the share of fresh groups leaves too few, with `rate_limited` if
    uses are ahead of inserts, else with `too_few_groups` or `too_few_tokens`. A short source of the mix gives its
    places to the others, unless `mix_strict` is set.

    `max_uses` is a bound, not the mean: with the defaults a simulated run had 2.5 uses per group, and 41 % of a batch's
    groups generated per step, because a group is about two versions old at its first use. With `look_ahead` 0 and
    `least_slack` a trained run had 3.3 uses, and 30 % generated.
    """

    Options: ClassVar[type[StrategyOptions]] = ReplayOptions

    def __init__(self, options: ReplayOptions) -> None:
        super().__init__(options)
        spi = options.samples_per_insert
        self._limiter = None if spi is None else Limiter(spi, options.error_buffer)
        self._propensity = Propensity(COLUMN_OF[options.priority], options.exponent)
        self._sources = np.array([source_hash(name) for name in options.mix], np.int64)
        self._shares = tuple(options.mix.values())
        if sum(self._shares) < 1 - ROUNDING:  # the last share is that of all other sources
            self._shares += (1 - sum(self._shares),)

    @property
    def max_staleness(self) -> int | None:
        """Largest staleness at use: the option m."""
        return self.options.max_staleness

    @property
    def max_uses(self) -> int | None:
        """Most batches a group may be in: the option u."""
        return self.options.max_uses

    @property
    def look_ahead(self) -> int:
        """Batches chosen before the step ahead of them is acked."""
        return self.options.look_ahead

    def check(self, budget: Budget, steps_per_publish: int, max_tokens_live: int | None) -> None:
        """Check the options against the run's batch. Raises `Invalid`."""
        self.options.check(budget, steps_per_publish, max_tokens_live)

    def admit(self, buffer: BufferView, flow: Flow) -> int:
        """Return the number of groups that may start now: `reuse_capacity`, of what strict shares can use."""
        if self.options.mix_strict:
            buffer = balanced(self._shares, buffer)
        return reuse_capacity(self.options, self._limiter, buffer, flow)

    @property
    def sources(self) -> tuple[int, ...]:
        """Sources whose live groups count: those of strict shares."""
        return tuple(self._sources.tolist()) if self.options.mix_strict else ()

    def evict(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Return groups of other sources if the shares of the mix sum to 1, and those beyond strict shares."""
        rows: list[int] = []
        reasons: list[str] = []
        if len(self._shares) == len(self._sources):
            rows = groups.row[~np.isin(groups.source, self._sources)].tolist()
            reasons = ["not_in_mix"] * len(rows)
        if self.options.mix_strict:
            extra = self._beyond_shares(groups, buffer)
            rows, reasons = rows + extra, reasons + [BEYOND_SHARE] * len(extra)
        return Evictions(rows, reasons)

    def _beyond_shares(self, groups: Groups, buffer: BufferView) -> list[int]:
        """Return the newest unused groups of each source that holds more than its share of the buffer."""
        window, rows = largest_window(self.options, buffer.steps_per_publish), list[int]()
        for source, count in enumerate(beyond(self._shares, buffer, window)):
            if count > 0:
                own = groups.row[self._of_source(_is_unused, source, fresh=False)(groups)]
                rows += own[-count:].tolist()
        return rows

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        """Take groups in order, under the rules, until the batch is full."""
        smallest_batch = budget.groups if budget.groups and budget.tokens is None else 1
        if self._limiter and self._limiter.blocks(buffer, smallest_batch):
            return _rate_limited(self._limiter, buffer, smallest_batch)
        composed = self._compose(groups, buffer, budget, rng)
        chosen = groups.take(composed.positions)
        if not composed.full:
            short = self._short_source(groups, buffer) if self.options.mix_strict else None
            if short:
                return Waiting(too_few(budget), *short)
            reason = self._waiting_reason(composed, groups, buffer, budget)
            return Waiting(reason, len(chosen), int(chosen.tokens.sum(dtype=np.int64)))
        if self._limiter and self._limiter.blocks(buffer, len(chosen)):
            return _rate_limited(self._limiter, buffer, len(chosen))
        if len(composed.following):
            chosen = self._complete(groups, composed, buffer, budget)
        return Selection(chosen.row, self._weights(chosen))

    def draw_order(self, groups: Groups) -> npt.NDArray[Any]:
        """Return the order of the draw; with random draws the least probable last, then what is too stale first."""
        match self.options.order:
            case "least_slack":
                return groups.policy_version.astype(np.int64) + groups.times_sampled
            case "fifo":
                return groups.last_step.astype(np.float64) * 2.0**32 + groups.policy_version
            case "blocks":
                return np.where(groups.times_sampled == 0, len(groups), 0) + np.arange(len(groups))
            case "newest":
                return -np.arange(len(groups))
            case "prioritized":
                return -self._propensity.of(groups)
        return -groups.policy_version.astype(np.int64)

    def _complete(self, groups: Groups, composed: Composed, buffer: BufferView, budget: Budget) -> Groups:
        """Fill the tokens left with following groups, as `replaybuf.strategy.fill` does, if the rate allows."""
        m = self.options.max_staleness
        last_version = None if m is None else (buffer.step + 1) // buffer.steps_per_publish - m
        order = np.concatenate([composed.positions, composed.following])
        selected = groups.take(order)
        filled = fill(selected, np.arange(len(order)), budget, last_version)
        chosen = selected.take(np.isin(selected.row, filled.rows)) if isinstance(filled, Selection) else selected
        blocked = self._limiter is not None and self._limiter.blocks(buffer, len(chosen))
        return groups.take(composed.positions) if blocked else chosen

    def _compose(self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator) -> Composed:
        options = self.options
        wanted = _expected_groups(groups, buffer, budget)

        def usable(some: Groups) -> npt.NDArray[np.bool_]:
            rested = self._rested(some, buffer.step)
            return rested if budget.tokens is None else rested & (some.tokens <= budget.tokens)

        def pieces(source: int = 0, fresh: bool = False) -> Pieces:
            may = self._of_source(usable, source, fresh) if options.mix or fresh else usable
            return self._pieces(groups, may, buffer, rng, wanted)

        if options.prompts_together:
            return by_prompt(groups, usable, pieces(), budget)
        rules = (bool(options.mix), options.fresh_fraction > 0, options.groups_per_prompt is not None)
        if sum(rules) > 1:
            return self._place_by_place(groups, pieces, buffer, budget)
        if options.fresh_fraction:
            return with_fresh(groups, lambda fresh: pieces(0, fresh), budget, options.fresh_fraction)
        order = self._mixed(pieces, buffer) if options.mix else pieces()
        if options.groups_per_prompt:
            order = limit_prompts(groups, order, options.groups_per_prompt)
        any_may_follow = budget.tokens is not None and not options.mix and options.order != "blocks"
        return prefix(groups, order, budget, _FOLLOWING if any_may_follow else 0)

    def _short_source(self, groups: Groups, buffer: BufferView) -> tuple[int, int, str] | None:
        """Return groups and tokens of a batch with empty places, and the source that is short; None = none is."""
        usable = groups.take(np.flatnonzero(self._rested(groups, buffer.step)))
        most = quotas(self._shares, buffer)
        have = np.array([np.count_nonzero(self._of_source(_is_any, n, fresh=False)(usable)) for n in range(len(most))])
        short = np.flatnonzero(have < most)
        if not len(short):
            return None
        first, names = int(short[0]), list(self.options.mix)
        name = f"source {names[first][:100]}" if first < len(names) else "every other source"
        detail = f"{name} has {have[first]} of its {most[first]} groups in the batch"
        count = int(np.minimum(have, most).sum())
        return count, int(count * usable.tokens.mean()) if count else 0, detail

    def _quotas(self, buffer: BufferView) -> list[int] | None:
        """Return the most groups of each source in a short batch: a short source leaves its places empty."""
        return quotas(self._shares, buffer).tolist() if self.options.mix_strict and buffer.overdue else None

    def _mixed(self, pieces: Callable[[int], Pieces], buffer: BufferView) -> Pieces:
        most = self._quotas(buffer)
        if most:
            return interleave(lambda source: at_most(pieces(source), most[source]), self._shares)
        return interleave(pieces, self._shares, strict=self.options.mix_strict)

    def _place_by_place(
        self, groups: Groups, pieces: Callable[[int, bool], Pieces], buffer: BufferView, budget: Budget
    ) -> Composed:
        rules = Composition(
            groups,
            pieces,
            shares=self._shares,
            fresh_fraction=self.options.fresh_fraction,
            groups_per_prompt=self.options.groups_per_prompt,
            strict=self.options.mix_strict and not buffer.overdue,
            most=self._quotas(buffer),
        )
        return rules.fill(budget)

    def _pieces(self, groups: Groups, may: May, buffer: BufferView, rng: np.random.Generator, wanted: int) -> Pieces:
        match self.options.order:
            case "least_slack":
                return least_slack_first(groups, may, slack(self.options, groups, buffer))
            case "fifo":
                return first_in_first_out(groups, may)
            case "blocks":
                return in_blocks(groups, may)
            case "newest":
                return newest_first(groups, may)
            case "prioritized":
                return drawn(groups, may, self._propensity, rng, wanted)
        return drawn(groups, may, None, rng, wanted)

    def _rested(self, groups: Groups, step: int) -> npt.NDArray[np.bool_]:
        if not self.options.cooldown:
            return np.ones(len(groups), bool)
        rested: npt.NDArray[np.bool_] = groups.last_step < step - self.options.cooldown
        rested |= groups.last_step == _NEVER
        return rested

    def _of_source(self, usable: May, source: int, fresh: bool) -> May:
        """Restrict `usable` to one source of the mix; the number after the named ones stands for all others."""
        codes = self._sources

        def may(groups: Groups) -> npt.NDArray[np.bool_]:
            allowed = usable(groups)
            if fresh:
                allowed = allowed & (groups.times_sampled == 0)
            if source < len(codes):
                allowed = allowed & (groups.source == codes[source])
            elif len(codes):
                allowed = allowed & ~np.isin(groups.source, codes)
            return allowed

        return may

    def _waiting_reason(self, composed: Composed, groups: Groups, buffer: BufferView, budget: Budget) -> str:
        """Return `reuse_exhausted` if all groups together would make a batch, else what is missing."""
        if not len(groups):
            return too_few(budget)
        rested = self._rested(groups, buffer.step)
        if not rested.any():
            return "reuse_exhausted"
        blocks = composed.lacks_fresh or not _enough(groups.take(rested), budget)
        return "reuse_exhausted" if blocks and _enough(groups, budget) else too_few(budget)

    def _weights(self, chosen: Groups) -> npt.NDArray[np.float32] | None:
        """Return w_i = (p_min / p_i) ** beta: Schaul et al. (2016), divided by the batch's largest."""
        if not self.options.importance:
            return None
        propensity = self._propensity.of(chosen)
        weights: npt.NDArray[np.float64] = (propensity.min() / propensity) ** self.options.importance
        return np.maximum(weights, np.finfo(np.float32).tiny).astype(np.float32)


def _is_any(groups: Groups) -> npt.NDArray[np.bool_]:
    return np.ones(len(groups), np.bool_)


def _is_unused(groups: Groups) -> npt.NDArray[np.bool_]:
    unused: npt.NDArray[np.bool_] = groups.times_sampled == 0
    return unused


def _rate_limited(limiter: Limiter, buffer: BufferView, batch_groups: float) -> Waiting:
    uses = max(0, math.floor(limiter.uses_left(buffer, batch_groups)))
    return Waiting("rate_limited", uses, int(uses * buffer.tokens_live / max(1, buffer.groups_live)))


def _expected_groups(groups: Groups, buffer: BufferView, budget: Budget) -> int:
    """Estimate the groups of a batch."""
    by_groups: float = math.inf if budget.groups is None else budget.groups
    mean = max(1.0, buffer.tokens_live / max(1, buffer.groups_live))
    by_tokens: float = math.inf if budget.tokens is None else budget.tokens / mean
    return int(min(by_groups, by_tokens, len(groups)))


def _enough(groups: Groups, budget: Budget) -> bool:
    by_groups = budget.groups is not None and len(groups) >= budget.groups
    return by_groups or (budget.tokens is not None and int(groups.tokens.sum(dtype=np.int64)) >= budget.tokens)
