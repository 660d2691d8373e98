"""Environments: what a completion is worth. Found by entry point in the group `replaybuf.environments`.

An environment is a class built without arguments. `score` may be called from several threads at once, or is a coroutine
function, of which many run in one thread; it runs under a time bound (`Scorer`), and whatever it
raises costs that group alone. MODULE:NAME names one without packaging, and a function will do: it takes a `Prompt` and
the completion's text. A score is a `Score`, or a number where it is nothing but the reward.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Protocol

from replaybuf.errors import Invalid, MissingExtra
from replaybuf.generator.prompts.prompt import Prompt, refused
from replaybuf.kernel import plugins

EXTRA = "demo"
METADATA_KEY = "reasoning_gym"
TASKSET = "verifiers:"
"""What `--prompts` names a taskset of verifiers by."""
_WEIGHT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?")


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Reward of one completion, and what it is made of by name; the same names for every completion of a group.

    `process_rewards`, for the estimator `process`: rewards of stretches of the completion, each with where it ends: one
    past its last character in the completion's text, or in an episode the number of the turn, from 1.
    """

    reward: float
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    process_rewards: tuple[tuple[int, float], ...] = ()


class Environment(Protocol):
    """Scores completions."""

    def check(self, prompt: Prompt) -> None:
        """Raise `Invalid` where `prompt` lacks what scoring it needs. Called once per prompt, at start."""

    def score(self, prompt: Prompt, completion_text: str) -> Score | float:
        """Score one completion, decoded without special tokens."""


class AsyncEnvironment(Protocol):
    """Scores completions by coroutines, for rewards that wait for others: a judge model, a sandbox."""

    def check(self, prompt: Prompt) -> None:
        """Raise `Invalid` where `prompt` lacks what scoring it needs. Called once per prompt, at start."""

    async def score(self, prompt: Prompt, completion_text: str) -> Score | float:
        """Score one completion, decoded without special tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """What the policy sampled in one turn: `token_ids` as they came, `text` the same without special tokens."""

    text: str
    token_ids: list[int]


class Episode(Protocol):
    """One rollout of several turns.

    Where it has them, coroutine functions are called: `cut_off(turn)`, with a turn that was cut off at the token bound,
    in place of `step`; `close()` last, come what may.
    """

    async def step(self, turn: Turn) -> str | Sequence[int] | None:
        """Answer a turn: with what the policy reads next, as text (markers of roles included) or token ids; None ends.

        Not called for a turn that was cut off at the token bound.
        """

    async def score(self) -> Score | float:
        """Score the rollout, once, after its last turn."""


class MultiTurnEnvironment(Protocol):
    """Answers turns and scores what comes of them; played by `replaybuf.generator.environments.episodes`."""

    def check(self, prompt: Prompt) -> None:
        """Raise `Invalid` where `prompt` lacks what is needed. Called once per prompt, at start."""

    def start(self, prompt: Prompt) -> Episode:
        """Begin the episode of one rollout."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reward:
    """An environment under its name in the parts of a score, and the weight of its reward in the sum of several."""

    name: str
    environment: Environment | AsyncEnvironment
    weight: float = 1.0


class FunctionReward:
    """The environment that a function makes."""

    def __init__(self, function: Callable[[Prompt, str], Score | float]) -> None:
        self._function = function

    def check(self, prompt: Prompt) -> None:
        """Take any prompt."""

    def score(self, prompt: Prompt, completion_text: str) -> Score | float:
        """Ask the function."""
        return self._function(prompt, completion_text)


class AsyncFunctionReward:
    """The environment that a coroutine function makes."""

    def __init__(self, function: Callable[[Prompt, str], Awaitable[Score | float]]) -> None:
        self._function = function

    def check(self, prompt: Prompt) -> None:
        """Take any prompt."""

    async def score(self, prompt: Prompt, completion_text: str) -> Score | float:
        """Ask the function."""
        return await self._function(prompt, completion_text)


class ExactMatch:
    """1 where the completion, stripped of white space around it, is the prompt's `answer`, else 0."""

    def check(self, prompt: Prompt) -> None:
        """Raise `Invalid` for a prompt without an answer."""
        if prompt.answer is None:
            raise Invalid("has no answer; exact-match needs one", name="answer")

    def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Compare with the answer."""
        return Score(float(completion_text.strip() == (prompt.answer or "").strip()))


class ReasoningGym:
    """Scores by the `score_answer` of a reasoning-gym dataset, 0 to 1, with partial credit where the dataset gives it.

    A prompt says which in its metadata: `{"reasoning_gym": {"dataset": NAME, "entry": {...}, "config": {...}}}`, where
    `entry` is the dataset's own and may be left out for datasets that compare with `answer` alone, and `config` holds
    the dataset's options where scoring depends on them. `"partial_credit": false` beside them makes every score but a
    full one 0.
    """

    def __init__(self) -> None:
        """Raises `MissingExtra` where reasoning-gym is not installed."""
        self._library = reasoning_gym()
        self._scorers: dict[str, Callable[[str, dict[str, Any]], float]] = {}
        self._lock = threading.Lock()

    def check(self, prompt: Prompt) -> None:
        """Raise `Invalid` for a prompt that names no known dataset, or has neither entry nor answer."""
        task = _task(prompt)
        if not isinstance(task.get("dataset"), str):
            raise Invalid(f"metadata.{METADATA_KEY}.dataset is missing; reasoning-gym needs it", name="metadata")
        if "entry" not in task and prompt.answer is None:
            raise Invalid(
                f"has neither answer nor metadata.{METADATA_KEY}.entry; reasoning-gym needs one", name="answer"
            )
        self._scorer(task)

    def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Ask the dataset what the completion is worth."""
        task = _task(prompt)
        entry = task.get("entry") or {"question": prompt.text, "answer": prompt.answer, "metadata": prompt.metadata}
        score = float(self._scorer(task)(completion_text, entry))
        return Score(score if task.get("partial_credit", True) else float(score >= 1.0))

    def _scorer(self, task: dict[str, Any]) -> Callable[[str, dict[str, Any]], float]:
        name, config = task["dataset"], task.get("config") or {}
        key = f"{name} {sorted(config.items())!r}"
        with self._lock:
            if key not in self._scorers:
                try:
                    dataset = self._library.create_dataset(name, **config)
                except Exception as error:  # the library raises what its configuration classes raise, asserts too
                    raise Invalid(f"reasoning-gym dataset {name!r} cannot be made: {error}", name="dataset") from error
                self._scorers[key] = dataset.score_answer
            return self._scorers[key]


