"""Producers of a run: when each was last seen, what it did, and which of those that send heartbeats are gone.

A producer that has sent a heartbeat is gone once this server has listened for `heartbeat_s` without any call of it.
Only time in which the server could have answered counts: a process that stood still, or a Redis that was away, makes
nobody gone. A producer that never sent a heartbeat is never gone; its tickets expire.

In memory only. After a start or a takeover every producer counts as seen then.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable

from replaybuf.wire.contract import ProducerFailure

KNOWN_S = 3600.0
MOST_KNOWN = 1000
MOST_FAILURES = 20
MOST_LISTENED_S = 1.0
"""Of the time between two looks at most this much counts: a process that stood still has not listened."""
_MINUTE_S = 60.0


class PerMinute:
    """Rate of events over the last minute, in constant memory: the minute before counts in part."""

    def __init__(self) -> None:
        self._minute = -1
        self._counts = (0, 0)

    def add(self, count: int, now_s: float) -> None:
        """Count events."""
        before, current = self._at(now_s)
        self._counts = before, current + count

    def read(self, now_s: float) -> float:
        """Return the events per minute."""
        before, current = self._at(now_s)
        return before * (1.0 - now_s % _MINUTE_S / _MINUTE_S) + current

    def _at(self, now_s: float) -> tuple[int, int]:
        minute = int(now_s // _MINUTE_S)
        if minute != self._minute:
            self._counts = (self._counts[1] if minute == self._minute + 1 else 0), 0
            self._minute = minute
        return self._counts


@dataclasses.dataclass(slots=True)
class Failure:
    """The newest failure that a producer reported; `lasts`: no group of it was stored since."""

    report: ProducerFailure
    at_s: float
    lasts: bool = True


@dataclasses.dataclass(slots=True)
class Producer:
    """One producer; `announced`: it sends heartbeats.

    `in_flight`, `slots`, `engines`, `held_back_by` are from its last heartbeat, `faults` counts tickets lost or given
    back for a failure.
    """

    name: str
    seen_s: float
    heard_s: float
    announced: bool = False
    gone: bool = False
    faults: int = 0
    groups: PerMinute = dataclasses.field(default_factory=PerMinute)
    in_flight: int | None = None
    slots: int | None = None
    engines: int | None = None
    held_back_by: str | None = None
    failure: Failure | None = None


class Producers:
    """The newest `MOST_KNOWN` producers of the last `KNOWN_S`, in the order of their last calls.

    The newest `MOST_FAILURES` failures are kept, one per producer. All times are of one clock that does not jump.
    """

    def __init__(self, now_s: float) -> None:
        self._known: OrderedDict[str, Producer] = OrderedDict()
        self._failed: OrderedDict[str, Producer] = OrderedDict()
        self._stored_s = now_s
        self._listened_s = 0.0
        self._looked_s = now_s

    def see(self, name: str, now_s: float) -> Producer:
        """Record a call of a producer."""
        heard_s = self._listened_s + self._since_look_s(now_s)
        producer = self._known.get(name)
        if producer is None:
            producer = self._known[name] = Producer(name, now_s, heard_s)
        producer.seen_s, producer.heard_s, producer.gone = now_s, heard_s, False
        self._known.move_to_end(name)
        if len(self._known) > MOST_KNOWN:
            self._drop_oldest()
        return producer

    def record_failure(self, producer: Producer, report: ProducerFailure, now_s: float) -> None:
        """Record the newest failure of a producer."""
        producer.failure = Failure(report, now_s)
        self._failed[producer.name] = producer
        self._failed.move_to_end(producer.name)
        if len(self._failed) > MOST_FAILURES:
            self._failed.popitem(last=False)[1].failure = None

    def record_groups(self, name: str, count: int, now_s: float) -> None:
        """Record stored groups of a producer: it has recovered from its last failure."""
        producer = self.see(name, now_s)
        producer.groups.add(count, now_s)
        self._stored_s = now_s
        if producer.failure is not None:
            producer.failure.lasts = False

    def announce(self, names: Iterable[str], now_s: float) -> None:
        """Record a heartbeat of each of these producers."""
        for name in names:
            self.see(name, now_s).announced = True

    def listen(self, now_s: float, heartbeat_s: float, *, heard: bool) -> list[str]:
        """Count the time since the last look if calls were `heard` in it; list the producers that are gone since."""
        self._listened_s += self._since_look_s(now_s) if heard else 0.0
        self._looked_s = now_s
        self._forget(now_s)
        gone = []
        for producer in self._known.values():
            if self._listened_s - producer.heard_s < heartbeat_s:
                break  # the others called later
            if producer.announced and not producer.gone:
                producer.gone = True
                gone.append(producer.name)
        return gone

    def start_over(self, now_s: float) -> None:
        """Let every producer count as seen by a leader that starts now."""
        self._looked_s = now_s
        for producer in self._known.values():
            producer.heard_s, producer.gone = self._listened_s, False

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def find(self, name: str) -> Producer | None:
        """Return a producer, None if it is not known."""
        return self._known.get(name)

    def list_known(self, now_s: float) -> list[Producer]:
        """List the known producers by name."""
        self._forget(now_s)
        return sorted(self._known.values(), key=lambda producer: producer.name)

    def any_announced(self) -> bool:
        """Return whether a producer sends heartbeats and is not gone: somebody must look whether they go on."""
        return any(producer.announced and not producer.gone for producer in self._known.values())

    def list_gone(self) -> list[Producer]:
        """List the producers that are gone, the longest silent one first."""
        return [producer for producer in self._known.values() if producer.gone]

    def list_failing(self) -> list[tuple[str, Failure]]:
        """List the producers whose failure lasts, the newest failure last.

        One that is gone counts until any producer stores a group: another may do its work.
        """
        return [
            (producer.name, producer.failure)
            for producer in self._failed.values()
            if producer.failure is not None
            and producer.failure.lasts
            and not (producer.gone and producer.failure.at_s < self._stored_s)
        ]

    def count_without_engine(self) -> int:
        """Count the producers whose last heartbeat had no engine, without those that are gone."""
        return sum(producer.engines == 0 and not producer.gone for producer in self._known.values())

    def count_known(self, now_s: float) -> int:
        """Count the known producers."""
        self._forget(now_s)
        return len(self._known)

    def _since_look_s(self, now_s: float) -> float:
        return min(max(now_s - self._looked_s, 0.0), MOST_LISTENED_S)

    def _forget(self, now_s: float) -> None:
        while self._known and next(iter(self._known.values())).seen_s < now_s - KNOWN_S:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        name, _ = self._known.popitem(last=False)
        self._failed.pop(name, None)
