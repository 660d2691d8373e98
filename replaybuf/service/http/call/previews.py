"""One rollout of each group on a page: of a stored group as the order or the search asks, of a freed one its sample."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import UNSET

from replaybuf.errors import SpillAway
from replaybuf.kernel.state.group_query import GroupQuery
from replaybuf.service.bodies.assembly import FetchedGroups, fetch_groups
from replaybuf.service.bodies.shown_rollout import PREVIEW, show_rollout
from replaybuf.service.run.samples import Samples
from replaybuf.service.run.served_run import Run
from replaybuf.wire.answer.browse import GroupSummary
from replaybuf.wire.answer.samples import ShownRollout
from replaybuf.wire.group import Group

MOST_TOKENS = 1 << 20
"""Tokens of the groups that one page reads: about 10 MB. The groups behind them have no preview."""


async def preview_groups(run: Run, groups: Sequence[GroupSummary], query: GroupQuery) -> dict[int, ShownRollout]:
    """Return one rollout of each group by its number, for those that have bytes or a sample."""
    stored: list[int] = []
    left = MOST_TOKENS
    for group in groups:
        left -= group.tokens
        if group.state != "retired" and left >= 0:
            stored.append(group.number)
    try:
        fetched = await fetch_groups(run.journal.store, run.name, stored, run.state.pool.columns)
    except SpillAway:  # the page shows what it can
        fetched = FetchedGroups([], {}, {})
    matches = {group.number: group.match.place for group in groups if group.match is not UNSET}
    shown = await asyncio.to_thread(_show, fetched, query, run.samples, matches)
    others = [group for group in groups if group.number not in shown]
    samples = await run.samples.of_groups([step for group in others for step in group.batches])
    return shown | {group.number: samples[group.group_id][0] for group in others if group.group_id in samples}


def _show(
    fetched: FetchedGroups, query: GroupQuery, samples: Samples, matches: Mapping[int, int]
) -> dict[int, ShownRollout]:
    return {
        number: show_rollout(group, matches.get(number, _place(group, query)), samples.tokenizer, PREVIEW)
        for number, group in fetched.groups.items()
    }


def _place(group: Group, query: GroupQuery) -> int:
    """Return the place of the rollout that people look for in this order; the first one where any will do."""
    match query.order:
        case "reward":
            return int(np.argmax(group.rewards) if query.desc else np.argmin(group.rewards))
        case "longest_tokens":
            return int(np.argmax(group.lengths))
    return 0
