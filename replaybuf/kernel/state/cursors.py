"""Cursors of readers beside the trainer: which groups follow a position, and what is missing.

A cursor over stored groups follows their numbers. One over trained groups follows the acked steps of the surviving
history: a position holds the generation in which it was read, so a batch with a higher generation below it shows that
a rewind voided what the reader had.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec
import numpy as np

from replaybuf.errors import Conflict, Invalid
from replaybuf.kernel.state.group_query import GroupMatcher, GroupQuery
from replaybuf.kernel.state.run_state import RunState
from replaybuf.wire.answer.cursors import CursorGap, CursorKind, CursorState

PAGE_BYTES = 4 << 20
"""Bytes of frames of one page: about 16 MB of JSON. A larger group is a page of its own."""
_POSITION = re.compile(r"s([0-9]{1,15})|t([0-9]{1,15})\.([0-9]{1,15})\.([0-9]{1,15})")


class Position(NamedTuple):
    """How far a reader has come: stored groups up to `number`, or `offset` trained groups of `step` and all before.

    `generation`: rewinds before it was read. Positions of one kind are ordered.
    """

    generation: int = 0
    step: int = 0
    offset: int = 0
    number: int = 0

    def render(self, kind: CursorKind) -> str:
        """Return the text that clients get."""
        return f"s{self.number}" if kind == "stored" else f"t{self.generation}.{self.step}.{self.offset}"


class Cursor(msgspec.Struct, frozen=True):
    """A named cursor. `lifetime_s`: it is forgotten after so long without use; None = never."""

    name: str
    kind: CursorKind
    position: Position
    lifetime_s: int | None = None


class CursorItem(NamedTuple):
    """One group of a page: its number, the step that trained it, and the position when it is done."""

    number: int
    step: int | None
    position: Position


class Page(NamedTuple):
    """Groups behind a position; fields as those of `CursorPage`. `gap` counts no freed groups yet."""

    kind: CursorKind
    items: list[CursorItem]
    position: Position
    gap: CursorGap
    rewound_to: int | None

    @property
    def empty(self) -> bool:
        """Return whether there is nothing to report."""
        return not self.items and self.rewound_to is None and self.gap == CursorGap()


def new_cursor(state: RunState, name: str, kind: CursorKind, lifetime_s: int | None = None) -> Cursor:
    """Return a cursor at the start of the history that is kept."""
    oldest = min(state.records, default=state.next_step)
    start = Position(state.generation, step=oldest) if kind == "trained" else Position(number=_first_kept(state) - 1)
    return Cursor(name, kind, start, lifetime_s)


def _first_kept(state: RunState) -> int:
    window = GroupMatcher(state, GroupQuery()).next_window(None)
    return int(np.concatenate([window.matching, window.freed]).min()) if window else state.trimmed + 1


def parse_position(state: RunState, cursor: Cursor, text: str) -> Position:
    """Read a position that a client sends. Raises `Invalid` for one of another kind or behind the end."""
    match = _POSITION.fullmatch(text)
    if match is None or (match[1] is not None) != (cursor.kind == "stored"):
        detail = f"position is {text!r}; send the position of a page of cursor {cursor.name!r} (kind {cursor.kind})"
        raise Invalid(detail, name="position", value=text, bound=cursor.position.render(cursor.kind))
    if cursor.kind == "stored":
        position, end = Position(number=int(match[1])), Position(number=state.stored)
    else:
        position, end = Position(*map(int, match.groups()[1:])), Position(state.generation, state.next_step)
    if position > end:
        detail = f"position is {text!r}; the run is at {end.render(cursor.kind)!r}"
        raise Invalid(detail, name="position", value=text, bound=end.render(cursor.kind))
    return position


def check_kind(cursor: Cursor, kind: CursorKind | None) -> None:
    """Raise `Conflict` for a cursor of another kind."""
    if kind not in (None, cursor.kind):
        detail = f"kind is {kind!r}; cursor {cursor.name!r} is over {cursor.kind} groups: use another name"
        raise Conflict(detail, name="kind", value=kind, bound=cursor.kind)


# ---------------------------------------------------------------------- pages


def find_page(state: RunState, cursor: Cursor, limit: int) -> Page:
    """Find up to `limit` groups behind the position of a cursor, of at most `PAGE_BYTES`."""
    page = (_stored_page if cursor.kind == "stored" else _trained_page)(state, cursor.position, limit)
    size, sizes = 0, _frame_bytes(state, [item.number for item in page.items])
    for count, item in enumerate(page.items):
        size += sizes[item.number]
        if count and size > PAGE_BYTES:
            last = page.items[count - 1].position
            skipped = last.number - cursor.position.number - count
            gap = page.gap if cursor.kind == "trained" else CursorGap(groups=skipped)
            return page._replace(items=page.items[:count], position=last, gap=gap)
    return page


def _frame_bytes(state: RunState, numbers: list[int]) -> dict[int, int]:
    rows = state.index.rows_of(numbers)
    known = zip(state.index["number"][rows].tolist(), state.index["frame_bytes"][rows].tolist(), strict=True)
    return dict.fromkeys(numbers, 0) | dict(known)


def _stored_page(state: RunState, start: Position, limit: int) -> Page:
    matcher, numbers, edge = GroupMatcher(state, GroupQuery()), list[int](), start.number
    while len(numbers) < limit and (window := matcher.next_window(edge)):
        numbers += np.sort(np.concatenate([window.matching, window.freed]))[: limit - len(numbers)].tolist()
        edge = window.high
    last = numbers[-1] if numbers else max(start.number, state.trimmed)
    items = [CursorItem(number, None, Position(number=number)) for number in numbers]
    return Page("stored", items, Position(number=last), CursorGap(groups=last - start.number - len(numbers)), None)


def _trained_page(state: RunState, start: Position, limit: int) -> Page:
    rewound_to = _find_rewind(state, start)
    step, offset = (start.step, start.offset) if rewound_to is None else (rewound_to, 0)
    oldest, generation = min(state.records, default=state.next_step), state.generation
    trimmed = max(0, oldest - step)
    if trimmed:
        step, offset = oldest, 0
    items: list[CursorItem] = []
    while len(items) < limit and step < state.step and step in state.records:
        numbers = state.records[step].numbers
        part = numbers[offset : offset + limit - len(items)].tolist()
        items += [
            CursorItem(number, step, Position(generation, step, place))
            for place, number in enumerate(part, start=offset + 1)
        ]
        offset += len(part)
        if offset >= len(numbers):
            step, offset = step + 1, 0
    return Page("trained", items, Position(generation, step, offset), CursorGap(steps=trimmed), rewound_to)


def _find_rewind(state: RunState, start: Position) -> int | None:
    """Return the first step that was read and is void by now; None without one.

    Generations of batches ascend with their steps, and a step without a batch was voided too.
    """
    read = start.step + (start.offset > 0)
    void = min(read, state.next_step)
    for step in range(void - 1, -1, -1):
        made = state.records.get(step)
        if made is None or made.generation <= start.generation:
            break
        void = step
    return void if void < read else None


def count_lag(state: RunState, cursor: Cursor) -> int:
    """Count the groups behind a cursor: stored ones, or uses by acked steps."""
    if cursor.kind == "stored":
        return state.stored - cursor.position.number
    rewound_to = _find_rewind(state, cursor.position)
    step, offset = (cursor.position.step, cursor.position.offset) if rewound_to is None else (rewound_to, 0)
    behind = sum(len(made.numbers) for at, made in state.records.items() if step <= at < state.step)
    return max(0, behind - (offset if step < state.step else 0))


def describe(state: RunState, cursor: Cursor) -> CursorState:
    """Render a cursor."""
    position = cursor.position.render(cursor.kind)
    lag = count_lag(state, cursor)
    return CursorState(name=cursor.name, kind=cursor.kind, position=position, lag=lag, lifetime_s=cursor.lifetime_s)
