"""Cursors: the requests and answers of readers beside the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from replaybuf.wire.answer.browse import StoredGroup
from replaybuf.wire.contract import Answer, Request
from replaybuf.wire.names import Name

CursorKind = Literal["stored", "trained"]


class CursorRequest(Request, frozen=True, kw_only=True):
    """Report that all groups up to `position`, from an answer of this cursor, are done."""

    position: Annotated[Name, Meta(min_length=1)]


class CursorState(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """A cursor: all groups up to `position` are done; `lag` counts the groups behind it, each use of a trained one.

    `lifetime_s`: it is forgotten after so long without use; null = never.
    """

    name: str
    kind: CursorKind
    position: str
    lag: int
    lifetime_s: int | None = None


class CursorList(Answer, frozen=True, kw_only=True):
    """The cursors of a run, by name."""

    cursors: list[CursorState]


class CursorGap(Answer, frozen=True, kw_only=True):
    """What a reader missed before the end of this page, because retention was faster.

    `groups`, `steps`: left out of the page, because their history is trimmed; `freed`: groups of the page whose
    rollouts are null, because their bytes are freed.
    """

    groups: int = 0
    steps: int = 0
    freed: int = 0


class CursorGroup(StoredGroup, frozen=True, kw_only=True, omit_defaults=True):
    """A group of a page; `step`: which step trained it, null for a cursor over stored groups."""

    step: int | None = None


class CursorPage(Answer, frozen=True, kw_only=True):
    """Groups behind the position of a cursor. Send `position` when they are done.

    `gap`: what is missing, null if nothing is. `rewound_to`: steps from this one on are void, which an earlier page
    had; this page starts there. Null if none are.
    """

    groups: list[CursorGroup]
    position: str
    gap: CursorGap | None = None
    rewound_to: int | None = None
