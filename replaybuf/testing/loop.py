"""Closed loop of a trainer and producers around one strategy, in virtual time."""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.strategy.contract import Budget, BufferView, Feedback, Flow, Groups, Strategy, Waiting

BUDGETS = (Budget(None, 16, 4096), Budget(1650, None, 4096))
"""Batches counted in groups, and in tokens; a group has 60 to 140 tokens."""
MEAN_TOKENS = 100
SLOW_EVERY = 8
"""Every eighth prompt is slow."""
SLOW_S, TIMES_SLOWER, STEP_S = 0.5, 50, 1.0
TAIL_STEPS = 8
"""Groups that arrive in the last steps do not count: they had no time to be used."""

_TRAINED = -1


@dataclasses.dataclass(frozen=True)
class Progress:
    """Result of a closed loop: `steps` done, and `staleness` of every use.

    Per group, in the order of storing: `slow`, `counted` (it had time to be used), `uses`.
    """

    steps: int
    slow: npt.NDArray[np.bool_]
    counted: npt.NDArray[np.bool_]
    uses: npt.NDArray[np.int32]
    staleness: npt.NDArray[np.int64]

    def share(self, *, slow: bool) -> float:
        """Return the share of the counted slow, or fast, groups that were trained at least once."""
        uses = self.uses[self.counted & (self.slow == slow)]
        return float((uses > 0).mean()) if len(uses) else 1.0


