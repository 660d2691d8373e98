"""Rewards of a run: environments by name, with weights.

MODULE:NAME names an environment that is not packaged. A function will do: it takes a `Prompt` and the completion's
text, and returns a `Score` or a number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from replaybuf.errors import Invalid
from replaybuf.generator.environments.contract import Environment, MultiTurnEnvironment, Score, takes_turns
from replaybuf.generator.prompts import Prompt
from replaybuf.generator.prompts.prompt import invalid_row
from replaybuf.generator.prompts.tasksets import TASKSET
from replaybuf.plugins import entry_points as plugins

_WEIGHT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?")


@dataclasses.dataclass(frozen=True, slots=True)
class Reward:
    """An environment, its name in the parts of a score, and its weight in the sum of several."""

    name: str
    environment: Environment
    weight: float = 1.0


class FunctionReward:
    """The environment of a function or a coroutine function."""

    def __init__(self, function: Callable[[Prompt, str], Score | float | Awaitable[Score | float]]) -> None:
        self.score = function

    def check(self, prompt: Prompt) -> None:
        """Accept any prompt."""


class ExactMatch:
    """Compares the completion with the prompt's `answer`, both without white space around them: 1 or 0."""

    def check(self, prompt: Prompt) -> None:
        """Raise `Invalid` for a prompt without an answer."""
        if prompt.answer is None:
            raise Invalid("has no answer; exact-match needs one", name="answer")

    def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Compare with the answer."""
        return Score(float(completion_text.strip() == (prompt.answer or "").strip()))


def load_environment(name: str) -> Environment:
    """Build the environment NAME or MODULE:NAME. Raises `Invalid`, which lists the installed ones; `MissingExtra`."""
    if name.startswith(TASKSET):
        detail = f"environment is {name!r}; use --prompts {name} --environment verifiers"
        raise Invalid(detail, name="environment", value=name)
    if plugins.is_object_path(name):
        return _environment_of(plugins.load_object(name), name)
    environment: Environment = plugins.load(plugins.ENVIRONMENTS, name)()
    return environment


def load_rewards(text: str) -> list[Reward]:
    """Build the rewards of `--environment`: NAME[:WEIGHT] or MODULE:NAME[:WEIGHT], separated by commas.

    Raises `Invalid` naming the faulty one; `MissingExtra`.
    """
    rewards = []
    for item in text.split(","):
        path, _, last = item.strip().rpartition(":")
        weighted = bool(path) and _WEIGHT.fullmatch(last) is not None
        path = path if weighted else item.strip()
        rewards.append(Reward(path.rpartition(":")[2], load_environment(path), float(last) if weighted else 1.0))
    if len({reward.name for reward in rewards}) < len(rewards):
        raise Invalid(f"environment {text!r} names a reward twice", name="environment", value=text)
    if not any(reward.weight for reward in rewards):
        detail = f"all weights of environment {text!r} are 0; at least one must differ from 0"
        raise Invalid(detail, name="environment", value=text)
    return rewards


def rewards_of(environment: Environment | Sequence[Reward]) -> Sequence[Reward]:
    """Return rewards as they are, and one environment as the only reward."""
    return environment if isinstance(environment, Sequence) else [Reward("", environment)]


def multi_turn(rewards: Sequence[Reward]) -> MultiTurnEnvironment | None:
    """Return the environment if it plays turns and is the only reward, without a weight; else None."""
    (first, *others) = rewards
    environment: Any = first.environment
    return environment if takes_turns(environment) and not others and first.weight == 1.0 else None


def check_prompts(environment: Environment | Sequence[Reward], prompts: Iterable[Prompt]) -> None:
    """Check every prompt. Raises `Invalid` naming the first row that an environment cannot score."""
    rewards = rewards_of(environment)
    for prompt in prompts:
        try:
            for reward in rewards:
                reward.environment.check(prompt)
        except Invalid as error:
            raise invalid_row(prompt.where, str(error)) from None


def _environment_of(plugin: Any, path: str) -> Environment:
    """Return the environment of an object of the user: a class, an object with `score` or `start`, or a function."""
    with plugins.reported(path):
        instance = plugin() if isinstance(plugin, type) else plugin
    method = next((method for method in ("score", "start") if hasattr(instance, method)), None)
    if method is None and callable(instance):
        return FunctionReward(instance)
    if method is None:
        what = f"{path!r} is of type {type(instance).__name__}; it must be a function or a class"
    elif not hasattr(instance, "check"):
        what = f"{path!r} has {method} but no check(prompt)"
    else:
        environment: Environment = instance
        return environment
    raise Invalid(what, name="environment", value=path)
