"""Sums over the steps of one training process, for the progress line and the summary at its end."""

from __future__ import annotations

from collections import Counter, deque

from replaybuf_trainer.report.sinks.sink import Figures
from replaybuf_trainer.report.stopwatch import shares

RECENT_STEPS = 20


class Session:
    """Steps since the start of the process. `steps`: number of the run's last step, None = unknown; `step`: steps done.

    Means are over the newest `RECENT_STEPS` steps.
    """

    def __init__(self, step: int, steps: int | None) -> None:
        self.step = self._first = step
        self.steps = steps
        self.newest: Figures = {}
        self._recent: deque[Figures] = deque(maxlen=RECENT_STEPS)
        self._first_reward: float | None = None
        self._phase_s: Counter[str] = Counter()
        self._tokens = 0
        self._peak_s = 0.0

    def add(self, figures: Figures) -> None:
        """Count one step."""
        self.step = figures["step"] + 1
        self._recent.append(figures)
        if self._first_reward is None:
            self._first_reward = figures["reward_mean"]
        self._phase_s.update(figures["phase_s"])
        self._tokens += figures["tokens"]
        self._peak_s += figures["mfu"] * figures["step_s"]
        self.newest = figures

    def recent(self, name: str) -> float:
        """Return the mean of a figure over the recent steps; 0 before the first."""
        recent = list(self._recent)  # the progress line reads it in a thread of its own
        return sum(figures[name] for figures in recent) / len(recent) if recent else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the recent time that the trainer waited for batches, from 0 to 1."""
        whole_s = self.recent("step_s")
        return self.recent("wait_s") / whole_s if whole_s else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the last step; None if it is unknown."""
        if self.steps is None or not self.newest:
            return None
        return max(0, self.steps - self.step) * self.recent("step_s")

    def summary(self) -> str:
        """Return the whole session in one line."""
        whole_s = self._phase_s.total() or 1.0
        reward = (
            f"reward={self._first_reward:.3f}->{self.recent('reward_mean'):.3f} "
            if self._first_reward is not None
            else ""
        )
        return (
            f"steps={self.step - self._first} took={self._phase_s.total():.1f}s {reward}tokens={self._tokens} "
            f"tokens_per_s={self._tokens / whole_s:.0f} mfu={self._peak_s / whole_s:.1%} ({shares(self._phase_s)})"
        )