class ClosedLoop:
    """One trainer, and as many producers as admission allows.

    A step takes 1 s; its ack has feedback, and a publication follows at once. Every eighth prompt takes `slow_s`, the
    others a 50th of it. The bounds of the strategy hold as in a service. The loop stops if no batch can be made and no
    group is on its way.
    """

    def __init__(
        self, strategy: Strategy[Any], budget: Budget = BUDGETS[0], seed: int = 0, slow_s: float = SLOW_S
    ) -> None:
        self._strategy = strategy
        self._max_staleness, self._max_uses, self._sources = strategy.max_staleness, strategy.max_uses, strategy.sources
        self._budget = budget
        self._seed = seed
        self._slow_s = slow_s
        self._now_s = 0.0
        self._step = 0
        self._training = False
        self._prompts = 0
        self._coming: list[tuple[float, int, int]] = []
        self._columns = {name: np.empty(0, dtype) for name, dtype in Groups.DTYPES.items()}
        self._gone = np.empty(0, bool)
        self._stored_at = np.empty(0, np.int64)
        self._staleness: list[int] = []
        self._batch: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def run(self, steps: int) -> Progress:
        """Train `steps` steps, or fewer if the loop stops before."""
        while self._step < steps:
            self._evict()
            self._start(self._strategy.admit(self._view(), self._flow()))
            if not self._training:
                self._training = self._assemble()
            if not self._coming:
                break
            self._advance()
        return Progress(
            steps=self._step,
            slow=self._columns["prompt_index"] % SLOW_EVERY == 0,
            counted=self._stored_at < steps - TAIL_STEPS,
            uses=self._columns["times_sampled"],
            staleness=np.array(self._staleness, np.int64),
        )

    @property
    def _next_step(self) -> int:
        return self._step + self._training

    def _flow(self) -> Flow:
        """Return the rates; without speeds before the first step, as in a service that has just started."""
        flow = Flow(self._now_s, float(MEAN_TOKENS))
        fast_s = self._slow_s / TIMES_SLOWER
        mean_s = fast_s + (self._slow_s - fast_s) / SLOW_EVERY
        return dataclasses.replace(flow, step_s=STEP_S, group_s=mean_s) if self._step else flow

    def _start(self, groups: int) -> None:
        """Start groups with the published version."""
        for prompt in range(self._prompts, self._prompts + groups):
            takes_s = self._slow_s if prompt % SLOW_EVERY == 0 else self._slow_s / TIMES_SLOWER
            heapq.heappush(self._coming, (self._now_s + takes_s, prompt, self._step))
        self._prompts += groups

    def _advance(self) -> None:
        """Process the next event: a group arrives, or the step in training is done and published."""
        self._now_s, prompt, version = heapq.heappop(self._coming)
        if prompt == _TRAINED:
            self._training = False
            self._strategy.observe(Feedback(self._step, self._feedback()))
            self._step += 1
            return
        tokens = MEAN_TOKENS + 20 * (prompt % 5 - 2)
        values = {
            "row": len(self._gone) + 1,
            "prompt_index": prompt,
            "policy_version": version,
            "policy_version_max": version,
            "tokens": tokens,
            "rollouts": 8,
            "last_step": -1,
            "reward_mean": 0.5,
            "reward_std": 0.5,
            "advantage_abs_mean": 0.5 + 0.1 * (prompt % 5),
            "arrival_s": self._now_s,
            "priority": 0.5,
            "longest_tokens": tokens // 8,
        }
        for name, column in self._columns.items():
            self._columns[name] = np.append(column, column.dtype.type(values.get(name, 0)))
        self._gone = np.append(self._gone, False)
        self._stored_at = np.append(self._stored_at, self._step)

    def _feedback(self) -> dict[str, Any]:
        """Make the feedback of a trainer: a loss, and a priority for each group of the batch."""
        prompts = self._columns["prompt_index"][self._batch].tolist()
        return {
            "loss": 1 / (1 + self._step),
            "priorities": {f"p{prompt}": (prompt % 5) / (1 + self._step) for prompt in prompts},
        }

    def _live(self) -> npt.NDArray[np.bool_]:
        live = ~self._gone
        if self._max_uses is not None:
            live &= self._columns["times_sampled"] < self._max_uses
        return live

    def _groups(self, which: npt.NDArray[np.bool_]) -> Groups:
        return Groups(**{name: column[which] for name, column in self._columns.items()})

    def _view(self) -> BufferView:
        live = self._live()
        uses = self._columns["times_sampled"]
        out = sorted(prompt for _, prompt, _ in self._coming if prompt != _TRAINED)
        return BufferView(
            step=self._next_step,
            version=self._next_step,
            published_version=self._step,
            steps_per_publish=1,
            groups_live=int(live.sum()),
            tokens_live=int(self._columns["tokens"][live].sum()),
            tickets_out=len(out),
            awaited=tuple(out[: self._budget.groups or 1]),
            budget=self._budget,
            groups_stored=len(uses),
            groups_used=int(uses.sum()),
            groups_fresh=int((uses[live] == 0).sum()),
            uses_live=int(uses[live].sum()),
            steps_done=self._step,
            sources_live=tuple(
                int(np.count_nonzero(live & (self._columns["source"] == code))) for code in self._sources
            ),
        )

    def _evict(self) -> None:
        if self._max_staleness is not None:
            self._gone |= self._next_step - self._columns["policy_version"] > self._max_staleness
        evictions = self._strategy.evict(self._groups(self._live()), self._view())
        self._gone[np.array(evictions.rows, np.int64) - 1] = True

    def _assemble(self) -> bool:
        """Make the batch of the next step and start its training; return whether there is one."""
        staleness = self._step - self._columns["policy_version"]
        usable = self._live() & (staleness >= 0)
        if self._max_staleness is not None:
            usable &= staleness <= self._max_staleness
        view = self._view()
        rng = np.random.default_rng([self._seed, self._step])
        chosen = self._strategy.select(self._groups(usable), view, view.budget, rng)
        if isinstance(chosen, Waiting):
            return False
        at = np.asarray(chosen.rows) - 1
        self._columns["times_sampled"][at] += 1
        self._columns["last_step"][at] = self._step
        self._staleness += staleness[at].tolist()
        self._batch = at
        heapq.heappush(self._coming, (self._now_s + STEP_S, _TRAINED, self._step))
        return True
