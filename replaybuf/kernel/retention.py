"""What of a run's past is still told: the newest freed groups and the records of their batches; the rest is trimmed.

Pure: `trim_point` looks at a state and names what may go. Never trimmed is what the state needs: index entries of
groups that are not freed (few old ones are set aside), batch records that a resume may read.
"""

from __future__ import annotations

import numpy as np

from replaybuf.kernel.index import FREED
from replaybuf.kernel.state import RunState
from replaybuf.wire.ledger import TrimRecord

KEPT_GROUPS = 100_000
"""Freed groups, and uses in freed batches, whose history is kept for people to look at."""
KEPT_ENTRIES = 100
"""Newest ledger entries that are always kept."""
MOST_SET_ASIDE = 5_000
"""Groups that one trimming may set aside."""
SPARSE = 4
"""Groups are set aside where at least this many times as many entries go as stay."""


def trim_point(state: RunState, kept_groups: int = KEPT_GROUPS, kept_entries: int = KEPT_ENTRIES) -> TrimRecord | None:
    """Name the history that may go once a quarter more than `kept_groups` is there; None while it is not.

    `kept_entries` >= 1: the newest ledger entry tells the next one's number.
    """
    freed = np.flatnonzero(np.frombuffer(state.pool.freed_as, np.uint8)[1:]) + state.trimmed + 1
    uses = sum(len(made.numbers) for step, made in state.records.items() if step not in state.batches)
    due = kept_groups + max(1, kept_groups // 4)
    if max(len(freed), uses) < due:
        return None
    groups = _last_group(state, int(freed[-kept_groups - 1])) if len(freed) > kept_groups else state.trimmed
    entries = _last_entry(state, kept_groups, kept_entries)
    if (groups, entries) == (state.trimmed, state.trimmed_entries):
        return None
    return TrimRecord(groups=groups, entries=entries)


def _last_group(state: RunState, wanted: int) -> int:
    """Find the last number, up to `wanted`, through which the index stream may be trimmed."""
    index = state.index
    held = index["number"][(index["state"] != FREED) & (index["number"] > state.trimmed) & (index["number"] <= wanted)]
    if len(held) > MOST_SET_ASIDE:
        wanted, held = int(held[MOST_SET_ASIDE]) - 1, held[:MOST_SET_ASIDE]
    sparse = len(held) * SPARSE <= wanted - state.trimmed
    return wanted if sparse else int(held[0]) - 1


def _last_entry(state: RunState, kept_groups: int, kept_entries: int) -> int:
    """Find the last ledger entry of which nothing is needed or told any more."""
    needed = [batch.entry for batch in state.batches.values()]
    needed += [voided.entry for several in state.voided.values() for voided in several]
    uses = 0
    for step in sorted(state.records.keys() - state.batches.keys(), reverse=True):
        uses += len(state.records[step].numbers)
        if uses > kept_groups:
            break
        needed.append(state.records[step].entry)
    last = min(min(needed, default=state.entries + 1) - 1, state.entries - kept_entries)
    return max(last, state.trimmed_entries)
