"""Tasks of reasoning-gym: rows of prompts, and the environment that scores them."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from typing import Any

from replaybuf.errors import Invalid, MissingExtra
from replaybuf.generator.environments.contract import Score
from replaybuf.generator.prompts import Prompt

EXTRA = "demo"
METADATA_KEY = "reasoning_gym"
_BLOCK = 1000


class ReasoningGym:
    """Scores with `score_answer` of a reasoning-gym dataset, from 0 to 1.

    The metadata of a prompt name it: `{"reasoning_gym": {"dataset": NAME, "entry": {...}, "config": {...}}}`.
    `entry` is optional for datasets that compare with `answer` only. `config` holds the dataset's options that affect
    scoring. `"partial_credit": false` turns every score below 1 into 0.
    """

    def __init__(self) -> None:
        """Raise `MissingExtra` if reasoning-gym is not installed."""
        _library()
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
                self._scorers[key] = _dataset(name, config).score_answer
            return self._scorers[key]


def gym_row(name: str, options: dict[str, Any], number: int) -> dict[str, Any]:
    """Generate one task of a dataset as the row of a prompt, with the metadata that `ReasoningGym` needs."""
    block, place = divmod(number, _BLOCK)
    entry = _block(name, json.dumps(options, sort_keys=True), block)[place]
    config = {option: value for option, value in options.items() if option not in ("seed", "size")}
    task = {"dataset": name, "entry": entry, "config": config}
    return {"prompt": entry["question"], "answer": entry["answer"], "metadata": {METADATA_KEY: task}}


@functools.lru_cache(maxsize=8)
def _block(name: str, options: str, block: int) -> Any:
    # In blocks, because some datasets generate all their tasks at once. Most derive task i from seed + i, so blocks
    # do not overlap.
    config = json.loads(options)
    seed = config.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool):
        detail = f"prompts reasoning-gym:{name}: seed is {seed!r}; it must be a whole number"
        raise Invalid(detail, name="seed", value=seed)
    return _dataset(name, config | {"size": _BLOCK, "seed": seed + block * _BLOCK})


def _dataset(name: str, config: dict[str, Any]) -> Any:
    library = _library()
    try:
        return library.create_dataset(name, **config)
    except Exception as error:  # its configuration classes raise anything, asserts too
        raise Invalid(f"cannot create reasoning-gym dataset {name!r}: {error}", name="dataset") from error


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise MissingExtra("the environment reasoning-gym", EXTRA) from None
    return reasoning_gym


def _task(prompt: Prompt) -> dict[str, Any]:
    task = prompt.metadata.get(METADATA_KEY)
    return task if isinstance(task, dict) else {}
