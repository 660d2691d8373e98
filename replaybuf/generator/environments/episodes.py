"""Rollouts of several turns: the policy samples a turn, the environment answers, and so on, all in token ids.

::

    prompt ─► turn 1 ─► answer 1 ─► turn 2 ─► ... ─► last turn
              mask 1    mask 0      mask 1

Turns and answers after the prompt are one completion. Nothing is ever decoded and encoded again, so that the tokens
trained on are those that were sampled; an answer alone may come as text. Every turn is a request of its own, so the
version may rise between turns; the tokens of an answer belong to the version of the turn before them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from replaybuf.errors import RewardFault
from replaybuf.generator.engines import Engine, Sample, Sampling
from replaybuf.generator.environments.contract import Episode, MultiTurnEnvironment, Score, Turn, score_of
from replaybuf.generator.environments.process_rewards import by_turn
from replaybuf.generator.environments.scoring import Scores, columns_of, episode_fault
from replaybuf.generator.fleet.publication import Piece, joined, pieces, remainder
from replaybuf.generator.prompts.prompt import Encoder, Prompt
from replaybuf.generator.threads import LoopThread, contained
from replaybuf.wire.group import Bools

logger = logging.getLogger(__name__)

T = TypeVar("T")

CheckUse: TypeAlias = Callable[[int], None]
_NextTurn: TypeAlias = Callable[[Piece], Awaitable[Piece]]

LENGTH = "length"
MAX_TURNS = "max_turns"


def _any_use(_: int) -> None:
    """Let any version pass."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Played:
    """One rollout: `mask` bool [T], True where the policy sampled; `turn_ends`: tokens to the end of each turn."""

    piece: Piece
    mask: Bools
    turn_ends: list[int]
    score: Score


