"""Environments of several turns for tests, imported by MODULE:NAME."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from replaybuf.generator.environments import Score, Turn
from replaybuf.generator.prompts import Prompt

Answers = Callable[[int, Turn], Awaitable[str | Sequence[int] | None]]


class Scripted:
    """Tool environment that answers turn k with `answers(k, turn)` and records turns and closings."""

    def __init__(self, answers: Answers, score: float | Score | Exception = 1.0) -> None:
        self.answers = answers
        self.reward = score
        self.turns: list[list[Turn]] = []
        self.closed = 0
        self.close_raises: BaseException | None = None

    def check(self, prompt: Prompt) -> None:
        """Accept any prompt."""

    def start(self, prompt: Prompt) -> ScriptedEpisode:
        """Begin."""
        self.turns.append([])
        return ScriptedEpisode(self, self.turns[-1])


class ScriptedEpisode:
    """One rollout in it."""

    def __init__(self, environment: Scripted, turns: list[Turn]) -> None:
        self._environment = environment
        self._turns = turns

    async def step(self, turn: Turn) -> Any:
        """Answer by script."""
        self._turns.append(turn)
        await asyncio.sleep(0)
        return await self._environment.answers(len(self._turns) - 1, turn)

    async def score(self) -> Any:
        """Score, or raise."""
        if isinstance(self._environment.reward, Exception):
            raise self._environment.reward
        return self._environment.reward

    async def close(self) -> None:
        """Count."""
        self._environment.closed += 1
        if self._environment.close_raises is not None:
            raise self._environment.close_raises


class Echo(Scripted):
    """Answers the first turn with its text and a space, and ends after the second; the score is the number of turns."""

    def __init__(self) -> None:
        async def answers(number: int, turn: Turn) -> str | None:
            return f" {turn.text}" if number == 0 else None

        super().__init__(answers, Score(0.5, {"half": 0.25}))
