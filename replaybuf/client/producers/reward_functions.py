"""Call reward functions that have the signature of TRL."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from replaybuf.errors import RewardFault, counted


class Scored(msgspec.Struct, frozen=True):
    """The reward of one completion, and what each function gave."""

    reward: float
    rewards: dict[str, float]


def call_rewards(
    functions: Sequence[Callable[..., Any]],
    *,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    weights: Sequence[float] | None = None,
    **columns: Sequence[Any],
) -> list[Scored]:
    """Score completions as TRL's trainers do: `function(prompts=, completions=, completion_ids=, **columns)`.

    Each function returns one number per completion; None = it does not apply, and counts as 0. The reward is the sum
    by `weights`, 1 each by default. `columns`: those of the data set, one value per completion. Functions may be
    coroutine functions. They get no trainer: `trainer_state` is None, `log_extra` and `log_metric` do nothing. Raises
    `RewardFault`, and what a function raises. Do not call it in an event loop; use `asyncio.to_thread` there.
    """
    factors = [1.0] * len(functions) if weights is None else list(weights)
    if len(factors) != len(functions):
        raise _fault("weights", counted(len(factors), "weight"), f"one per function, {len(functions)}")
    fixed = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
    arguments = {"prompts": list(prompts), "completions": list(completions), "completion_ids": list(completion_ids)}
    passed = {**columns, **fixed, **arguments}
    parts = {}
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        parts[name] = _values(name, function(**passed), len(completions))
    if len(parts) != len(functions):
        raise _fault("functions", "two functions of one name", "different names")
    scored = []
    for number in range(len(completions)):
        own = {name: values[number] for name, values in parts.items()}
        if all(value is None for value in own.values()):
            raise _fault(f"completions[{number}]", "None from every function", "a number from at least one")
        rewards = {name: 0.0 if value is None else value for name, value in own.items()}
        reward = math.fsum(factor * value for factor, value in zip(factors, rewards.values(), strict=True))
        scored.append(Scored(reward, rewards))
    return scored


def _values(name: str, result: Any, needed: int) -> list[float | None]:
    values = asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    numbers = [None if value is None else float(value) for value in values]
    if len(numbers) != needed:
        raise _fault(name, counted(len(numbers), "reward"), f"one per completion, {needed}")
    for number, value in enumerate(numbers):
        if value is not None and not math.isfinite(value):
            raise _fault(name, f"{value} for completions[{number}]", "a finite number or None")
    return numbers


async def _awaited(result: Any) -> Any:
    return await result


def _ignore(*_: Any, **__: Any) -> None:
    """Log nothing: there is no trainer."""


def _fault(name: str, value: str, bound: str) -> RewardFault:
    return RewardFault("reward_raised", f"{name}: {value}; needed: {bound}", name=name, value=value, bound=bound)
