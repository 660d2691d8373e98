"""Lists the groups of a state by windows, as a page of the service does."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaybuf.kernel.state.group_query import GroupMatcher, GroupQuery
from replaybuf.kernel.state.run_state import RunState


def list_numbers(state: RunState, group_state: str | None, after: int, limit: int, **conditions: Any) -> list[int]:
    """List up to `limit` numbers behind `after`; conditions on columns hold for groups that are not freed."""
    matcher, numbers = GroupMatcher(state, GroupQuery(state=group_state, **conditions)), list[int]()
    desc, edge = matcher.query.desc, after or None
    while len(numbers) < limit and (window := matcher.next_window(edge)):
        piece = np.sort(np.concatenate([window.matching, window.freed]))
        numbers += (piece[::-1] if desc else piece).tolist()
        edge = window.low if desc else window.high
    return numbers[:limit]
