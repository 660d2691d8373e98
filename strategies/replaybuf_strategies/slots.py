"""Exact slots: a batch takes its groups in the order of their tickets, and waits for the slow ones.

Slots are the prompt indexes that have a usable group, an open ticket or a retry due, in ascending order. Batch k takes
the next B of them, whichever group was ready first. So the groups of a batch are a function of the tickets: lengths and
speeds of the groups have no effect on the choice. A failed attempt keeps its slot for the retry. A prompt that fails
for good, or whose group a filter drops, leaves its slot, and the next index moves up.

Invariant: every index in the batch < every awaited index, unless the trainer is `overdue`. With admission by the window
no group waits for more than `max_staleness` publications, so none becomes too stale.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replaybuf.errors import Invalid
from replaybuf.strategy import Budget, BufferView, Groups, Selection, Waiting, too_few


def check_slots(budget: Budget) -> None:
    """Reject a batch without a number of slots. Raises `Invalid`."""
    if budget.groups is None:
        detail = (
            "exact_slots is true, but batch.groups_per_batch is null; set groups_per_batch to the number of slots of a "
            "batch, or leave out exact_slots"
        )
        raise Invalid(detail, name="batch.groups_per_batch", value=None, bound="a whole number >= 1")


def admit_retries(buffer: BufferView, capacity: int, max_staleness: int) -> int:
    """Return the capacity, or the number of retries due if that is larger: their slots hold up the next batches.

    The window may have become smaller since their first tickets, by a change of the options or by measured speeds. Then
    live groups fill it and nothing would ever leave. If it is closed, a group would come too late.
    """
    is_open = (buffer.published_version + max_staleness + 1) * buffer.steps_per_publish > buffer.step
    return max(capacity, buffer.tickets_due) if is_open else capacity


def fill_slots(groups: Groups, buffer: BufferView, budget: Budget) -> Selection | Waiting:
    """Take the groups with the lowest prompt indexes, up to the first one that is still awaited.

    Groups without a prompt index come first, in the order of storing. If the trainer is overdue, awaited slots are
    skipped; their groups come first in a later batch.
    """
    positions = _lowest(groups.prompt_index, budget.groups)
    indexes = groups.prompt_index[positions]
    ready = len(positions)
    if buffer.awaited and not buffer.overdue:
        ready = int(np.searchsorted(indexes, buffer.awaited[0]))
    total = np.cumsum(groups.tokens[positions], dtype=np.int64)
    fitting = len(positions) if budget.tokens is None else int(np.searchsorted(total, budget.tokens, side="right"))
    count = min(ready, fitting)
    full = count == budget.groups or fitting < ready or (count > 0 and total[count - 1] == budget.tokens)
    if count and full:
        return Selection(groups.row[positions[:count]])
    filled, missing = _count_slots(indexes, buffer, budget)
    tokens = int(total[filled - 1]) if filled else 0
    return Waiting(too_few(budget), filled, tokens, _explain(buffer, missing) if missing else None)


def _lowest(indexes: npt.NDArray[np.int64], most: int | None) -> npt.NDArray[np.int64]:
    """Return the positions of the `most` lowest indexes, ascending; equal ones keep their order."""
    positions = np.arange(len(indexes))
    if most is not None and most < len(indexes):
        positions = np.flatnonzero(indexes <= np.partition(indexes, most - 1)[most - 1])
    return positions[np.argsort(indexes[positions], kind="stable")][:most]


def _count_slots(indexes: npt.NDArray[np.int64], buffer: BufferView, budget: Budget) -> tuple[int, int]:
    """Return how many of the next slots have a group, and how many are awaited. `indexes`: of the groups, ascending."""
    awaited = np.array(buffer.awaited, np.int64)
    slots = np.argsort(np.concatenate([indexes, awaited]), kind="stable")[: budget.groups]
    filled = int(np.count_nonzero(slots < len(indexes)))
    return filled, len(slots) - filled


def _explain(buffer: BufferView, missing: int) -> str:
    return f"slots of this batch that wait for a ticket: {missing}; the first is prompt_index {buffer.awaited[0]}"
