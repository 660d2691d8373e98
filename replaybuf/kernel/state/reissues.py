"""Prompts that are issued again because their group was too stale.

A prompt is issued again when the ledger says so, in the record that drops its group::

    group evicted ──► waiting ──ticket──► group stored          (waiting: until the group is stored or the prompt fails)
                         └──ticket, `max_attempts` times──► failed

The tickets follow from `waiting`: a leader that finds a waiting prompt without a ticket makes it due. So a crash
between the record and the ticket neither loses a prompt nor issues it twice. The dropped group never comes back, also
not by a rewind: its prompt has another group by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.rows.index import NEVER, Index
from replaybuf.kernel.rows.prompt_set import PromptSet

MOST_WAITING = 10_000
"""Prompts that may wait at once, 1 MB; beyond them groups are dropped without a reissue."""


@dataclasses.dataclass(slots=True)
class Reissues:
    """`rounds[n]`: prompts that were issued again more than n times; `waiting`: those that have no new group yet."""

    rounds: list[PromptSet] = dataclasses.field(default_factory=list)
    waiting: dict[tuple[str, int], None] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> int:
        """Count the reissues of the run."""
        return sum(map(len, self.rounds))

    def count(self, prompt: tuple[str, int]) -> int:
        """Return how often a prompt was issued again."""
        return sum(prompt in prompts for prompts in self.rounds)

    def record(self, index: Index, rows: npt.NDArray[np.int64], names: Mapping[int, str]) -> None:
        """Issue the prompts of evicted rows again; `names`: adapters by hash.

        The index stream may be read first: then the index has the new group of a prompt already.
        """
        newest = newest_numbers(index, rows)
        index["evicted_at"][rows] = NEVER  # so that no rewind restores them, see `STATE_ROW`
        columns = (index[name][rows].tolist() for name in ("adapter", "prompt_index", "number"))
        for code, prompt_index, number in zip(*columns, strict=True):
            prompt = names.get(code, ""), prompt_index
            earlier = self.count(prompt)
            if earlier == len(self.rounds):
                self.rounds.append(PromptSet())
            self.rounds[earlier].add(*prompt)
            if newest[code, prompt_index] == number:
                self.waiting[prompt] = None

    def end(self, prompts: Iterable[tuple[str, int]]) -> bool:
        """End the wait of prompts that have a group now, or failed; return whether one waited."""
        waited = [prompt for prompt in prompts if prompt in self.waiting]
        for prompt in waited:
            del self.waiting[prompt]
        return bool(waited)


def newest_numbers(index: Index, rows: npt.NDArray[np.int64]) -> dict[tuple[int, int], int]:
    """Return the number of the newest group of each prompt of these rows, by hash of the adapter and prompt index."""
    if not len(rows):
        return {}
    first = int(rows.min())
    later = first + np.flatnonzero(np.isin(index["prompt_index"][first:], index["prompt_index"][rows]))
    columns = (index[name][later].tolist() for name in ("adapter", "prompt_index", "number"))
    return {(adapter, prompt): number for adapter, prompt, number in zip(*columns, strict=True)}
