"""Decide which columns a stage may add to a stored group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replaybuf.errors import Conflict, Gone, Invalid, counted
from replaybuf.kernel.state.lookups import find_group_state
from replaybuf.kernel.state.run_state import RunState
from replaybuf.wire.late_columns import FIXED_NAMES, MOST_PARTS
from replaybuf.wire.ledger import AddedColumns, ColumnsRecord

ADDED_AT_ONCE = 64
"""Groups in one record: encoding and folding it takes less than a millisecond."""


def check_open(state: RunState, number: int, group_id: str) -> None:
    """Raise `Conflict` or `Gone` unless columns may still be added to group `number`."""
    place, reason = find_group_state(state, number)
    rows = state.index.rows_of([number])
    if not len(rows):
        raise Gone(f"group {group_id!r} is {place}, and its bytes are deleted", name="group_id", value=group_id)
    if int(state.index["last_step"][rows[0]]) >= 0:
        step = int(state.index["last_step"][rows[0]])
        detail = f"group {group_id!r} was drawn by the batch of step {step}; columns are added before the first use"
        raise Conflict(detail, name="group_id", value=group_id, bound="never used")
    if place != "live":
        why = f" as {reason}" if reason else ""
        detail = f"group {group_id!r} is {place}{why}; columns are added to live groups"
        raise Conflict(detail, name="group_id", value=group_id, bound="live")


def check_parts(state: RunState, names: Iterable[str]) -> None:
    """Raise `Invalid` if these columns bring more late reward parts than a run may have."""
    held = state.pool.columns.late_parts
    added = {name for name in names if name not in FIXED_NAMES and name not in held}
    if len(held) + len(added) > MOST_PARTS:
        detail = (
            f"columns would give the run {counted(len(held) + len(added), 'late reward part')}; the maximum is "
            f"{MOST_PARTS}, and it has {', '.join(held)}"
        )
        raise Invalid(detail, name="columns", value=sorted(added), bound=MOST_PARTS)


def holds_any(state: RunState, number: int, names: Iterable[str]) -> bool:
    """Return whether a group came to have one of these columns late."""
    return not set(names).isdisjoint(state.pool.columns.late_of([number]).get(number, ()))


def decide_columns(added: Sequence[AddedColumns], now_s: float) -> ColumnsRecord:
    """Decide that groups have these columns from now on; `check_open` holds for each of them."""
    return ColumnsRecord(groups=list(added), at_s=now_s)
