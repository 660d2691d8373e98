"""Interface of strategies and filters: admission, selection and eviction of groups.

A strategy is a class with a frozen `Options` struct, registered as an entry point of `replaybuf.strategies`. It is a
pure policy: no clock, no global random state, no I/O. Time, measured rates and a random generator seeded by (run seed,
generation, step) are arguments; arrays are read-only.

Whatever a strategy returns, the core enforces `0 <= staleness <= max_staleness`, `times_sampled < max_uses` before a
use, whole groups, and the budget.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.rows.groups import Groups as Groups
from replaybuf.kernel.rows.groups import Numbers
from replaybuf.kernel.strategy.options import OptionsT, StrategyOptions
from replaybuf.packing.subset_sum import closest
from replaybuf.wire.group import hash_name

LOOK_AHEAD = 64
"""Groups after those of a full batch that may still be added to it."""
LEFTOVER = 0.01
"""Share of the token budget that may stay unused without a search for better groups."""
_MOST_GIVEN_UP = 3
_CHUNK = 8192
_UNBOUNDED = 2**63 - 1
Rows = Numbers
"""Values of `Groups.row`: numbers of groups."""
source_hash = hash_name
"""Return the number of a source or adapter in `Groups`, from its name."""

STRATEGY_REASONS = ("rate_limited", "all_stale", "reuse_exhausted", "no_groups", "too_few_groups", "too_few_tokens")
"""Waiting reasons that a strategy may give; the others follow from the state of the run."""
MAX_DETAIL = 256
"""Characters of the explanation that a strategy may add to a waiting reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one batch: `tokens` and `groups` (None = no bound), `seq_len` tokens per micro-batch."""

    tokens: int | None
    groups: int | None
    seq_len: int


@dataclasses.dataclass(frozen=True, slots=True)
class BufferView:
    """State of the buffer for one decision; in a run with adapters, of one adapter.

    `step` is the next step to assemble, `version` = version(step), `steps_done` counts acked steps. `groups_live`,
    `tokens_live`, `groups_fresh` (never used) and `uses_live` are sums over live groups. `groups_stored` counts all
    groups ever stored, `groups_used` all uses in batches of the surviving history, `groups_given` the groups that
    earlier batches of the run hold for the adapter's `step`.

    `tickets_due` counts the prompts whose ticket expired or came back and is issued again next. `awaited`: their
    indexes and those of `tickets_out`, ascending, at most as many as a batch has groups. `overdue`: the trainer has
    waited for `batch.timeout_s`, so a short batch is wanted. `sources_live`: live groups of each of `Strategy.sources`.
    """

    step: int
    version: int
    published_version: int
    steps_per_publish: int
    groups_live: int
    tokens_live: int
    tickets_out: int
    budget: Budget
    batches: tuple[int, ...] = ()
    """Groups in each of the last batches, newest last."""
    groups_stored: int = 0
    groups_used: int = 0
    groups_fresh: int = 0
    uses_live: int = 0
    steps_done: int = 0
    groups_given: int = 0
    tickets_due: int = 0
    awaited: tuple[int, ...] = ()
    overdue: bool = False
    sources_live: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """Measured rates for admission. `tokens_per_group` is an estimate until groups have arrived.

    `now_s` is of a clock that does not jump. `kernel.strategy.rates.MeasuredRates` explains the rates; 0 = unknown.
    """

    now_s: float
    tokens_per_group: float
    groups_per_s: float = 0.0
    steps_per_s: float = 0.0
    max_tokens_live: int | None = None
    step_s: float = 0.0
    group_s: float = 0.0
    waited: float = 0.0
    too_stale: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """Groups of the next batch, in training order, and a weight per group, or None.

    A row is a value of `Groups.row`: the number of a group, not a position.
    `rows` may be any sequence of whole numbers, `weights` any sequence of numbers.
    """

    rows: Rows
    weights: npt.NDArray[np.float32] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """Reason why there is no batch yet: one of `STRATEGY_REASONS`.

    `groups` and `tokens`: usable amount now, if it is less than the groups given (None = all). `detail`: explanation
    for people, at most `MAX_DETAIL` characters.
    """

    reason: str
    groups: int | None = None
    tokens: int | None = None
    detail: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Evictions:
    """Groups that no later batch may use, each with its reason."""

    rows: Sequence[int] | Rows = ()
    reasons: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Feedback:
    """JSON object `values` that the trainer sent with the ack of `step`; the trainer chooses its fields."""

    step: int
    values: dict[str, Any]


class Strategy(ABC, Generic[OptionsT]):
    """Admission, selection and eviction in one policy. Subclasses need `Options` and `select`.

    Defaults: `max_staleness` = 0, `max_uses` = 1, no look-ahead, admission by `window_capacity`. The core evicts groups
    that are too stale.
    """

    Options: ClassVar[type[StrategyOptions]] = StrategyOptions

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    @property
    def max_staleness(self) -> int | None:
        """Return the largest staleness at use; None = unbounded."""
        return 0

    @property
    def max_uses(self) -> int | None:
        """Return the most batches that one group may be in; None = unbounded."""
        return 1

    @property
    def look_ahead(self) -> int:
        """Return how many steps after the next unacked one may be assembled."""
        return 0

    @property
    def requires(self) -> tuple[str, ...]:
        """Return the columns that a group needs before it is usable, such as `ref_logprobs`."""
        return ()

    @property
    def sources(self) -> tuple[int, ...]:
        """Return the hashes (`source_hash`) of sources whose live groups `BufferView.sources_live` counts."""
        return ()

    def check(self, budget: Budget, steps_per_publish: int, max_tokens_live: int | None) -> None:
        """Reject a run in which the strategy would wait for ever. Raises `Invalid` with the option and its bound.

        `max_tokens_live`: the lower of that limit and of `max_bytes_live` at 4 bytes per token; None = no limit.
        """

    def admit(self, buffer: BufferView, flow: Flow) -> int:
        """Return how many more groups producers may start now."""
        return window_capacity(buffer, flow, self.max_staleness, self.look_ahead)

    def evict(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Return the groups that no later batch may use; too stale groups are not among the `groups` given.

        Called for arrivals, and for all live groups after a batch or a change, in pieces of at most 8,192 groups.
        """
        return Evictions()

    @abstractmethod
    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        """Choose the groups of `buffer.step` from the usable groups, or return why there is no batch."""

    def draw_order(self, groups: Groups) -> npt.NDArray[Any]:
        """Return a number per group: groups with smaller numbers are probably drawn sooner. Equal ones: as stored.

        Only speed depends on it: frames of groups with the largest numbers move to the spill folder first.
        """
        return groups.policy_version

    def observe(self, feedback: Feedback) -> None:
        """Apply feedback of the trainer, with any content.

        A strategy with this method is rebuilt at each start, rewind and ack with feedback. It then observes the newest
        16 steps of the surviving history that had feedback, oldest first, and must keep no other state.
        """


