"""Random buffers for the contract suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from replaybuf.errors import StrategyFault
from replaybuf.kernel.strategy.contract import Budget, BufferView, Flow, Groups, source_hash

_LARGEST_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Scene:
    """The arguments of one decision: groups within the strategy's bounds, the view, the rates."""

    seed: int
    huge: bool
    view: BufferView
    flow: Flow
    columns: dict[str, npt.NDArray[Any]] = dataclasses.field(repr=False)

    def groups(self) -> Groups:
        """Return the groups as new, read-only columns."""
        columns = {name: column.copy() for name, column in self.columns.items()}
        for column in columns.values():
            column.flags.writeable = False
        return Groups(**columns)

    def rng(self) -> np.random.Generator:
        """Return the generator of this decision in its first state."""
        return np.random.default_rng(self.seed)


def random_groups(
    count: int, rng: np.random.Generator, *, version: int = 10, step: int = 10, huge: bool = False
) -> dict[str, npt.NDArray[Any]]:
    """Draw the columns of `count` groups, some used before; `huge`: with numbers as large as the columns can hold."""
    most = _LARGEST_INT32 if huge else 200
    used = np.where(rng.random(count) < 0.5, 0, rng.integers(0, 4, count)) if step else np.zeros(count)
    tokens = rng.integers(2, most, count)
    rollouts = rng.integers(1, 9, count)
    scale = np.float32(3e38 if huge else 1.0)
    named = np.array([0, source_hash("a"), source_hash("b"), source_hash("c")])
    columns: dict[str, npt.NDArray[Any]] = {
        "row": np.cumsum(rng.integers(1, 2**40 if huge else 3, count)),
        "prompt_index": rng.integers(-1, 2**53 if huge else 12, count),
        "adapter": np.zeros(count, np.int32),
        "policy_version": np.full(count, version),
        "policy_version_max": np.full(count, version),
        "tokens": tokens,
        "rollouts": rollouts,
        "times_sampled": used,
        "last_step": np.where(used > 0, step - 1 - rng.integers(0, max(1, min(step, 8)), count), -1),
        "reward_mean": (rng.random(count) - 0.5) * scale,
        "reward_std": rng.choice([0.0, 0.1, 1.0], count) * scale * (rollouts > 1),
        "advantage_abs_mean": rng.choice([0.0, 1e-3, 0.5, 1.0], count) * scale,
        "arrival_s": np.cumsum(rng.random(count)),
        "priority": rng.choice([0.0, 1e-3, 0.5, 1.0], count) * scale,
        "source": rng.choice(named, count),
        "longest_tokens": np.maximum(1, tokens // rollouts),
        "truncated": rng.integers(0, rollouts + 1),
    }
    types = Groups.DTYPES
    return {name: column.astype(types[name]) for name, column in columns.items()}


def _awaited(seed: int, out: int, budget: Budget, stored: npt.NDArray[np.int64]) -> tuple[int, tuple[int, ...]]:
    """Draw how many prompts are due again, and the lowest indexes without a group; other draws stay as they are."""
    rng = np.random.default_rng([seed, 1])
    due = int(rng.integers(0, 3))
    free = np.setdiff1d(np.arange(40), stored)
    return due, tuple(sorted(rng.choice(free, min(out + due, len(free)), replace=False).tolist())[: budget.groups or 1])


def _scene(
    max_staleness: int | None,
    max_uses: int | None,
    sources: Sequence[int],
    seed: int,
    count: int,
    huge: bool,
    budget: Budget,
) -> Scene:
    """Draw a buffer from few numbers, so that Hypothesis can shrink it."""
    rng = np.random.default_rng(seed)
    version = _LARGEST_INT32 - 100 if huge else int(rng.integers(0, 20))
    columns = random_groups(count, rng, version=version, step=version, huge=huge)
    oldest = min(version, 30 if max_staleness is None else max_staleness)
    columns["policy_version"] -= rng.integers(0, oldest + 1, count).astype(np.int32)
    if max_uses is not None:
        columns["times_sampled"] = np.minimum(columns["times_sampled"], np.int32(min(max_uses, _LARGEST_INT32) - 1))
        columns["last_step"] = np.where(columns["times_sampled"] > 0, columns["last_step"], np.int32(-1))
    uses, tokens = int(columns["times_sampled"].sum()), int(columns["tokens"].sum(dtype=np.int64))
    published = version - int(rng.integers(0, 2)) if version else 0
    tickets_out = int(rng.integers(0, 10))
    due, awaited = _awaited(seed, tickets_out, budget, columns["prompt_index"])
    view = BufferView(
        step=version,
        version=version,
        published_version=published,
        steps_per_publish=1,
        groups_live=count,
        tokens_live=tokens,
        tickets_out=tickets_out,
        budget=budget,
        batches=tuple(rng.integers(1, 9, 3).tolist()),
        groups_stored=count + int(rng.integers(0, 100)),
        groups_used=uses + int(rng.integers(0, 200)),
        groups_fresh=int((columns["times_sampled"] == 0).sum()),
        uses_live=uses,
        steps_done=version,
        tickets_due=due,
        awaited=awaited,
        overdue=seed % 4 == 0,
        sources_live=tuple(int(np.count_nonzero(columns["source"] == code)) for code in sources),
    )
    flow = Flow(
        now_s=1e9,
        tokens_per_group=tokens / count if count else 100.0,
        groups_per_s=1.0,
        steps_per_s=0.1,
        step_s=10.0 * int(rng.integers(0, 2)),
        group_s=float(rng.choice([0.0, 1.0, 10.0, 1000.0])),
        waited=float(rng.choice([0.0, 0.5, 1.0])),
        too_stale=float(rng.choice([0.0, 0.5, 2.0])),
    )
    return Scene(seed, huge, view, flow, columns)


def scenes(max_staleness: int | None, max_uses: int | None, sources: Sequence[int] = ()) -> st.SearchStrategy[Scene]:
    """Return the buffers that a strategy with these bounds may see; `sources`: those whose groups it wants counted."""
    budgets = st.builds(
        Budget, tokens=st.none() | st.integers(2, 4000), groups=st.none() | st.integers(1, 24), seq_len=st.just(4096)
    ).filter(lambda budget: budget.tokens is not None or budget.groups is not None)
    return st.builds(
        _scene,
        st.just(max_staleness),
        st.just(max_uses),
        st.just(sources),
        seed=st.integers(0, 2**32 - 1),
        count=st.integers(0, 40),
        huge=st.booleans(),
        budget=budgets,
    )


def require(kept: object, rule: str, value: object) -> None:
    """Raise `StrategyFault` unless a rule is kept."""
    if not kept:
        raise StrategyFault(f"rule '{rule}' is broken: {value!r}", name=rule, value=value, bound=rule)
