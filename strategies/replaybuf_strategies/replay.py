"""Replay: a group may serve several batches, within bounds of uses, staleness, rest and rate."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, field

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
    contradiction,
    source_code,
    too_few,
)
from replaybuf_strategies.composition import Composed, Composition, Rules, beginning, by_prompt
from replaybuf_strategies.draws import May, Pieces, Propensity, drawn, first_in_first_out, newest_first
from replaybuf_strategies.reuse import Limiter, Reuse

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Steps = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
PartOf1 = Annotated[float, Meta(gt=0, le=1)]

_OF_PRIORITIES = {"priority": "advantage", "exponent": 0.6, "importance": 0}
"""Options that mean something for one order alone, with their defaults."""
_SMALLEST_GROUP_TOKENS = 2
"""A prompt and a completion of one token each."""
_NEVER = -1
_WHOLE = 1e-6
"""Shares are taken as whole when they miss 1 by no more."""

COLUMN_OF = {"advantage": "advantage_abs_mean", "reward_std": "reward_std", "feedback": "priority"}
"""What `priority` means: |advantage| and reward std of the group's rollouts, or what the trainer sent with an ack."""


class ReplayOptions(StrategyOptions, frozen=True):
    """Options of `replay`; null = unbounded or off. Options that contradict each other raise `Invalid`.

    - `max_uses` (u), `max_staleness` (m): bounds of a group's uses and of its staleness at use
    - `order`: at random, by last use and then age (`fifo`), from the newest back, or at random by priority, with
      `priority` as x: p = x ** `exponent` (alpha); `importance` (beta) makes weights of it
    - `fresh_fraction` (f): least share of a batch's groups that were never used
    - `cooldown` (c): steps that a group rests after a use
    - `samples_per_insert` (spi), `error_buffer` (e; null = one batch and one insert): uses per stored group
    - `groups_per_prompt`, `prompts_together`: at most so many groups of a prompt per batch, or all live ones at once
    - `mix`: shares of a batch's groups by source; what they leave of 1 goes to all other sources
    """

    max_uses: Count | None = 4
    max_staleness: Steps | None = 4
    order: Literal["uniform", "fifo", "newest", "prioritized"] = "uniform"
    priority: Literal["advantage", "reward_std", "feedback"] = "advantage"
    exponent: Annotated[float, Meta(ge=0, le=4)] = 0.6
    importance: Share = 0.0
    fresh_fraction: Share = 0.0
    cooldown: Steps = 0
    samples_per_insert: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    error_buffer: Annotated[float, Meta(gt=0, le=1e15)] | None = None
    groups_per_prompt: Count | None = None
    prompts_together: bool = False
    mix: dict[str, PartOf1] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spi, total = self.samples_per_insert, sum(self.mix.values())
        _refuse(
            self.max_uses is None and self.max_staleness is None,
            *("max_uses", None, "a number where max_staleness is null"),
            "max_staleness is null too, so nothing would ever leave the buffer",
        )
        _refuse(
            self.max_uses == 1 and self.cooldown > 0,
            *("cooldown", self.cooldown, "0"),
            "max_uses is 1, so no group is used again, rested or not",
        )
        for name, unset in _OF_PRIORITIES.items():
            _refuse(
                getattr(self, name) != unset and self.order != "prioritized",
                *(name, getattr(self, name), json.dumps(unset)),
                f"order is {self.order}; only prioritized goes by priorities",
            )
        _refuse(
            self.groups_per_prompt is not None and self.prompts_together,
            *("groups_per_prompt", self.groups_per_prompt, "null"),
            "prompts_together wants all groups of a prompt in one batch",
        )
        for name in ("fresh_fraction", "mix"):
            _refuse(
                bool(getattr(self, name)) and self.prompts_together,
                *(name, getattr(self, name), "unset where prompts_together is true"),
                "the groups of a prompt come together, whatever share they are",
            )
        _refuse(
            self.error_buffer is not None and spi is None,
            *("error_buffer", self.error_buffer, "null"),
            "samples_per_insert is null, so there is no rate to keep",
        )
        if spi is not None:
            self._check_rate(spi)
        _refuse(
            total > 1 + _WHOLE,
            *("mix", self.mix, "shares that sum to at most 1"),
            f"the shares sum to {total:.6g}",
        )
        codes = {source_code(name) for name in self.mix}
        _refuse(
            len(codes) < len(self.mix),
            *("mix", self.mix, "names with different codes"),
            "two names have the same source_code",
        )

    def _check_rate(self, spi: float) -> None:
        _refuse(
            self.max_uses is not None and spi > self.max_uses,
            *("samples_per_insert", spi, f"at most {self.max_uses}"),
            f"max_uses is {self.max_uses}, so a stored group cannot be used that often",
        )
        _refuse(
            spi * self.fresh_fraction > 1 + _WHOLE,
            *("samples_per_insert", spi, f"at most {1 / (self.fresh_fraction or 1):g}"),
            f"fresh_fraction is {self.fresh_fraction}, so there are at most 1/{self.fresh_fraction} uses per insert",
        )
        _refuse(
            self.error_buffer is not None and 2 * self.error_buffer < 1 + spi,
            *("error_buffer", self.error_buffer, f"at least {(1 + spi) / 2:g}"),
            "one use and one insert move further than the band is wide, so each would wait for the other",
        )