class Filter(ABC, Generic[OptionsT]):
    """Drops groups on arrival that must not be trained: an entry point of `replaybuf.filters`, pure like a strategy.

    The filters of a run are called in order. A dropped group is evicted and counted under its reason; admission
    replaces it, so batches keep their size.
    """

    Options: ClassVar[type[StrategyOptions]] = StrategyOptions

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    @property
    def requires(self) -> tuple[str, ...]:
        """Return the columns that a group needs: the filter sees a group when it has them, and no batch before."""
        return ()

    def check(self, budget: Budget, group_size: int | None) -> None:
        """Reject a run of which the filter would drop every group. Raises `Invalid` with the value and its bound.

        Called once per adapter with the `budget` of its batch. `group_size`: rollouts of every group, None = any.
        """

    @abstractmethod
    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Return the groups that may not be sampled, each with its reason."""


def window_capacity(buffer: BufferView, flow: Flow, max_staleness: int | None, look_ahead: int) -> int:
    """Return how many groups may start now and still be used in time; 0 until a publication opens the window.

    A group started now gets version v = published_version. Its last step s has version(s) <= v + max_staleness, that
    is s < (v + max_staleness + 1) * steps_per_publish. With W = that bound - next step, and B groups per batch:

        capacity = W * B - given - live - tickets out        given: > 0 only for an adapter within its step

    This is AReaL's (eta + v + 1) * B - (accepted + running) (Fu et al. 2025, section 5.1), but counted from the buffer,
    so a dropped group can be replaced. If tokens bound the batch, B = tokens / mean tokens per group.
    """
    if max_staleness is None:
        batches = look_ahead + 1
    else:
        batches = (buffer.published_version + max_staleness + 1) * buffer.steps_per_publish - buffer.step
    return capacity_of(buffer, flow, batches)


def capacity_of(buffer: BufferView, flow: Flow, batches: float) -> int:
    """Return how many groups may start until live groups and tickets fill this many batches; at least 0."""
    if batches <= 0:
        return 0
    budget = buffer.budget
    by_groups = by_tokens = math.inf
    if budget.groups is not None:
        by_groups = math.ceil(batches * budget.groups) - buffer.groups_given - buffer.groups_live
    if budget.tokens is not None:
        by_tokens = math.ceil((batches * budget.tokens - buffer.tokens_live) / flow.tokens_per_group)
    # A batch is full when it reaches either bound, so the smaller count is enough.
    return max(0, int(min(by_groups, by_tokens)) - buffer.tickets_out)


def fill(
    groups: Groups,
    order: npt.NDArray[np.int64] | Iterable[npt.NDArray[np.int64]],
    budget: Budget,
    last_version: int | None = None,
) -> Selection | Waiting:
    """Fill the budget with whole groups in the `order` of positions: one array, or chunks that are made when needed.

    A batch is full with `budget.groups` groups, or if the next group does not fit. Then those of the `LOOK_AHEAD`
    following groups are added that fit. If more than `LEFTOVER` of the tokens are still unused, up to three of the last
    groups are exchanged for others that fill the batch better, but no group with a version below `last_version`: it
    would be too stale for the next batch. Returns `Waiting` if the groups do not fill the budget.
    """
    limit = _UNBOUNDED if budget.groups is None else budget.groups
    free = _UNBOUNDED if budget.tokens is None else budget.tokens
    chosen: list[int] = []
    following: list[int] = []
    chunks = _split_chunks(order)
    for positions in chunks:
        total = np.cumsum(groups.take(positions).tokens, dtype=np.int64)
        first = min(int(np.searchsorted(total, free, side="right")), limit - len(chosen))
        chosen += positions[:first].tolist()
        free -= int(total[first - 1]) if first else 0
        following = positions[first : first + LOOK_AHEAD].tolist()
        if following or len(chosen) == limit or free == 0:
            break
    if budget.tokens is not None and free and len(chosen) < limit and following:
        for positions in chunks:
            following += positions[: LOOK_AHEAD - len(following)].tolist()
            if len(following) == LOOK_AHEAD:
                break
        chosen = _complete(groups, chosen, following, budget, last_version)
    full = len(chosen) == budget.groups or (budget.tokens is not None and (free == 0 or bool(following)))
    if chosen and full:
        return Selection(groups.row[np.array(chosen, np.int64)])
    return Waiting(too_few(budget))


def _complete(
    groups: Groups, chosen: list[int], following: list[int], budget: Budget, last_version: int | None
) -> list[int]:
    """Fill the rest of a batch from the following groups; give up as few chosen groups as possible."""
    window = groups.take(np.array(chosen + following, np.int64))
    tokens, versions = window.tokens.tolist(), window.policy_version
    free = (budget.tokens or 0) - sum(tokens[: len(chosen)])
    enough = int((budget.tokens or 0) * LEFTOVER)
    best, best_unused = chosen, free + 1
    # The first group is never given up, so a group waits for at most as many batches as groups were before it.
    for given_up in range(min(_MOST_GIVEN_UP, max(0, len(chosen) - 1)) + 1):
        at = len(chosen) - given_up
        if given_up:
            if last_version is not None and int(versions[at]) < last_version:
                break
            free += tokens[at]
        sizes, most = tokens[at:], (len(tokens) if budget.groups is None else budget.groups) - at
        fitting = closest(sizes, free, free - enough, most)
        for first in (fitting,) if given_up else ([], fitting):
            taken = _add_fitting(sizes, free, most, first)
            unused = free - sum(sizes[n] for n in taken)
            if unused < best_unused:
                best, best_unused = chosen[:at] + [(chosen + following)[at + n] for n in taken], unused
            if best_unused <= enough:
                return best
    return best


def _add_fitting(sizes: list[int], free: int, most: int, first: list[int]) -> list[int]:
    """Return the positions `first` and those in order that still fit, at most `most`."""
    taken = set(first)
    free -= sum(sizes[position] for position in first)
    for position, size in enumerate(sizes):
        if size <= free and len(taken) < most and position not in taken:
            taken.add(position)
            free -= size
    return sorted(taken)


def too_few(budget: Budget) -> str:
    """Return the waiting reason if there are not enough groups."""
    return "too_few_tokens" if budget.groups is None else "too_few_groups"


def _split_chunks(
    order: npt.NDArray[np.int64] | Iterable[npt.NDArray[np.int64]],
) -> Iterator[npt.NDArray[np.int64]]:
    for positions in (order,) if isinstance(order, np.ndarray) else order:
        for start in range(0, len(positions), _CHUNK):
            yield positions[start : start + _CHUNK]
