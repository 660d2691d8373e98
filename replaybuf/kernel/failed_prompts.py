"""Prompts of a run that ended without a group, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import msgspec

from replaybuf.kernel.failed_share import FailedWindow
from replaybuf.kernel.prompt_set import PromptSet
from replaybuf.wire.ledger import TicketRecord

MAX_FAILURES = 10_000
MAX_REASON = 200
"""Characters kept of the reason why a prompt failed; with `MAX_FAILURES` at most 4 MB."""


@dataclasses.dataclass(slots=True)
class FailedPrompts:
    """`prompts`: all; `newest`: the last `MAX_FAILURES` records, oldest first; `window` of the newest ended prompts."""

    prompts: PromptSet = dataclasses.field(default_factory=PromptSet)
    newest: dict[tuple[str, int], TicketRecord] = dataclasses.field(default_factory=dict)
    window: FailedWindow = dataclasses.field(default_factory=FailedWindow)

    def add(self, record: TicketRecord) -> None:
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
