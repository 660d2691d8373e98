"""Admission of `replay`, and the rate of samples per insert.

Symbols, here and in docs/strategies.md: B groups per batch, u = max_uses, m = max_staleness, c = cooldown,
f = fresh_fraction, I = groups stored, S = uses in batches, spi = samples_per_insert, e = error_buffer.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from replaybuf.strategy import BufferView, Flow, Groups
from replaybuf_strategies.adaptive import in_generation
from replaybuf_strategies.replay_options import ReplayOptions

_BATCHES_OF_SHORT_GROUPS = 2
"""A batch counted in tokens may hold more groups than the mean suggests: admission plans for so many times B."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limiter:
    """Keeps uses near spi per stored group: -e <= S - spi * I <= e.

    Above, a batch waits (`rate_limited`) for inserts: a hard bound. Below, no more groups are admitted, unless the next
    batch needs them: evicted groups take their uses with them, and the bound alone could then stop admission for ever.
    The two never block each other, because 2e >= B + spi.
    """

    samples_per_insert: float
    error_buffer: float | None

    def buffer(self, batch_groups: float) -> float:
        """Return e. The default is B + spi: one batch and one insert on each side.

        Never below (B + spi) / 2: if batches are counted in tokens, B is only known when one is made.
        """
        one_move = batch_groups + self.samples_per_insert
        return one_move if self.error_buffer is None else max(self.error_buffer, one_move / 2)

    def uses_left(self, buffer: BufferView, batch_groups: float) -> float:
        """Return the uses left in the band, for a batch of B groups: e + spi * I - S."""
        return self.buffer(batch_groups) + self.samples_per_insert * buffer.groups_stored - buffer.groups_used

    def blocks(self, buffer: BufferView, batch_groups: float) -> bool:
        """Return whether a batch of so many groups would leave the band: S + B - spi * I > e."""
        return batch_groups > self.uses_left(buffer, batch_groups)

    def inserts_left(self, buffer: BufferView, batch_groups: float) -> float:
        """Return the inserts left in the band, tickets out included: (S + e) / spi - I."""
        inserts = (buffer.groups_used + self.buffer(batch_groups)) / self.samples_per_insert
        return inserts - buffer.groups_stored

    def inserts_needed(self, buffer: BufferView, batch_groups: float) -> float:
        """Return the inserts that the next batch waits for, tickets out included: (S + B - e) / spi - I."""
        inserts = (buffer.groups_used + batch_groups - self.buffer(batch_groups)) / self.samples_per_insert
        return inserts - buffer.groups_stored


def reuse_capacity(options: ReplayOptions, limiter: Limiter | None, buffer: BufferView, flow: Flow) -> int:
    """Return how many groups may start now so that each is used r times before it is too stale.

    T batches make T * B uses. A live group that was used t times takes r - t of them, and a new one takes r:

        capacity = (T * B + uses of live groups) / r - live - tickets out

    with T <= W (`_batches_ahead`). For T = W and r = 1 that is `window_capacity`. Bounded by `Limiter.inserts_left`.
    Never below what the next batch needs:

    - live groups for min(c + 1, W) batches: a batch uses a group once, and those of the last c batches rest
    - ceil(f * B) groups that were never used, and the inserts that the limiter waits for

    0 if W <= 0: the next step can use nothing that starts now, and waits for a publication.
    """
    window = _window(options, buffer)
    if window <= 0:
        return 0
    uses = _uses(options, window)
    batch = _batch_groups(buffer, flow)
    ahead = min(window, _batches_ahead(options, flow, batch, uses))
    wanted = _missing(buffer, flow, ahead / uses, buffer.uses_live / uses)
    needed = _missing(buffer, flow, min(options.cooldown + 1, window), 0.0)
    batches = 1 if buffer.budget.tokens is None else _BATCHES_OF_SHORT_GROUPS
    if options.fresh_fraction:
        needed = max(needed, math.ceil(options.fresh_fraction * batch) * batches - buffer.groups_fresh)
    if limiter:
        wanted = min(wanted, math.floor(limiter.inserts_left(buffer, batch * batches)))
        needed = max(needed, math.ceil(limiter.inserts_needed(buffer, batch * batches)))
    return max(0, max(wanted, needed) - buffer.tickets_out)


