"""Environments: what a completion is worth. Found by entry point in the group `replaybuf.environments`.

An environment is a class built without arguments. `score` may be called from several threads at once; it runs under a
time bound (`replaybuf.generator.scoring`), and whatever it raises costs that group alone.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Protocol

from replaybuf import plugins
from replaybuf.errors import Invalid, MissingExtra
from replaybuf.generator.prompts import Prompt

EXTRA = "demo"
METADATA_KEY = "reasoning_gym"


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Reward of one completion, and what it is made of by name; the same names for every completion of a group."""

    reward: float
    parts: dict[str, float] = dataclasses.field(default_factory=dict)


class Environment(Protocol):
    """Scores completions."""

    def check(self, prompt: Prompt) -> None:
        """Raise `Invalid` where `prompt` lacks what scoring it needs. Called once per prompt, at start."""

    def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Score one completion, decoded without special tokens."""


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
        self._library = _reasoning_gym()
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
    environment: Environment = plugins.load(plugins.ENVIRONMENTS, name)()
    return environment


def check_prompts(environment: Environment, prompts: Iterable[Prompt], file: object) -> None:
    """Check every prompt. Raises `Invalid` naming the line of the first that lacks what the environment needs."""
    for prompt in prompts:
        try:
            environment.check(prompt)
        except Invalid as error:
            raise Invalid(
                f"prompts file {file}, line {prompt.line}: {error}", name="prompts", value=prompt.line
            ) from None


def _task(prompt: Prompt) -> dict[str, Any]:
    task = prompt.metadata.get(METADATA_KEY)
    return task if isinstance(task, dict) else {}


def _reasoning_gym() -> ModuleType:
    try:
        import reasoning_gym
    except ImportError:
        raise MissingExtra("the environment reasoning-gym", EXTRA) from None
    module: ModuleType = reasoning_gym
    return module
