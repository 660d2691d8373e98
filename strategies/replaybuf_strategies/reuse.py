"""How fast groups may come in and be used where each serves several batches: admission and samples per insert.

Symbols, here and in docs/strategies.md: B groups per batch, u = max_uses, m = max_staleness, c = cooldown,
f = fresh_fraction, I = groups stored, S = uses in batches, spi = samples_per_insert, e = error_buffer.
"""

from __future__ import annotations

import dataclasses
import math

from replaybuf.strategy import Budget, BufferView, Flow

_SURE = 2
"""A batch that is full by tokens is taken for so many: one of short groups holds more than the mean tells."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limiter:
    """Keeps uses near spi per stored group: -e <= S - spi * I <= e.

    Above, a batch waits (`rate_limited`) for inserts: a hard bound. Below, no more groups are let in, unless the next
    batch could not be made without them: groups that are evicted take their uses with them, and the bound alone would
    then close the door for ever. The two never block each other, since 2e >= B + spi.
    """

    samples_per_insert: float
    error_buffer: float | None

    def buffer(self, batch_groups: float) -> float:
        """Return e; where it is not given, e = B + spi: room for one batch and one insert on each side.

        Never below (B + spi) / 2: with batches counted in tokens B is only known when one is made.
        """
        one_move = batch_groups + self.samples_per_insert
        return one_move if self.error_buffer is None else max(self.error_buffer, one_move / 2)

    def blocks(self, buffer: BufferView, batch_groups: float) -> bool:
        """Say whether a batch of so many groups would leave the band: S + B - spi * I > e."""
        return batch_groups > self._left(buffer, batch_groups)

    def uses_left(self, buffer: BufferView, batch_groups: float) -> int:
        """Count the groups that may be used before a batch of so many would leave the band, at least 0."""
        return max(0, math.floor(self._left(buffer, batch_groups)))

    def _left(self, buffer: BufferView, batch_groups: float) -> float:
        return self.buffer(batch_groups) + self.samples_per_insert * buffer.groups_stored - buffer.groups_used

    def room(self, buffer: BufferView, batch_groups: float) -> float:
        """Return the inserts, tickets out among them, that stay in the band: (S + e) / spi - I."""
        inserts = (buffer.groups_used + self.buffer(batch_groups)) / self.samples_per_insert
        return inserts - buffer.groups_stored

    def lacking(self, buffer: BufferView, batch_groups: float) -> float:
        """Return the inserts, tickets out among them, that the next batch waits for: (S + B - e) / spi - I."""
        inserts = (buffer.groups_used + batch_groups - self.buffer(batch_groups)) / self.samples_per_insert
        return inserts - buffer.groups_stored


@dataclasses.dataclass(frozen=True, slots=True)
class Reuse:
    """How often groups are used: the options of `replay` that admission goes by."""

    max_uses: int | None
    max_staleness: int | None
    cooldown: int
    fresh_fraction: float
    limiter: Limiter | None
    look_ahead: int

    def window(self, buffer: BufferView) -> int:
        """Batches still open to a group started now.

        W = (published version + m + 1) * steps_per_publish - step, as in `window_capacity`; where staleness is
        unbounded, the batches within which a group is used up: W = look-ahead + 1 + (u - 1) * (c + 1).
        """
        if self.max_staleness is not None:
            return (buffer.published_version + self.max_staleness + 1) * buffer.steps_per_publish - buffer.step
        return self.look_ahead + 1 + ((self.max_uses or 1) - 1) * (self.cooldown + 1)

    def uses(self, window: int) -> float:
        """Uses to count on for a group: r = min(u, ceil(W / (c + 1)), 1 / f, spi), at least 1."""
        bounds: list[float] = [math.ceil(window / (self.cooldown + 1))]
        if self.max_uses is not None:
            bounds.append(self.max_uses)
        if self.fresh_fraction:
            bounds.append(1 / self.fresh_fraction)
        if self.limiter:
            bounds.append(self.limiter.samples_per_insert)
        return max(1.0, min(bounds))

    def capacity(self, buffer: BufferView, flow: Flow) -> int:
        """Groups that may be started now so that none is let in only to become stale unused.

        W batches make W * B uses, of which a live group that was used t times still takes r - t and a new one r:

            capacity = (W * B + uses of live groups) / r - live - tickets out

        which is `window_capacity` for r = 1. Bounded by `Limiter.room`. Never below what the next batch lacks: live
        groups for min(c + 1, W) batches, since a batch uses a group once and those used in the last c batches rest;
        ceil(f * B) groups never used; and what the limiter waits for. 0 while W <= 0: the next step may use nothing
        that is started now, and waits for a publication.
        """
        window = self.window(buffer)
        if window <= 0:
            return 0
        uses = self.uses(window)
        batch = batch_groups(buffer, flow)
        resting = min(self.cooldown + 1, window)
        wanted = _missing(buffer, flow, window / uses, buffer.uses_live / uses)
        lacking = _missing(buffer, flow, resting, 0.0)
        batches = 1 if buffer.budget.tokens is None else _SURE
        if self.fresh_fraction:
            lacking = max(lacking, math.ceil(self.fresh_fraction * batch) * batches - buffer.groups_fresh)
        if self.limiter:
            wanted = min(wanted, math.floor(self.limiter.room(buffer, batch * batches)))
            lacking = max(lacking, math.ceil(self.limiter.lacking(buffer, batch * batches)))
        return max(0, max(wanted, lacking) - buffer.tickets_out)


def batch_groups(buffer: BufferView, flow: Flow) -> float:
    """Groups that make a batch: B = the budget's, or tokens / mean tokens per group; the smaller where both are set."""
    by_groups = math.inf if buffer.budget.groups is None else buffer.budget.groups
    by_tokens = math.inf if buffer.budget.tokens is None else buffer.budget.tokens / _tokens_per_group(buffer, flow)
    return max(1.0, min(by_groups, by_tokens))


def _missing(buffer: BufferView, flow: Flow, batches: float, used_up: float) -> int:
    """Groups that lack for so many batches, in groups and in tokens; `used_up` live groups count for nothing."""
    budget: Budget = buffer.budget
    by_groups: float = math.inf
    by_tokens: float = math.inf
    if budget.groups is not None:
        by_groups = math.ceil(batches * budget.groups + used_up) - buffer.groups_live
    if budget.tokens is not None:
        mean = buffer.tokens_live / max(1, buffer.groups_live)
        by_tokens = math.ceil((batches * budget.tokens + used_up * mean - buffer.tokens_live) / flow.tokens_per_group)
    # Where both bounds are set a batch is full when either is reached; the smaller count suffices.
    return int(min(by_groups, by_tokens))


def _tokens_per_group(buffer: BufferView, flow: Flow) -> float:
    """Mean of what comes in or of what is live, whichever makes a batch hold more groups."""
    live = buffer.tokens_live / buffer.groups_live if buffer.groups_live else flow.tokens_per_group
    return max(1.0, min(flow.tokens_per_group, live))
