"""What `top` shows and how keys change it: the order of runs, the selected one, and the run that is open."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from replaybuf.wire.answer.overview import RunRow

ORDERS = ("attention", "name", "tokens/s")


@dataclasses.dataclass(slots=True)
class Screen:
    """`run` is open, "" = the list of all runs; `selected`: name of a run in the list."""

    run: str = ""
    selected: str = ""
    order: str = ORDERS[0]
    ended: bool = False

    def press(self, key: str, rows: Sequence[RunRow]) -> None:
        """Apply a key; `rows` are those of the list, in any order."""
        match key:
            case "q":
                self.ended = True
            case "escape":
                self.run = ""
            case "s" if not self.run:
                self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
            case "up" | "down" if not self.run:
                self._move(-1 if key == "up" else 1, rows)
            case "enter" if not self.run and rows:
                self.run = self.selected = self.shown(rows)[self.place(rows)].run

    def shown(self, rows: Sequence[RunRow]) -> list[RunRow]:
        """Return the rows in the chosen order."""
        match self.order:
            case "name":
                return sorted(rows, key=lambda row: row.run)
            case "tokens/s":
                return sorted(rows, key=lambda row: (-row.tokens_per_s, row.run))
        return sorted(rows, key=lambda row: (attention(row), row.run))

    def place(self, rows: Sequence[RunRow]) -> int:
        """Return the place of the selected run among the shown rows, 0 if it is gone."""
        names = [row.run for row in self.shown(rows)]
        return names.index(self.selected) if self.selected in names else 0

    def _move(self, by: int, rows: Sequence[RunRow]) -> None:
        if rows:
            place = min(len(rows) - 1, max(0, self.place(rows) + by))
            self.selected = self.shown(rows)[place].run


def attention(row: RunRow) -> int:
    """Return how much a run needs a person: 0 = somebody has to act, 1 = it waits, 2 = it runs, 3 = it is finished."""
    if row.state == "finished":
        return 3
    if row.state == "paused" or row.stands_still or row.alarm or (row.waiting and row.waiting.missing):
        return 0
    return 1 if row.waiting and row.waiting.blocked_on != "trainer" else 2
