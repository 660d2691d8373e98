"""Prompts of a run that ended without a group, and the share of them among the newest ended prompts.

A prompt ends with a stored group or as failed. The window holds the newest `WINDOW` ended prompts::

    share = failed / ended,  ended = min(WINDOW, groups stored + prompts failed since the last restart of the window)

The rule (`decide.config`) acts where ended >= `LEAST_ENDED` and share > `tickets.max_failed_share`. Each
failure is recorded with the number of groups stored before it, so the window is the same after a restart. It starts
anew when a run that the rule stopped runs again; else that run would stop at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from replaybuf.kernel.rows.prompt_set import PromptSet
from replaybuf.wire.ledger import FailedPromptRecord

FAILED_SHARE = "failed_share"
"""Start of the reason of a run that the rule for failed prompts paused or finished."""
MAX_FAILURES = 10_000
MAX_REASON = 200
"""Characters kept of the reason why a prompt failed; with `MAX_FAILURES` at most 4 MB."""


WINDOW = 200
"""Ended prompts of the window."""
LEAST_ENDED = 20
"""With fewer ended prompts a share says little."""


class FailedShare(NamedTuple):
    """Ended prompts of the window, and how many of them failed."""

    failed: int
    ended: int

    @property
    def share(self) -> float:
        """Failed prompts among the ended ones; 0 before the first."""
        return self.failed / self.ended if self.ended else 0.0

    def exceeds(self, max_failed_share: float) -> bool:
        """Return whether enough prompts have ended, and more than this share of them failed."""
        return self.ended >= LEAST_ENDED and self.share > max_failed_share


@dataclasses.dataclass(slots=True)
class FailedWindow:
    """`after`: groups stored before each of the newest failures, oldest first; `start`: before the window began."""

    start: int = 0
    after: list[int] = dataclasses.field(default_factory=list)

    def add(self, stored: int | None) -> None:
        """Record a failed prompt after so many stored groups; None = the run has no rule for failed prompts."""
        if stored is not None:
            self.after = [*self.after[1 - WINDOW :], stored]

    def forgive(self, stored: int | None) -> None:
        """Take a failure back that was recorded after so many stored groups: its group came late."""
        if stored in self.after:
            self.after.remove(stored)

    def restart(self) -> None:
        """Begin a new window after the newest failure."""
        self.start, self.after = (self.after or [self.start])[-1], []

    def read(self, stored: int) -> FailedShare:
        """Return the share when so many groups are stored."""
        ago = (stored - before + place for place, before in enumerate(reversed(self.after), 1))
        failed = sum(prompts <= WINDOW for prompts in ago)
        return FailedShare(failed, min(WINDOW, stored - self.start + len(self.after)))


@dataclasses.dataclass(slots=True)
class FailedPrompts:
    """`prompts`: all; `newest`: the last `MAX_FAILURES` records, oldest first; `window` of the newest ended prompts."""

    prompts: PromptSet = dataclasses.field(default_factory=PromptSet)
    newest: dict[tuple[str, int], FailedPromptRecord] = dataclasses.field(default_factory=dict)
    window: FailedWindow = dataclasses.field(default_factory=FailedWindow)

    def add(self, record: FailedPromptRecord) -> None:
        """Record a failed prompt."""
        prompt = record.adapter, record.prompt_index
        self.prompts.add(*prompt)
        self.window.add(record.stored)
        self.newest[prompt] = msgspec.structs.replace(record, reason=record.reason[:MAX_REASON])
        if len(self.newest) > MAX_FAILURES:
            del self.newest[next(iter(self.newest))]

    def forgive(self, prompts: Iterable[tuple[str, int]]) -> None:
        """Take back the failures of prompts, by adapter and index: their groups came late after all."""
        for prompt in prompts:
            self.prompts.discard(*prompt)
            if failed := self.newest.pop(prompt, None):
                self.window.forgive(failed.stored)