def _batches_ahead(options: ReplayOptions, flow: Flow, batch: float, uses: float) -> float:
    """Return T, the batches whose uses live groups and tickets out may hold; infinite until speeds are measured.

    If B / r groups arrive per step and every group is used r times, live groups have before each batch

        1 + (c + 1) * (r - 1) / 2    batches' worth of uses left

    and those in generation come on top (`in_generation`). A window full of groups is more than that, 4 batches against
    2.5 for r = 4. Then groups compete for places and become too stale before their last use: a simulated run had 2.9
    of 4 uses per group with W, and 3.4 with T.
    """
    if not flow.step_s or not flow.group_s:
        return math.inf
    steady = 1 + (options.cooldown + 1) * (uses - 1) / 2
    return steady + in_generation(flow, batch / uses)


def slack(options: ReplayOptions, groups: Groups, buffer: BufferView) -> npt.NDArray[np.int64]:
    """Return the batches that each group can miss and still have all its uses before it is too stale.

    A group of version v can be in the next (v + m + 1) * steps_per_publish - step batches, and its k remaining uses
    need 1 + (k - 1) * (c + 1) of them. Least slack first keeps every group in time if any order does, also without
    knowledge of later groups (Dertouzos & Mok 1989, theorem 2, for c = 0 and one steps_per_publish).

    Without a bound of staleness the groups with most uses left come first, without one of uses those with least time.
    """
    batches: npt.NDArray[np.int64] = np.zeros(len(groups), np.int64)
    if options.max_staleness is not None:
        last = (groups.policy_version.astype(np.int64) + options.max_staleness + 1) * buffer.steps_per_publish
        batches = last - buffer.step
    if options.max_uses is None:
        return batches
    left = options.max_uses - groups.times_sampled.astype(np.int64)
    return batches - 1 - (left - 1) * (options.cooldown + 1)


def _window(options: ReplayOptions, buffer: BufferView) -> int:
    """Return W, the batches that a group started now may still serve.

    W = (published version + m + 1) * steps_per_publish - step, as in `window_capacity`. If staleness is unbounded, the
    batches in which a group is used up: W = look-ahead + 1 + (u - 1) * (c + 1).
    """
    if options.max_staleness is not None:
        return (buffer.published_version + options.max_staleness + 1) * buffer.steps_per_publish - buffer.step
    return largest_window(options, buffer.steps_per_publish)


def largest_window(options: ReplayOptions, steps_per_publish: int) -> int:
    """Return the largest W: that of a group of the version that is trained next."""
    if options.max_staleness is not None:
        return (options.max_staleness + 1) * steps_per_publish
    return options.look_ahead + 1 + ((options.max_uses or 1) - 1) * (options.cooldown + 1)


def _uses(options: ReplayOptions, window: int) -> float:
    """Return the planned uses of a group: r = min(u, ceil(W / (c + 1)), 1 / f, spi), at least 1."""
    bounds: list[float] = [math.ceil(window / (options.cooldown + 1))]
    if options.max_uses is not None:
        bounds.append(options.max_uses)
    if options.fresh_fraction:
        bounds.append(1 / options.fresh_fraction)
    if options.samples_per_insert is not None:
        bounds.append(options.samples_per_insert)
    return max(1.0, min(bounds))


def _batch_groups(buffer: BufferView, flow: Flow) -> float:
    """Return B: the budget's groups, or its tokens / mean tokens per group; the smaller one if both are set.

    The mean is that of arriving or of live groups, whichever makes a batch hold more groups.
    """
    live = buffer.tokens_live / buffer.groups_live if buffer.groups_live else flow.tokens_per_group
    mean = max(1.0, min(flow.tokens_per_group, live))
    by_groups = math.inf if buffer.budget.groups is None else buffer.budget.groups
    by_tokens = math.inf if buffer.budget.tokens is None else buffer.budget.tokens / mean
    return max(1.0, min(by_groups, by_tokens))


def _missing(buffer: BufferView, flow: Flow, batches: float, used_up: float) -> int:
    """Return the groups missing for so many batches, if `used_up` of the live groups count for nothing."""
    budget = buffer.budget
    by_groups: float = math.inf
    by_tokens: float = math.inf
    if budget.groups is not None:
        by_groups = math.ceil(batches * budget.groups + used_up) - buffer.groups_live
    if budget.tokens is not None:
        mean = buffer.tokens_live / max(1, buffer.groups_live)
        by_tokens = math.ceil((batches * budget.tokens + used_up * mean - buffer.tokens_live) / flow.tokens_per_group)
    return int(min(by_groups, by_tokens))  # a batch is full when either bound is reached
