"""Pages of groups that match a query: its parameters, and the search in pieces that let other calls in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from starlette.requests import Request

from replaybuf.errors import Gone, Invalid
from replaybuf.kernel.decide.records import check_adapter
from replaybuf.kernel.rows.index import ENTRY, Numbers
from replaybuf.kernel.state.group_query import Columns, GroupMatcher, GroupOrder, GroupQuery, Ranking, Window
from replaybuf.kernel.state.lookups import GROUP_STATES
from replaybuf.kernel.state.pool import RETIRED
from replaybuf.service.http.body.requests import AFTER, LIMIT, Number, Real, Text, number, optional_number, real, text
from replaybuf.service.run.served_run import Run
from replaybuf.store import IndexEntry
from replaybuf.store.groups import ENTRIES_AT_ONCE
from replaybuf.wire.late_columns import check_name

CHECKED_ENTRIES = 20_000
"""Index entries that one request reads and compares: about 0.1 s, in pieces of `ENTRIES_AT_ONCE`."""

STATE = Text("state", choices=tuple(GROUP_STATES))
_NUMBERS = tuple(Number(name) for name in ("step", "min_staleness", "max_staleness", "version"))
_REALS = (Real("min_reward"), Real("max_reward"))
_NAMES = tuple(Text(name) for name in ("prompt_id", "id_prefix", "source", "adapter", "contains", "lacks"))
_ORDER = Text("order", "arrival", get_args(GroupOrder))
_DESC = Text("desc", "false", ("true", "false"))
PREVIEW = Text("preview", "false", ("true", "false"))
_ORDERS = (_ORDER, _DESC)
PARAMETERS: tuple[Number | Real | Text, ...] = (STATE, *_NUMBERS, *_REALS, *_NAMES, *_ORDERS, LIMIT, AFTER, PREVIEW)


def read_query(request: Request, run: Run) -> tuple[GroupQuery, int | None, int]:
    """Read what to look for, the group after which the page starts (None = the first) and the length of the page."""
    fields: dict[str, Any] = {parameter.name: text(request, parameter) for parameter in (STATE, *_NAMES, _ORDER)}
    fields |= {parameter.name: optional_number(request, parameter) for parameter in _NUMBERS}
    fields |= {parameter.name: real(request, parameter) for parameter in _REALS}
    query = GroupQuery(**fields, desc=text(request, _DESC) == "true")
    for lower, upper in (("min_reward", "max_reward"), ("min_staleness", "max_staleness")):
        low, high = fields[lower], fields[upper]
        if low is not None and high is not None and low > high:
            detail = f"{lower} is {low}; it must be at most {upper}, which is {high}"
            raise Invalid(detail, name=lower, value=low, bound=high)
    if query.lacks is not None:
        check_name(query.lacks)
    if query.adapter is not None:
        check_adapter(query.adapter, run.journal.config)
    if query.order != "arrival" and query.state == RETIRED:
        detail = f"order is {query.order!r}; groups of state {query.state} are listed in the order of arrival only"
        raise Invalid(detail, name="order", value=query.order, bound=["arrival"])
    if query.contains is not None and query.state == RETIRED:
        detail = (
            f"contains is {query.contains!r}; groups of state {query.state} have no bytes to search: search their "
            "samples with GET samples"
        )
        raise Invalid(detail, name="contains", value=query.contains)
    return query, number(request, AFTER) or None, number(request, LIMIT)


async def find_page(run: Run, query: GroupQuery, after: int | None, limit: int) -> tuple[list[int], int | None]:
    """Return the numbers of up to `limit` groups, and where the next page starts; None at the end.

    A page may be short and have a next one: a request reads at most `CHECKED_ENTRIES` index entries.
    """
    matcher = GroupMatcher(run.state, query)
    if query.order == "arrival":
        return await _by_arrival(run, matcher, after, limit)
    return await _by_key(run, matcher, after, limit)


async def _by_arrival(run: Run, matcher: GroupMatcher, after: int | None, limit: int) -> tuple[list[int], int | None]:
    step = -1 if matcher.query.desc else 1
    numbers: list[int] = []
    left, edge = CHECKED_ENTRIES, after
    while (window := matcher.next_window(edge)) is not None:
        sure, unsure = _split(matcher.query, window)
        piece = unsure[::step][: min(left, ENTRIES_AT_ONCE)]
        if len(piece) < len(unsure):  # the window ends with what is compared
            last = int(piece[-1])
            window = window.cut(last, window.high) if step < 0 else window.cut(window.low, last)
            sure, _ = _split(matcher.query, window)
        left -= len(piece)
        matching = np.concatenate([sure, await _compare(run, matcher, piece)])
        numbers += np.sort(matching)[::step][: limit - len(numbers)].tolist()
        edge = window.low if step < 0 else window.high
        if len(numbers) == limit:
            return numbers, numbers[-1]
        if not left:
            return numbers, edge
        await asyncio.sleep(0)
    return numbers, None


async def _by_key(run: Run, matcher: GroupMatcher, after: int | None, limit: int) -> tuple[list[int], int | None]:
    position = None if after is None else (await _key_of(run, matcher, after), after)
    ranking = Ranking(limit, position, desc=matcher.query.desc)
    left, edge = CHECKED_ENTRIES, None
    while (window := matcher.next_window(edge)) is not None:
        matching = window.matching
        if matcher.query.reads_ids:
            left -= len(matching)
            if left < 0:
                _raise_too_many(matcher.query)
            pieces = [matching[start : start + ENTRIES_AT_ONCE] for start in range(0, len(matching), ENTRIES_AT_ONCE)]
            matching = np.concatenate([matching[:0], *[await _compare(run, matcher, piece) for piece in pieces]])
        ranking.add(*matcher.keys_of(matching))
        edge = window.low if matcher.query.desc else window.high
        await asyncio.sleep(0)
    numbers = ranking.numbers
    return numbers, numbers[-1] if len(numbers) == limit else None


def _split(query: GroupQuery, window: Window) -> tuple[Numbers, Numbers]:
    """Split a window into groups that match, and those whose index entries must be compared; both ascending."""
    both = np.sort(np.concatenate([window.matching, window.freed]))
    if query.reads_ids:
        return both[:0], both
    return (window.matching, window.freed) if query.reads_columns else (both, both[:0])


async def _compare(run: Run, matcher: GroupMatcher, numbers: Numbers) -> Numbers:
    """Return which of these groups match by their index entries."""
    if not len(numbers):
        return numbers
    entries = await run.journal.store.groups.read_entries(run.name, numbers.tolist())
    matches = matcher.compare(_values(entries))
    if matcher.query.reads_ids:
        ids = ((entry.strings.group_id, entry.strings.prompt_id) for entry in entries)
        matches &= np.array([matcher.query.matches_ids(*pair) for pair in ids], bool)
    return np.array([entry.number for entry in entries], np.int64)[matches]


async def _key_of(run: Run, matcher: GroupMatcher, after: int) -> float:
    """Return the key of the last group of the page before; it may be freed by now."""
    keys, _ = matcher.keys_of(np.array([after], np.int64))
    if not len(keys):
        entries = await run.journal.store.groups.read_entries(run.name, [after])
        keys = matcher.sort_keys(_values(entries))
    if not len(keys):
        detail = (
            f"after is {after}; the group of this number is freed, so the order {matcher.query.order} cannot "
            "continue behind it: start again without after"
        )
        raise Gone(detail, name="after", value=after)
    return float(keys[0])


def _values(entries: Sequence[IndexEntry]) -> Columns:
    values = np.array([entry.values for entry in entries], ENTRY)
    return {name: values[name] for name in ENTRY.names or ()}


def _raise_too_many(query: GroupQuery) -> None:
    name = "prompt_id" if query.id_prefix is None else "id_prefix"
    detail = (
        f"{name} with order {query.order} compares at most {CHECKED_ENTRIES} groups, and more meet the other "
        "conditions: add conditions, or use order=arrival"
    )
    raise Invalid(detail, name="order", value=query.order, bound=CHECKED_ENTRIES)
