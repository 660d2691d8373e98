"""The environment that scores tasks of reasoning-gym."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from replaybuf.errors import Invalid
from replaybuf.generator.environments.contract import Score
from replaybuf.generator.prompts import Prompt
from replaybuf.generator.prompts.gym_tasks import METADATA_KEY, open_dataset, open_library


class ReasoningGym:
    """Scores with `score_answer` of a reasoning-gym dataset, from 0 to 1.

    The metadata of a prompt name it: `{"reasoning_gym": {"dataset": NAME, "entry": {...}, "config": {...}}}`.
    `entry` is optional for datasets that compare with `answer` only. `config` holds the dataset's options that affect
    scoring. `"partial_credit": false` turns every score below 1 into 0.
    """

    def __init__(self) -> None:
        """Raise `MissingExtra` if reasoning-gym is not installed."""
        open_library()
        self._scorers: dict[str, Callable[[str, dict[str, Any]], float]] = {}
        self._lock = threading.Lock()

    def check(self, prompt: Prompt) -> None:
        """Raise `Invalid` for an unknown dataset, or without entry and answer."""
        task = _task(prompt)
        if not isinstance(task.get("dataset"), str):
            raise Invalid(f"metadata.{METADATA_KEY}.dataset is missing; reasoning-gym needs it", name="metadata")
        if "entry" not in task and prompt.answer is None:
            detail = f"has neither answer nor metadata.{METADATA_KEY}.entry; reasoning-gym needs one of them"
            raise Invalid(detail, name="answer")
        self._scorer(task)

    def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Score with the dataset of the prompt."""
        task = _task(prompt)
        entry = task.get("entry") or {"question": prompt.text, "answer": prompt.answer, "metadata": prompt.metadata}
        score = float(self._scorer(task)(completion_text, entry))
        return Score(score if task.get("partial_credit", True) else float(score >= 1.0))

    def _scorer(self, task: dict[str, Any]) -> Callable[[str, dict[str, Any]], float]:
        name, config = task["dataset"], task.get("config") or {}
        key = f"{name} {sorted(config.items())!r}"
        with self._lock:
            if key not in self._scorers:
                self._scorers[key] = open_dataset(name, config).score_answer
            return self._scorers[key]


def _task(prompt: Prompt) -> dict[str, Any]:
    task = prompt.metadata.get(METADATA_KEY)
    return task if isinstance(task, dict) else {}
