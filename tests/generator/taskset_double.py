"""A process that answers as one with verifiers does, for the tasksets of `tests/generator/tasksets`, without verifiers.

Run in place of the interpreter that has verifiers. What of a taskset cannot be played is `tools`, which has some.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from replaybuf.generator.taskset_worker import Scored, TaskRow, Unfit, run, thought_and_said

GIVEN_UP: list[str] = []
"""Of every reward that was cancelled."""


class Words:
    """The tasksets, as far as tests tell."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        if name not in ("backwards", "endless_words", "tools") or options.keys() - {"words"}:
            raise Unfit(f"taskset {name!r} does not load: {sorted(options)}")
        self._name = name
        self.infinite = name == "endless_words"
        self._words = options.get("words", ["cab", "fed"])

    def unscorable(self) -> str | None:
        """Refuse the one with tools."""
        return "has tools" if self._name == "tools" else None

    def rows(self, first: int, count: int) -> list[TaskRow]:
        """Make tasks."""
        if self.infinite:
            return [_row(f"a{number + 1}", "a" * (number + 1)) for number in range(first, first + count)]
        return [_row(f"hash-of-{word}", word) for word in self._words[first : first + count]]

    async def score(self, data: dict[str, Any], reply: str, number: int) -> Scored:
        """Do what the reply asks for, as `tests/generator/tasksets/backwards.py`."""
        thought, said = thought_and_said(reply)
        correct = float(said == data["answer"])
        match said.split():
            case ["raise"]:
                raise ValueError("no parse")
            case ["nan"]:
                correct = float("nan")
            case ["wait", sign]:
                try:
                    Path(sign).touch()
                    await asyncio.Event().wait()
                finally:
                    GIVEN_UP.append(said)
            case ["given", "up"]:
                correct = float(len(GIVEN_UP))
            case ["block", sign]:
                Path(sign).touch()
                time.sleep(3600)  # noqa: ASYNC251 - as a reward must not
            case ["exit"]:
                os._exit(3)
            case ["pid"]:
                correct = float(os.getpid())
        metrics = {"said": float(len(said)), "thought": float(len(thought or ""))}
        return Scored(number=number, reward=2 * correct + 1, rewards={"correct": correct, "kept": 1.0}, metrics=metrics)


def _row(task_id: str, word: str) -> TaskRow:
    messages = [{"role": "system", "content": "say>"}, {"role": "user", "content": word}]
    answer = word[::-1]
    return TaskRow(
        task_id=task_id,
        messages=messages,
        answer=answer,
        task={"prompt": word, "answer": answer},
        needs=[],
    )


if __name__ == "__main__":
    run(lambda: "double", Words)
