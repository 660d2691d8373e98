"""The contract of a strategy: which groups may enter, which make the next batch, which can go.

A strategy is a class with a frozen `Options` struct, built as `Strategy(options)`, found by its entry point in the
group `replaybuf.strategies`. It is a pure policy: no clock, no global random state, no I/O. Time, measured rates and a
random generator seeded by (run seed, generation, step) come in as arguments; arrays are read-only.

The core enforces what the three properties promise, whatever a strategy returns: `0 <= staleness <= max_staleness`,
`times_sampled < max_uses` before a use, whole groups, and the budget.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.groups import Groups as Groups
from replaybuf.kernel.groups import Rows as Rows
from replaybuf.kernel.options import OptionsT, StrategyOptions
from replaybuf.packing.subset_sum import closest
from replaybuf.wire.group import hash_name

LOOK_AHEAD = 64
"""Groups behind a full batch that may still complete it."""
LEFTOVER = 0.01
"""Share of the token budget that may stay unused without looking further."""
_MOST_LEFT = 3
_CHUNK = 8192
_UNBOUNDED = 2**63 - 1
source_code = hash_name
"""Under the name that strategies know it by: they tell sources and adapters apart by these numbers."""

STRATEGY_REASONS = ("rate_limited", "all_stale", "reuse_exhausted", "no_groups", "too_few_groups", "too_few_tokens")
"""Those that a strategy may tell; the others are of the run's state, which it does not see."""


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Room of one batch: `tokens` and `groups` (None = no bound), `seq_len` tokens per micro-batch."""

    tokens: int | None
    groups: int | None
    seq_len: int


@dataclasses.dataclass(frozen=True, slots=True)
class BufferView:
    """What the buffer knows when a decision is asked for.

    `step` is the next step to assemble, `version` = version(step); counts are of live groups. `groups_stored` counts
    all groups ever stored, `groups_used` all uses in batches of the surviving history, `groups_fresh` the live groups
    that were never used, `uses_live` the uses of the live groups; `steps_done` counts acked steps.
    Of an adapter all of it is its own; `groups_given` are those that earlier batches of the run took for its `step`.
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


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """What was measured, for admission. `tokens_per_group` is a prior until groups have arrived.

    The rest is of `kernel.rates.Measured`, where each figure is explained; 0 = not known. `now_s` is the time of the
    decision.
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
    """The groups of the next batch, in the order they are to be trained; `weights` per group, or None.

    Anything that numpy reads as one dimension of whole numbers serves as `rows`, so of numbers as `weights`.
    """

    rows: Rows
    weights: npt.NDArray[np.float32] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """No batch yet, and why: one of `STRATEGY_REASONS`.

    `groups` and `tokens`: what may be used now where that is less than what was given (None = all of it).
    """

    reason: str
    groups: int | None = None
    tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Evictions:
    """Groups that can never be used again, each with its reason; `rows` may be an array."""

    rows: Sequence[int] | Rows = ()
    reasons: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Feedback:
    """What the trainer sent with the ack of `step`: `values`, a JSON object, is its own to choose."""

    step: int
    values: dict[str, Any]


class Strategy(ABC, Generic[OptionsT]):
    """Admission, selection and eviction in one policy. Subclasses need `Options` and `select`.

    Defaults: `max_staleness` = 0, `max_uses` = 1, no look-ahead; admission by the staleness window (`window_capacity`),
    eviction of what is too stale.
    """

    Options: ClassVar[type[StrategyOptions]] = StrategyOptions

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    @property
    def max_staleness(self) -> int | None:
        """Largest staleness at use; None = unbounded."""
        return 0

    @property
    def max_uses(self) -> int | None:
        """Most batches a group may be in; None = unbounded."""
        return 1

    @property
    def look_ahead(self) -> int:
        """How many steps beyond the next unacked one may be assembled."""
        return 0

    def check(self, budget: Budget, steps_per_publish: int, max_tokens_live: int | None) -> None:
        """Refuse a run in which it would wait for ever. Raises `Invalid` naming the option and its bound.

        `max_tokens_live`: the lower of that limit and what `max_bytes_live` holds at 4 bytes per token; None = none.
        """

    def admit(self, buffer: BufferView, flow: Flow) -> int:
        """Say how many more groups producers may start now."""
        return window_capacity(buffer, flow, self.max_staleness, self.look_ahead)

    def evict(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Name the groups that no later batch may use."""
        if self.max_staleness is None:
            return Evictions()
        stale = groups.row[np.flatnonzero(groups.policy_version < buffer.version - self.max_staleness)]
        return Evictions(tuple(stale.tolist()), ("too_stale",) * len(stale))

    @abstractmethod
    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        """Choose the groups of `buffer.step` from those that bounds allow, or say what is missing."""

    def observe(self, feedback: Feedback) -> None:
        """Take in what the trainer sent with its ack.

        A strategy that has this is built anew at every ack with feedback, start and rewind, and observes those of the
        newest 16 steps of the surviving history that had any, oldest first. Keep nothing else; take whatever is sent.
        """