def load_environment(name: str) -> Environment:
    """Build the environment registered as `name`. Raises `Invalid` naming the installed ones, `MissingExtra`."""
    if name.startswith(TASKSET):
        raise Invalid(
            f"environment is {name!r}; prompts name the taskset: --prompts {name} --environment verifiers",
            name="environment",
            value=name,
        )
    if plugins.is_object_path(name):
        return _environment_of(plugins.load_object(name), name)
    environment: Environment = plugins.load(plugins.ENVIRONMENTS, name)()
    return environment


def load_rewards(text: str) -> list[Reward]:
    """Build what `--environment` names: NAME or MODULE:NAME, several with commas, each with :WEIGHT where it is not 1.

    Raises `Invalid` naming the one that is none; `MissingExtra`.
    """
    rewards = []
    for item in text.split(","):
        spec, colon, last = item.strip().rpartition(":")
        weighted = bool(colon) and _WEIGHT.fullmatch(last) is not None
        path = spec if weighted else item.strip()
        name = path.rpartition(":")[2]
        rewards.append(Reward(name, load_environment(path), float(last) if weighted else 1.0))
    names = [reward.name for reward in rewards]
    if len(set(names)) < len(names):
        raise Invalid(f"environment {text!r} names a reward twice", name="environment", value=text)
    if not any(reward.weight for reward in rewards):
        raise Invalid(f"environment {text!r} has no weight but 0", name="environment", value=text)
    return rewards


def multi_turn(rewards: Sequence[Reward]) -> MultiTurnEnvironment | None:
    """Return the environment that plays turns, which stands alone and without a weight; None where there is none."""
    (first, *others) = rewards
    plays: Any = first.environment
    return plays if takes_turns(plays) and not others and first.weight == 1.0 else None


def takes_turns(environment: Any) -> bool:
    """Say whether an environment plays turns; one that can do both tells by `takes_turns`, once prompts are checked."""
    told: bool | None = getattr(environment, "takes_turns", None)
    return hasattr(environment, "start") if told is None else told


def check_prompts(environment: Environment | Sequence[Reward], prompts: Iterable[Prompt]) -> None:
    """Check every prompt. Raises `Invalid` naming the row of the first that lacks what an environment needs."""
    rewards = environment if isinstance(environment, Sequence) else [Reward("", environment)]
    for prompt in prompts:
        try:
            for reward in rewards:
                reward.environment.check(prompt)
        except Invalid as error:
            raise refused(prompt.where, str(error)) from None


def _environment_of(found: Any, path: str) -> Environment:
    """Make an environment of what a user's module holds: a class, an object with `score`, or a function."""
    with plugins.reported(path):
        made = found() if isinstance(found, type) else found
    for method in ("score", "start"):
        if not hasattr(made, method):
            continue
        if not hasattr(made, "check"):
            raise Invalid(f"{path!r} has {method} and no check(prompt)", name="environment", value=path)
        environment: Environment = made
        return environment
    if not callable(made):
        raise Invalid(
            f"{path!r} is {type(made).__name__}; needed: a function or a class", name="environment", value=path
        )
    # A coroutine function makes an `AsyncEnvironment`; whoever scores looks which of the two it has.
    return AsyncFunctionReward(made) if inspect.iscoroutinefunction(made) else FunctionReward(made)  # type: ignore[return-value]


def score_of(made: Any) -> Score:
    """Make a `Score` of what a reward returns: one, or a number."""
    return made if isinstance(made, Score) else Score(float(made))


def _task(prompt: Prompt) -> dict[str, Any]:
    task = prompt.metadata.get(METADATA_KEY)
    return task if isinstance(task, dict) else {}


def reasoning_gym() -> ModuleType:
    """Import the library. Raises `MissingExtra`."""
    try:
        import reasoning_gym
    except ImportError:
        raise MissingExtra("the environment reasoning-gym", EXTRA) from None
    module: ModuleType = reasoning_gym
    return module