class Episodes:
    """Plays the rollouts of a group side by side, each in an episode of its own.

    A rollout ends where the environment says so; where `max_turns` turns are taken (finish reason `max_turns`); where
    `max_tokens` of the sampling, turns and answers together, are there or an answer would leave no room for a turn
    (`length`). Code of the environment runs in an event loop in a thread of its own, each call for at most `timeout_s`.
    """

    def __init__(
        self, environment: MultiTurnEnvironment, tokenizer: Encoder, *, max_turns: int, timeout_s: float
    ) -> None:
        self._environment = environment
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._timeout_s = timeout_s
        self._loop = LoopThread()

    async def play(
        self, engine: Engine, prompt: Prompt, sampling: Sampling, check_use: CheckUse = _any_use
    ) -> tuple[Sample, Scores]:
        """Sample and score the `sampling.n` rollouts of one prompt.

        `check_use`: before every turn, raises `EngineFault` where the version that a rollout began with is of
        no use any more. Raises `RewardFault` for what the environment does, `EngineFault` as `engine.generate`.
        """

        async def next_turn(rollout: int, piece: Piece) -> Piece:
            check_use(int(piece.spans[0, 0]))
            so_far = np.concatenate([prompt.token_ids, piece.token_ids])
            (turn,) = pieces(await engine.generate(so_far, remainder(sampling, rollout, piece)))
            return turn

        first = await engine.generate(prompt.token_ids, sampling)
        try:
            async with asyncio.TaskGroup() as tasks:
                playing = [
                    tasks.create_task(
                        self._played(prompt, begun, functools.partial(next_turn, rollout), sampling.max_tokens)
                    )
                    for rollout, begun in enumerate(pieces(first))
                ]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        played = [task.result() for task in playing]
        turns = [len(one.turn_ends) for one in played]
        sample = joined([one.piece for one in played], first.metadata | {"turns": turns})
        mask = np.concatenate([one.mask for one in played])
        scores = columns_of(prompt, [one.score for one in played])
        if scores.process_rewards:
            scores = by_turn(prompt, scores, [one.turn_ends for one in played])
        return dataclasses.replace(sample, completion_mask=mask), scores

    async def _played(self, prompt: Prompt, begun: Piece, next_turn: _NextTurn, max_tokens: int) -> _Played:
        episode: Episode = await self._told(prompt, "environment", self._started(prompt))
        try:
            piece, mask, turn_ends = await self._turns(prompt, begun, next_turn, max_tokens, episode)
            score = await self._told(prompt, "reward", _scored(episode))
        finally:
            closing = self._loop.start(_closed(episode, prompt, self._timeout_s))
        # Not waited for where the rollout failed or the generator ends: nothing depends on it then.
        await asyncio.wrap_future(closing)
        return _Played(piece, mask, turn_ends, score)

    async def _turns(
        self, prompt: Prompt, piece: Piece, next_turn: _NextTurn, max_tokens: int, episode: Episode
    ) -> tuple[Piece, Bools, list[int]]:
        mask, turn_ends, turn = np.ones(len(piece), np.bool_), [len(piece)], piece
        while turn.finish_reason != LENGTH:
            reply = await self._told(prompt, "environment", episode.step(self._turn(turn)))
            if reply is None:
                break
            answer = self._answer(prompt, reply, int(piece.spans[-1, 0]))
            if len(turn_ends) == self._max_turns:
                return dataclasses.replace(piece, finish_reason=MAX_TURNS), mask, turn_ends
            if len(piece) + len(answer) >= max_tokens:
                return dataclasses.replace(piece, finish_reason=LENGTH), mask, turn_ends
            piece = piece.followed_by(answer)
            turn = await next_turn(piece)
            piece = piece.followed_by(turn)
            turn_ends.append(len(piece))
            mask = np.concatenate([mask, np.zeros(len(answer), np.bool_), np.ones(len(turn), np.bool_)])
        if turn.finish_reason == LENGTH and hasattr(episode, "cut_off"):
            await self._told(prompt, "environment", episode.cut_off(self._turn(turn)))
        return piece, mask, turn_ends

    def _turn(self, piece: Piece) -> Turn:
        ids = piece.token_ids.tolist()
        return Turn(self._tokenizer.decode([ids])[0], ids)

    def _answer(self, prompt: Prompt, reply: str | Sequence[int], version: int) -> Piece:
        ids = self._tokenizer.encode(reply, add_special_tokens=False) if isinstance(reply, str) else list(reply)
        known = self._tokenizer.vocab_size
        if not ids or not all(isinstance(token, int) and 0 <= token < known for token in ids):
            needed = f"None, a text or ids below {known}, not empty"
            raise episode_fault(
                "environment", "bad_answer", prompt, f"answered a turn with {reply!r}; needed: {needed}"
            )
        spans = np.array([(version, 0, len(ids))], np.int32)
        return Piece(np.array(ids, np.int32), np.zeros(len(ids), np.float32), spans, None)

    # ------------------------------------------------------------------ code of the environment

    async def _started(self, prompt: Prompt) -> Episode:
        return self._environment.start(prompt)

    async def _told(self, prompt: Prompt, what: str, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the environment. Raises `RewardFault` (`<what>_raised`, `<what>_timeout`)."""
        promise = self._loop.start(work)
        try:
            async with asyncio.timeout(self._timeout_s) as bound:
                return await asyncio.wrap_future(promise)
        except RewardFault:
            raise
        except Exception as error:  # whatever an environment raises is its author's to read
            if bound.expired():
                raise episode_fault(what, "timeout", prompt, f"gave nothing for {self._timeout_s:g} s") from None
            raise episode_fault(what, "raised", prompt, f"raised {error!r}") from error


async def _scored(episode: Episode) -> Score:
    return score_of(await episode.score())


async def _closed(episode: Episode, prompt: Prompt, timeout_s: float) -> None:
    close = getattr(episode, "close", None)
    if close is None:
        return
    try:
        async with asyncio.timeout(timeout_s):
            await contained(close())
    except Exception as error:  # noqa: BLE001 - its author's to read; the rollout is whole without it
        logger.warning("episode of prompt %r did not close: %r", prompt.prompt_id, error)
