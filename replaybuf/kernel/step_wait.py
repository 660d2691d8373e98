"""How long the trainer has waited for groups: after `batch.timeout_s` its next batch may be short."""

from __future__ import annotations

from replaybuf.kernel.state import RunState
from replaybuf.wire.contract import WaitingAnswer


class StepWait:
    """The wait of the attached trainer for its next unacked step; the caller passes a time that does not jump.

    A request for a later step is a prefetch: the trainer is busy, so its time does not count. Nor does time in which
    the step waits for the trainer itself or for an operator.
    """

    def __init__(self) -> None:
        self._asked: tuple[int, int, int] | None = None
        self._since_s = 0.0

    def record(self, state: RunState, step: int, waits: WaitingAnswer, now_s: float) -> None:
        """Record that the answer to a request for `step` was to wait; the first such answer starts the time."""
        if step != state.step:
            return
        asked = (state.epoch, state.generation, step)
        if waits.blocked_on != "producers":
            self._asked = None
        elif self._asked != asked:
            self._asked, self._since_s = asked, now_s

    def left_s(self, state: RunState, step: int, now_s: float) -> float | None:
        """Return the seconds until the batch of `step` may be short, 0 = it may be; None = no time-out is coming."""
        timeout_s = state.config.batch.timeout_s if state.config else None
        if timeout_s is None or step != state.step or self._asked != (state.epoch, state.generation, step):
            return None
        return max(0.0, self._since_s + timeout_s - now_s)
