"""Cached run state: expensive parts are computed again only after a change, so that status requests delay no batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from replaybuf.kernel.selection import Selector
from replaybuf.kernel.state import RunState
from replaybuf.kernel.tickets import TicketBook
from replaybuf.service.presence import Presence
from replaybuf.service.report.status import IndexSummary, render_run_state, summarize_index
from replaybuf.wire.config import RunConfig
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.run_status import RunStatus, SpillStatus

WAITS_KEPT_S = 0.25
"""A strategy may depend on the number of tickets out, which is in no stream: ask it again after this time."""


class _Waits(NamedTuple):
    key: object
    asked_s: float
    run: WaitingAnswer | None
    adapters: dict[str, WaitingAnswer | None]


class StateCache:
    """Caches `summary` and `waits` of run `name`; each takes a millisecond, and more with many groups."""

    def __init__(
        self, name: str, state: RunState, book: TicketBook, selector: Selector, clock: Callable[[], float]
    ) -> None:
        self._name, self._state, self._book, self._selector, self._clock = name, state, book, selector, clock
        self._config: tuple[RunConfig | None, dict[str, Any]] = None, {}
        self._summary: tuple[object, IndexSummary] | None = None
        self._waits: _Waits | None = None

    def state(
        self, *, durability: str, rejected: dict[str, int], presence: Presence, spill: SpillStatus | None = None
    ) -> RunStatus:
        """Render the state of the run."""
        waits = self.waits()
        return render_run_state(
            self._name,
            self._state,
            self._book,
            self._rendered_config(),
            self.summary(),
            durability=durability,
            rejected=rejected,
            presence=presence,
            spill=spill,
            waits=waits.run,
            adapters_wait=waits.adapters,
        )

    def summary(self) -> IndexSummary:
        """Return counts and sums of the index."""
        position = self._position()
        if self._summary is None or self._summary[0] != position:
            self._summary = position, summarize_index(self._state)
        return self._summary[1]

    def waits(self) -> _Waits:
        """Return why the next batch, and each adapter's part in it, cannot be assembled now; None if it can."""
        selector, now_s = self._selector, self._clock()
        producers = [(bool(self._book.out_of(name)), selector.silent(name)) for name in selector.config.adapter_names]
        key = self._position(), producers
        kept = self._waits
        if kept is None or kept.key != key or not 0 <= now_s - kept.asked_s < WAITS_KEPT_S:
            adapters = {name: selector.why_adapter_waits(name) for name in sorted(selector.config.adapters)}
            kept = self._waits = _Waits(key, now_s, selector.why_waiting(), adapters)
        return kept

    def _position(self) -> tuple[int, int]:
        """Return how far both streams are folded: the state is a function of it."""
        return self._state.entries, self._state.stored

    def _rendered_config(self) -> dict[str, Any]:
        config = self._selector.config
        if self._config[0] is not config:
            self._config = config, msgspec.to_builtins(config)
        return self._config[1]