def _refuse(contradicts: bool, name: str, value: Any, needed: str, why: str) -> None:
    """Raise `Invalid` with the option, its value and what is needed of it where it contradicts another one."""
    if contradicts:
        raise contradiction(f"strategy.options.{name}", value, needed, why)


class Replay(Strategy[ReplayOptions]):
    """Groups serve up to `max_uses` batches, one step of look-ahead.

    Invariants: 0 <= version(step) - policy_version <= m; times_sampled < u before a use; step - last_step > c;
    fresh groups >= f * groups of the batch; S + B - spi * I <= e. What blocks: `reuse_exhausted` where rest or the
    share of fresh groups leaves too few, `rate_limited` where uses are ahead of inserts, else `too_few_groups` or
    `too_few_tokens`. A source of the mix that is short gives its places to the others: while the window is full of
    others no ticket is issued for what is missing, so that waiting for it would never end.
    """

    Options: ClassVar[type[StrategyOptions]] = ReplayOptions

    def __init__(self, options: ReplayOptions) -> None:
        super().__init__(options)
        spi = options.samples_per_insert
        self._limiter = None if spi is None else Limiter(spi, options.error_buffer)
        self._sources = np.array([source_code(name) for name in options.mix], np.int64)
        self._shares = tuple(options.mix.values())
        if self._shares and sum(self._shares) < 1 - _WHOLE:
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
        """One step: a trainer may prefetch the next batch while it trains."""
        return 1

    def check(self, budget: Budget, steps_per_publish: int, max_tokens_live: int | None) -> None:
        """Refuse what only the run's batch shows to be contradictory. Raises `Invalid`.

        A group has w = (m + 1) * steps_per_publish batches, so at most ceil(w / (c + 1)) uses.
        """
        options, spi = self.options, self.options.samples_per_insert
        if options.max_staleness is not None:
            window = (options.max_staleness + 1) * steps_per_publish
            uses = math.ceil(window / (options.cooldown + 1))
            _refuse(
                options.cooldown > 0 and uses < 2,
                *("cooldown", options.cooldown, f"at most {window - 1}"),
                f"after it a group is always too stale: it has {window} batches in all",
            )
            _refuse(
                spi is not None and spi > uses,
                *("samples_per_insert", spi, f"at most {uses}"),
                f"a group has {window} batches before it is too stale",
            )
        if options.fresh_fraction > 0 and max_tokens_live is not None:
            need = (self._open_batches(steps_per_publish) + 1) * _least_tokens(budget)
            _refuse(
                max_tokens_live < need,
                *("fresh_fraction", options.fresh_fraction, "0"),
                f"limits leave room for {max_tokens_live} live tokens; below {need} used groups could leave none for "
                "fresh ones",
            )
        if spi is not None and options.error_buffer is not None and budget.groups is not None:
            _refuse(
                2 * options.error_buffer < budget.groups + spi,
                *("error_buffer", options.error_buffer, f"at least {(budget.groups + spi) / 2:g}"),
                f"a batch of {budget.groups} groups moves further than the band is wide",
            )

    def _open_batches(self, steps_per_publish: int) -> int:
        """Count the batches within which a group is too stale, or, where staleness is unbounded, used up."""
        options = self.options
        if options.max_staleness is not None:
            return (options.max_staleness + 1) * steps_per_publish
        return self.look_ahead + 1 + ((options.max_uses or 1) - 1) * (options.cooldown + 1)

    def admit(self, buffer: BufferView, flow: Flow) -> int:
        """Say how many more groups producers may start now: `Reuse.capacity`."""
        options = self.options
        reuse = Reuse(
            max_uses=options.max_uses,
            max_staleness=options.max_staleness,
            cooldown=options.cooldown,
            fresh_fraction=options.fresh_fraction,
            limiter=self._limiter,
            look_ahead=self.look_ahead,
        )
        return reuse.capacity(buffer, flow)

    def evict(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Name what is too stale, and what has no share of a mix that leaves nothing to other sources."""
        stale = super().evict(groups, buffer)
        if len(self._shares) != len(self._sources) or not self._shares:
            return stale
        unwanted = set(groups.row[~np.isin(groups.source, self._sources)].tolist()).difference(stale.rows)
        rows = sorted(unwanted)
        return Evictions((*stale.rows, *rows), (*stale.reasons, *["not_in_mix"] * len(rows)))

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        """Take groups in the drawn order, under the rules, until the batch is full."""
        smallest_batch = budget.groups if budget.groups and budget.tokens is None else 1
        if self._limiter and self._limiter.blocks(buffer, smallest_batch):
            return _rate_limited(self._limiter, buffer, smallest_batch)
        found = self._compose(groups, buffer, budget, rng)
        chosen = groups.take(found.positions)
        if not found.full:
            return Waiting(
                self._why(found, groups, buffer, budget), len(chosen), int(chosen.tokens.sum(dtype=np.int64))
            )
        if self._limiter and self._limiter.blocks(buffer, len(chosen)):
            return _rate_limited(self._limiter, buffer, len(chosen))
        return Selection(chosen.row, self._weights(chosen))

    def _compose(self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator) -> Composed:
        options = self.options
        usable = self._usable(buffer, budget)
        wanted = _wanted(groups, buffer, budget)
        if options.prompts_together:
            return by_prompt(groups, usable, self._pieces(groups, usable, rng, wanted), budget)
        rules = Rules(self._shares or (1.0,), options.fresh_fraction, options.groups_per_prompt)
        if rules == Rules():
            return beginning(groups, self._pieces(groups, usable, rng, wanted), budget)

        def pieces(lane: int, fresh: bool) -> Pieces:
            return self._pieces(groups, self._in_lane(usable, lane, fresh), rng, wanted)

        return Composition(groups, pieces, rules).fill(budget)

    def _pieces(self, groups: Groups, may: May, rng: np.random.Generator, wanted: int) -> Pieces:
        order = self.options.order
        if order == "fifo":
            return first_in_first_out(groups, may)
        if order == "newest":
            return newest_first(groups, may)
        return drawn(groups, may, self._propensity if order == "prioritized" else None, rng, wanted)

    @property
    def _propensity(self) -> Propensity:
        return Propensity(COLUMN_OF[self.options.priority], self.options.exponent)

    def _usable(self, buffer: BufferView, budget: Budget) -> May:
        """Judge groups: rested, and not larger than a batch."""

        def may(groups: Groups) -> npt.NDArray[np.bool_]:
            usable = self._rested(groups, buffer.step)
            return usable if budget.tokens is None else usable & (groups.tokens <= budget.tokens)

        return may

    def _rested(self, groups: Groups, step: int) -> npt.NDArray[np.bool_]:
        if not self.options.cooldown:
            return np.ones(len(groups), bool)
        rested: npt.NDArray[np.bool_] = groups.last_step < step - self.options.cooldown
        rested |= groups.last_step == _NEVER
        return rested

    def _in_lane(self, usable: May, lane: int, fresh: bool) -> May:
        """Judge groups of one source of the mix; the lane behind the named ones is all others."""
        sources = self._sources

        def may(groups: Groups) -> npt.NDArray[np.bool_]:
            allowed = usable(groups)
            if fresh:
                allowed = allowed & (groups.times_sampled == 0)
            if len(sources) and lane < len(sources):
                allowed = allowed & (groups.source == sources[lane])
            elif len(sources):
                allowed = allowed & ~np.isin(groups.source, sources)
            return allowed

        return may

    def _why(self, found: Composed, groups: Groups, buffer: BufferView, budget: Budget) -> str:
        """Tell whether it is reuse that blocks (all groups together would do) or groups that lack."""
        if not len(groups):
            return too_few(budget)
        rested = self._rested(groups, buffer.step)
        if not rested.any():
            return "reuse_exhausted"
        blocks = found.lacks_fresh or not _enough(groups.take(rested), budget)
        return "reuse_exhausted" if blocks and _enough(groups, budget) else too_few(budget)

    def _weights(self, chosen: Groups) -> npt.NDArray[np.float32] | None:
        """Weigh groups by w_i = (p_min / p_i) ** beta: Schaul et al. (2016), divided by the batch's largest."""
        if not self.options.importance:
            return None
        propensity = self._propensity.of(chosen)
        weights: npt.NDArray[np.float64] = (propensity.min() / propensity) ** self.options.importance
        return np.maximum(weights, np.finfo(np.float32).tiny).astype(np.float32)


def _least_tokens(budget: Budget) -> int:
    """Count the tokens of the smallest groups that make a full batch."""
    if budget.groups is None:
        return budget.tokens or 0
    return min(budget.groups * _SMALLEST_GROUP_TOKENS, budget.tokens or budget.groups * _SMALLEST_GROUP_TOKENS)


def _rate_limited(limiter: Limiter, buffer: BufferView, batch_groups: float) -> Waiting:
    """Wait for inserts, and tell the uses that the band has left."""
    uses = limiter.uses_left(buffer, batch_groups)
    return Waiting("rate_limited", uses, int(uses * buffer.tokens_live / max(1, buffer.groups_live)))


def _wanted(groups: Groups, buffer: BufferView, budget: Budget) -> int:
    """Estimate the groups of a batch."""
    by_groups: float = math.inf if budget.groups is None else budget.groups
    mean = max(1.0, buffer.tokens_live / max(1, buffer.groups_live))
    by_tokens: float = math.inf if budget.tokens is None else budget.tokens / mean
    return int(min(by_groups, by_tokens, len(groups)))


def _enough(groups: Groups, budget: Budget) -> bool:
    by_groups = budget.groups is not None and len(groups) >= budget.groups
    return by_groups or (budget.tokens is not None and int(groups.tokens.sum(dtype=np.int64)) >= budget.tokens)
