"""Cached run state: expensive parts are computed again only after a change, so that status requests delay no batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from replaybuf.kernel.figures.waits import WaitSince
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.tickets import TicketBook
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.service.clock import Clock
from replaybuf.service.presence import Presence
from replaybuf.service.report.status import IndexSummary, render_run_state, summarize_index
from replaybuf.wire.answer.run_status import RunStatus, SpillStatus
from replaybuf.wire.config import RunConfig
from replaybuf.wire.contract import WaitingAnswer

WAITS_KEPT_S = 0.25
"""A strategy may depend on the number of tickets out, which is in no stream: ask it again after this time."""
LOOK_REST = 49
"""A look that took t is followed by none for 49 t: 2 % of the time at most, also with a million groups."""


class _Waits(NamedTuple):
    key: object
    asked_s: float
    run: WaitingAnswer | None
    adapters: dict[str, WaitingAnswer | None]


class StateCache:
    """Caches `summary` and `waits` of run `name`; each takes a millisecond, and more with many groups."""

    def __init__(self, name: str, state: RunState, book: TicketBook, selector: Selector, clock: Clock) -> None:
        self._name, self._state, self._book, self._selector, self._clock = name, state, book, selector, clock
        self._config: tuple[RunConfig | None, dict[str, Any]] = None, {}
        self._summary: tuple[object, IndexSummary] | None = None
        self._waits: _Waits | None = None
        self._since = WaitSince()
        self._rest_until_s = 0.0

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
            waits=waits.run and presence.explain(waits.run),
            waiting_s=self.waiting_s(),
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
        key, now_s, kept = self._key(), self._clock.monotonic(), self._waits
        if kept is None or kept.key != key or not 0 <= now_s - kept.asked_s < WAITS_KEPT_S:
            kept = self._ask(key, now_s)
        return kept

    def waiting_s(self) -> float | None:
        """Return for how many seconds the run has waited for its present reason; None if the next batch is ready."""
        if self.waits().run is None:
            return None
        return round(max(0.0, self._clock.monotonic() - self._since.since_s), 3)

    def look(self) -> None:
        """Look why the run waits, if something changed: a reason that nobody saw begin has no start."""
        begun_s = self._clock.monotonic()
        if begun_s < self._rest_until_s or (self._waits and self._waits.key == self._key()):
            return
        self._ask(self._key(), begun_s)
        self._rest_until_s = begun_s + (1 + LOOK_REST) * (self._clock.monotonic() - begun_s)

    def _ask(self, key: object, now_s: float) -> _Waits:
        selector = self._selector
        adapters = {name: selector.why_adapter_waits(name) for name in sorted(selector.config.adapters)}
        self._waits = _Waits(key, now_s, selector.why_waiting(), adapters)
        answer = self._waits.run
        self._since.look(answer.reason if answer else None, self._change_age_s(), now_s)
        return self._waits

    def _change_age_s(self) -> float | None:
        """Return the age of the newest entry of both streams, by this server's clock; None without a time."""
        arrivals = self._state.index["arrival_s"]
        newest_s = max(self._state.figures.newest_s, float(arrivals[-1]) if len(arrivals) else 0.0)
        return self._clock.wall() - newest_s if newest_s else None

    def _key(self) -> object:
        """Return what the answer follows from, besides time."""
        names = self._selector.config.adapter_names
        return self._position(), [(bool(self._book.out_of(name)), self._selector.silent(name)) for name in names]

    def _position(self) -> tuple[int, int]:
        """Return how far both streams are folded: the state is a function of it."""
        return self._state.entries, self._state.stored

    def _rendered_config(self) -> dict[str, Any]:
        config = self._selector.config
        if self._config[0] is not config:
            self._config = config, msgspec.to_builtins(config)
        return self._config[1]