class Filter(ABC, Generic[OptionsT]):
    """Drops groups that must not be trained, checked once, when they arrive: a plug-in of `replaybuf.filters`.

    Filters of a run are asked in their order; what one drops is evicted with its reason, counted, and its place is
    given to another group, so that batches stay as large as they were. Pure, like a strategy.
    """

    Options: ClassVar[type[StrategyOptions]] = StrategyOptions

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    def check(self, budget: Budget, group_size: int | None) -> None:
        """Refuse a run of which it would drop every group. Raises `Invalid` naming what does not fit and its bound.

        `budget`: of a batch, of each adapter in turn; `group_size`: rollouts of every group, None = any number.
        """

    @abstractmethod
    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Name the groups that may not be sampled, each with its reason."""


def window_capacity(buffer: BufferView, flow: Flow, max_staleness: int | None, look_ahead: int) -> int:
    """Count the groups that may be started now and still be used in time.

    A group started now gets version v = published_version and may be used up to the last step s with
    version(s) <= v + max_staleness, that is s < (v + max_staleness + 1) * steps_per_publish. With
    W = that bound - next step (the batches still open to it) and B groups per batch:

        capacity = W * B - given - live - tickets out        given: 0 but for an adapter within its step

    the same count as AReaL's (eta + v + 1) * B - (accepted + running) (Fu et al. 2025, section 5.1), taken from what
    is in the buffer now, so that dropped groups free their place. Blocks (0) until a publication opens the window.
    Where a batch is full by tokens, B is measured: groups = tokens / mean tokens per group.
    """
    if max_staleness is None:
        batches = look_ahead + 1
    else:
        batches = (buffer.published_version + max_staleness + 1) * buffer.steps_per_publish - buffer.step
    return capacity_of(buffer, flow, batches)


def capacity_of(buffer: BufferView, flow: Flow, batches: float) -> int:
    """Count the groups that may be started until live groups and tickets out make this many batches, at least 0."""
    if batches <= 0:
        return 0
    budget = buffer.budget
    by_groups: float = (
        math.inf
        if budget.groups is None
        else (math.ceil(batches * budget.groups) - buffer.groups_given - buffer.groups_live)
    )
    by_tokens: float = math.inf
    if budget.tokens is not None:
        by_tokens = math.ceil((batches * budget.tokens - buffer.tokens_live) / flow.tokens_per_group)
    # Where both bounds are set a batch is full when either is reached; the smaller count suffices.
    return max(0, int(min(by_groups, by_tokens)) - buffer.tickets_out)


def fill(
    groups: Groups,
    order: npt.NDArray[np.int64] | Iterable[npt.NDArray[np.int64]],
    budget: Budget,
    last_version: int | None = None,
) -> Selection | Waiting:
    """Fill the budget with whole groups in the given order of positions: one array, or pieces that are made as needed.

    Full means: `budget.groups` groups, or no room for the next one. Then of the `LOOK_AHEAD` groups that follow those
    are taken that fit in both bounds, and where more than `LEFTOVER` of the tokens is unused, up to three of the last
    taken are left for others that fill the batch better: what is left comes first in the next batch. Groups of versions
    below `last_version` are never left: they would be too stale by then.
    Raises nothing; returns `Waiting` where the groups do not fill the budget.
    """
    limit = _UNBOUNDED if budget.groups is None else budget.groups
    room = _UNBOUNDED if budget.tokens is None else budget.tokens
    chosen: list[int] = []
    following: list[int] = []
    pieces = _pieces(order)
    for positions in pieces:
        total = np.cumsum(groups.take(positions).tokens, dtype=np.int64)
        first = min(int(np.searchsorted(total, room, side="right")), limit - len(chosen))
        chosen += positions[:first].tolist()
        room -= int(total[first - 1]) if first else 0
        following = positions[first : first + LOOK_AHEAD].tolist()
        if following or len(chosen) == limit or room == 0:
            break
    if budget.tokens is not None and room and len(chosen) < limit and following:
        for positions in pieces:
            following += positions[: LOOK_AHEAD - len(following)].tolist()
            if len(following) == LOOK_AHEAD:
                break
        chosen = _look_ahead(groups, chosen, following, budget, last_version)
    full = len(chosen) == budget.groups or (budget.tokens is not None and (room == 0 or bool(following)))
    if chosen and full:
        return Selection(groups.row[np.array(chosen, np.int64)])
    return Waiting(too_few(budget))


def _look_ahead(
    groups: Groups, chosen: list[int], following: list[int], budget: Budget, last_version: int | None
) -> list[int]:
    """Complete a batch from the groups that follow; the fewer of those chosen are left, the better."""
    window = groups.take(np.array(chosen + following, np.int64))
    tokens, versions = window.tokens.tolist(), window.policy_version
    room = (budget.tokens or 0) - sum(tokens[: len(chosen)])
    unused = int((budget.tokens or 0) * LEFTOVER)
    best, best_left = chosen, room + 1
    # The first is never left: a group waits for at most as many batches as groups stood before it.
    for left_out in range(min(_MOST_LEFT, max(0, len(chosen) - 1)) + 1):
        at = len(chosen) - left_out
        if left_out:
            if last_version is not None and int(versions[at]) < last_version:
                break
            room += tokens[at]
        there, most = tokens[at:], (len(tokens) if budget.groups is None else budget.groups) - at
        fitting = closest(there, room, room - unused, most)
        for begun in (fitting,) if left_out else ([], fitting):
            taken = _that_fit(there, room, most, begun)
            left = room - sum(there[n] for n in taken)
            if left < best_left:
                best, best_left = chosen[:at] + [(chosen + following)[at + n] for n in taken], left
            if best_left <= unused:
                return best
    return best


def _that_fit(sizes: list[int], room: int, most: int, begun: list[int]) -> list[int]:
    """Add to what was begun what fits beside it, in order, `most` in all."""
    taken = set(begun)
    room -= sum(sizes[position] for position in begun)
    for position, size in enumerate(sizes):
        if size <= room and len(taken) < most and position not in taken:
            taken.add(position)
            room -= size
    return sorted(taken)


def too_few(budget: Budget) -> str:
    """Name what a batch lacks when there are not enough groups."""
    return "too_few_tokens" if budget.groups is None else "too_few_groups"


def _pieces(
    order: npt.NDArray[np.int64] | Iterable[npt.NDArray[np.int64]],
) -> Iterator[npt.NDArray[np.int64]]:
    for piece in (order,) if isinstance(order, np.ndarray) else order:
        for start in range(0, len(piece), _CHUNK):
            yield piece[start : start + _CHUNK]
