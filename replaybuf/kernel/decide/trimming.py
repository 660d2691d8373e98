"""Retention of a run's history: keep the newest freed groups and the records of their batches, trim the rest.

`decide_trim` reads a state and returns what may go. It never trims what the state needs: index entries of groups that
are not freed (few old ones are set aside) and batch records that a resume may read.
"""

from __future__ import annotations

import numpy as np

from replaybuf.kernel.rows.index import FREED
from replaybuf.kernel.state.run_state import RunState
from replaybuf.wire.ledger import TrimRecord

KEPT_GROUPS = 100_000
"""Freed groups, and uses in freed batches, whose history people can still read."""
KEPT_ENTRIES = 100
"""Newest ledger entries, never trimmed."""
MOST_SET_ASIDE = 5_000
"""Most groups that one trimming sets aside."""
SPARSE = 4
"""Set groups aside only if at least this many times as many entries are trimmed."""


def decide_trim(state: RunState, kept_groups: int = KEPT_GROUPS, kept_entries: int = KEPT_ENTRIES) -> TrimRecord | None:
    """Return the history to trim once there is a quarter more than `kept_groups`; None before.

    `kept_entries` >= 1: the next entry's number follows from the newest entry.
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
    """Find the last ledger entry that is neither needed nor kept for people."""
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
