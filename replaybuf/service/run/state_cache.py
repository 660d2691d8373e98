"""How a run stands, as it is told to whoever asks: what takes long to find out is kept for as long as it is true.

A trainer's or an operator's look at a run must not hold up a batch. All that is folded from the streams changes with
them alone; why the run waits goes by tickets and the clock besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from replaybuf.kernel.report import IndexSummary, render_run_state, summarize_index
from replaybuf.kernel.selection import Selector
from replaybuf.kernel.state import RunState
from replaybuf.kernel.tickets import TicketBook
from replaybuf.wire.config import RunConfig
from replaybuf.wire.contract import WaitingAnswer

WAITS_KEPT_S = 0.25
"""A strategy may go by the number of tickets out, which no stream tells: it is asked again after so long."""


class _Waits(NamedTuple):
    key: object
    asked_s: float
    run: WaitingAnswer | None
    adapters: dict[str, WaitingAnswer | None]


class StateCache:
    """Answers about run `name`; to find `held` and `waits` anew takes a millisecond, and more with many groups."""

    def __init__(
        self, name: str, state: RunState, book: TicketBook, selector: Selector, clock: Callable[[], float]
    ) -> None:
        self._name, self._state, self._book, self._selector, self._clock = name, state, book, selector, clock
        self._config: tuple[RunConfig | None, dict[str, Any]] = None, {}
        self._held: tuple[object, IndexSummary] | None = None
        self._waits: _Waits | None = None

    def state(self, *, durability: str, rejected: dict[str, int]) -> dict[str, Any]:
        """Render the state of the run."""
        waits = self.waits()
        return render_run_state(
            self._name,
            self._state,
            self._book,
            self._rendered_config(),
            self.held(),
            durability=durability,
            rejected=rejected,
            waits=waits.run,
            adapters_wait=waits.adapters,
        )

    def held(self) -> IndexSummary:
        """Tell what the index adds up to."""
        folded = self._folded()
        if self._held is None or self._held[0] != folded:
            self._held = folded, summarize_index(self._state)
        return self._held[1]

    def waits(self) -> _Waits:
        """Tell why the next batch, and each adapter's part in it, cannot be made now; None where it can."""
        selector, now_s = self._selector, self._clock()
        about = [(bool(self._book.out_of(name)), selector.silent(name)) for name in selector.config.adapter_names]
        key = self._folded(), about
        kept = self._waits
        if kept is None or kept.key != key or not 0 <= now_s - kept.asked_s < WAITS_KEPT_S:
            adapters = {name: selector.why_adapter_waits(name) for name in sorted(selector.config.adapters)}
            kept = self._waits = _Waits(key, now_s, selector.why_waiting(), adapters)
        return kept

    def _folded(self) -> tuple[int, int]:
        """Name what is folded: the state is a function of how far both streams are read."""
        return self._state.entries, self._state.stored

    def _rendered_config(self) -> dict[str, Any]:
        config = self._selector.config
        if self._config[0] is not config:
            self._config = config, msgspec.to_builtins(config)
        return self._config[1]
