"""The interface of a destination of figures, and guards that keep its faults and delays out of the training loop."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from replaybuf.wire.contract import WaitingAnswer

logger = logging.getLogger(__name__)

Figures: TypeAlias = dict[str, Any]
"""The figures of one step by name, see `report.figures`; a value may be a dictionary of figures."""
Waiting: TypeAlias = Callable[[], WaitingAnswer | None]
"""Why there is no batch yet; None while the trainer does not wait."""
T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

QUEUE_ITEMS = 64
"""Items that wait for a slow sink; the next ones are lost and counted."""
CLOSE_TIMEOUT_S = 30.0


class Sink(Protocol[T_contra]):
    """A destination of one item per step. `write` and `close` may raise any error: the guard counts it."""

    name: str

    def write(self, item: T_contra) -> None:
        """Record the item of one step."""

    def close(self) -> None:
        """Write the rest and free resources."""


class Guard(Generic[T]):
    """A sink whose faults never reach the caller. `lost`: items that could not be written.

    The first fault is logged, and the first success after it; the number of lost items at the end.
    """

    def __init__(self, sink: Sink[T]) -> None:
        self.name = sink.name
        self.lost = 0
        self._sink = sink
        self._failing = False

    def write(self, item: T) -> None:
        """Write an item, or count it as lost."""
        try:
            self._sink.write(item)
        except Exception as error:  # noqa: BLE001  any library may be behind a sink; training goes on without it
            self._lose(f"{type(error).__name__}: {error}")
            return
        if self._failing:
            logger.info("figures: %s works again", self.name)
        self._failing = False

    def close(self) -> None:
        """Close the sink and log what it lost."""
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001  as above
            logger.warning("figures: %s does not close: %s: %s", self.name, type(error).__name__, error)
        if self.lost:
            logger.warning("figures: %s lost %d steps", self.name, self.lost)

    def _lose(self, cause: str) -> None:
        self.lost += 1
        if not self._failing:
            logger.warning("figures: %s fails (%s); the training goes on, and lost steps are counted", self.name, cause)
        self._failing = True


class Background(Guard[T]):
    """A guard that writes in a thread of its own. The queue is bounded: if it is full, the new item is lost."""

    def __init__(self, sink: Sink[T], items: int = QUEUE_ITEMS) -> None:
        super().__init__(sink)
        self._items: queue.Queue[T | None] = queue.Queue(items)
        self._thread = threading.Thread(target=self._work, name=f"figures to {sink.name}", daemon=True)
        self._thread.start()

    def write(self, item: T) -> None:
        """Hand an item to the thread, without waiting."""
        try:
            self._items.put_nowait(item)
        except queue.Full:
            self._lose(f"{self._items.maxsize} steps wait for it")

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the waiting items, at most for `timeout_s`, and close the sink."""
        try:
            self._items.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            logger.warning("figures: %s does not end within %.0f s; its last steps may be lost", self.name, timeout_s)

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            super().write(item)
        super().close()


def flat(figures: Figures, prefix: str = "") -> dict[str, float]:
    """Return all numbers of nested figures by path, such as "phase_s/forward"; without texts and None."""
    numbers: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            numbers |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, bool | int | float):
            numbers[prefix + name] = float(value)
    return numbers
