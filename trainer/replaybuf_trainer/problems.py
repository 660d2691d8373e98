"""The tasks of the warm start: problems of reasoning-gym that are short enough for the demo's model.

- `spell_backward`: the prompt is a word and `>`, the answer is the word backwards.
- `chain_sum`: the prompt is a sum or a difference of two numbers below 100 and `=`, the answer is the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from replaybuf.errors import Invalid, MissingExtra

HELD_OUT_PROBLEMS = 200
CHECK_PROBLEMS = 400
SCANNED_ENTRIES = 60_000


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One problem: prompt, right answer, and the entry with which reasoning-gym scores.

    Problems of the same `kin` give each other away, like a sum and the same sum with its terms exchanged.
    """

    prompt: str
    answer: str
    entry: dict[str, Any]
    kin: str


@dataclasses.dataclass(frozen=True, slots=True)
class Problems:
    """Disjoint sets of problems; no problem of `train` has kin in `check` or `held_out`."""

    train: list[Problem]
    check: list[Problem]
    held_out: list[Problem]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Options of a dataset of reasoning-gym, and what makes a problem of its entry, or None for an unusable one."""

    options: dict[str, int]
    problem: Callable[[Any], Problem | None]


def _spelling(entry: Any) -> Problem | None:
    word = entry["metadata"]["word"]
    if not (word.isascii() and word.isprintable()):
        return None
    lower, answer = word.lower(), word[::-1]
    scored = {"question": word, "answer": answer, "metadata": {"word": word}}
    return Problem(f"{word}>", answer, scored, min(lower, lower[::-1]))


def _sum(entry: Any) -> Problem:
    expression, answer = entry["metadata"]["expression"], entry["answer"]
    left, sign, right = expression.split()
    scored = {"question": expression, "answer": answer, "metadata": {"expression": expression}}
    return Problem(f"{left}{sign}{right}=", answer, scored, f"{sign} {' '.join(sorted((left, right)))}")


TASKS = {
    "spell_backward": Task({"min_word_len": 3, "max_word_len": 6}, _spelling),
    "chain_sum": Task({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, _sum),
}


def collect_problems(task: str, seed: int) -> Problems:
    """Draw the distinct problems of a task.

    Raises `Invalid` for an unknown task, and `MissingExtra` without reasoning-gym.
    """
    if task not in TASKS:
        detail = f"task is {task!r}; it must be one of: {', '.join(TASKS)}"
        raise Invalid(detail, name="task", value=task, bound=list(TASKS))
    try:
        import reasoning_gym
    except ImportError:
        raise MissingExtra("the warm start", "demo") from None
    dataset = reasoning_gym.create_dataset(task, size=SCANNED_ENTRIES, seed=0, **TASKS[task].options)
    distinct: dict[str, Problem] = {}
    for number in range(SCANNED_ENTRIES):
        problem = TASKS[task].problem(dataset[number])
        if problem is not None:
            distinct.setdefault(problem.prompt.lower(), problem)
    listed = list(distinct.values())
    problems = [listed[i] for i in np.random.default_rng(seed).permutation(len(listed))]
    held_out = problems[:HELD_OUT_PROBLEMS]
    others = _without_kin(problems[HELD_OUT_PROBLEMS:], held_out)
    check = others[:CHECK_PROBLEMS]
    return Problems(_without_kin(others[CHECK_PROBLEMS:], check), check, held_out)


def _without_kin(problems: list[Problem], kept_apart: list[Problem]) -> list[Problem]:
    kin = {problem.kin for problem in kept_apart}
    return [problem for problem in problems if problem.kin not in kin]
