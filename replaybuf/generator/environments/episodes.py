"""Rollouts of several turns, in token ids: the policy samples a turn, the environment answers, and so on.

::

    prompt ─► turn 1 ─► answer 1 ─► turn 2 ─► ... ─► last turn
              mask 1    mask 0      mask 1

All turns and answers after the prompt are one completion. Sampled tokens are never decoded and encoded again, so
training uses exactly what was sampled. Every turn is a request of its own, so the version may rise between turns. The
tokens of an answer have the version of the turn before them.
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
from replaybuf.generator.engines import Sample, Sampler, Sampling
from replaybuf.generator.environments.contract import Episode, MultiTurnEnvironment, Score, Turn, score_of
from replaybuf.generator.environments.process_rewards import by_turn
from replaybuf.generator.environments.scoring import Scores, columns_of, episode_fault
from replaybuf.generator.failures import Losses
from replaybuf.generator.fleet.publication import continued, joined, pieces, remainder
from replaybuf.generator.prompts import Encoder, Prompt
from replaybuf.generator.threads import LoopThread, contained
from replaybuf.wire.text.pieces import Piece

logger = logging.getLogger(__name__)

T = TypeVar("T")

CheckRest: TypeAlias = Callable[[int], None]
_NextTurn: TypeAlias = Callable[[Piece], Awaitable[Piece]]

LENGTH = "length"
MAX_TURNS = "max_turns"


def _any_version(_: int) -> None:
    """Accept any version."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Rollout:
    """One finished rollout; `turn_ends`: tokens to the end of each turn."""

    piece: Piece
    turn_ends: list[int]
    score: Score


class Episodes:
    """Plays the rollouts of a group side by side, each in an episode of its own.

    A rollout ends when the environment returns None. It ends with finish reason `max_turns` after `max_turns` turns,
    and with `length` at `max_tokens` of the sampling, turns and answers together, or if an answer leaves no space for
    a turn. The environment's code runs in an event loop in a separate thread, each call for at most `timeout_s`.
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
        self,
        engine: Sampler,
        prompt: Prompt,
        sampling: Sampling,
        check_rest: CheckRest = _any_version,
        losses: Losses | None = None,
    ) -> tuple[Sample, Scores]:
        """Sample and score the `sampling.n` rollouts of one prompt, less those that `losses` allows to lose.

        `check_rest` runs before every turn with the version that began the rollout, and raises `EngineFault` if that
        became too stale. Raises `RewardFault` for faults of the environment, `EngineFault` as `engine.generate`.
        """

        async def next_turn(rollout: int, piece: Piece) -> Piece:
            check_rest(int(piece.spans[0, 0]))
            so_far = np.concatenate([prompt.token_ids, piece.token_ids])
            (turn,) = pieces(await engine.generate(so_far, remainder(sampling, rollout, piece)))
            return turn

        first = await engine.generate(prompt.token_ids, sampling)
        playing = [
            functools.partial(self._play_one, prompt, begun, functools.partial(next_turn, rollout), sampling.max_tokens)
            for rollout, begun in enumerate(pieces(first))
        ]
        rollouts = await (losses or Losses()).gather_rest(playing, [1] * len(playing))
        turns = [len(rollout.turn_ends) for rollout in rollouts]
        sample = joined([rollout.piece for rollout in rollouts], first.metadata | {"turns": turns})
        scores = columns_of(prompt, [rollout.score for rollout in rollouts])
        if scores.process_rewards:
            scores = by_turn(prompt, scores, [rollout.turn_ends for rollout in rollouts])
        return sample, scores

    async def _play_one(self, prompt: Prompt, begun: Piece, next_turn: _NextTurn, max_tokens: int) -> _Rollout:
        async def start() -> Episode:
            return self._environment.start(prompt)

        async def score() -> Score:
            return score_of(await episode.score())

        episode: Episode = await self._run(prompt, "environment", start())
        try:
            piece, turn_ends = await self._turns(prompt, begun, next_turn, max_tokens, episode)
            scored = await self._run(prompt, "reward", score())
        finally:
            closing = self._loop.start(_close(episode, prompt, self._timeout_s))
        # Nothing depends on `close` if the rollout failed or the generator ends: it is awaited only here.
        await asyncio.wrap_future(closing)
        return _Rollout(piece, turn_ends, scored)

    async def _turns(
        self, prompt: Prompt, piece: Piece, next_turn: _NextTurn, max_tokens: int, episode: Episode
    ) -> tuple[Piece, list[int]]:
        turn_ends, turn = [len(piece)], piece
        while turn.finish_reason != LENGTH:
            reply = await self._run(prompt, "environment", episode.step(self._turn(turn)))
            if reply is None:
                break
            answer = self._answer(prompt, reply, int(piece.spans[-1, 0]))
            if len(turn_ends) == self._max_turns:
                return dataclasses.replace(piece, finish_reason=MAX_TURNS), turn_ends
            if len(piece) + len(answer) >= max_tokens:
                return dataclasses.replace(piece, finish_reason=LENGTH), turn_ends
            piece = piece.followed_by(answer)
            turn = await next_turn(piece)
            piece = continued(piece, turn)
            turn_ends.append(len(piece))
        if turn.finish_reason == LENGTH and hasattr(episode, "cut_off"):
            await self._run(prompt, "environment", episode.cut_off(self._turn(turn)))
        return piece, turn_ends

    def _turn(self, piece: Piece) -> Turn:
        ids = piece.token_ids.tolist()
        return Turn(self._tokenizer.decode([ids])[0], ids)

    def _answer(self, prompt: Prompt, reply: str | Sequence[int], version: int) -> Piece:
        ids = self._tokenizer.encode(reply, add_special_tokens=False) if isinstance(reply, str) else list(reply)
        vocab_size = self._tokenizer.vocab_size
        if not ids or not all(isinstance(token, int) and 0 <= token < vocab_size for token in ids):
            detail = f"answered a turn with {reply!r}; it must be None, a text or ids below {vocab_size}, not empty"
            raise episode_fault("environment", "bad_answer", prompt, detail)
        spans = np.array([(version, 0, len(ids))], np.int32)
        unsampled = np.zeros(len(ids), np.bool_)
        return Piece(np.array(ids, np.int32), np.zeros(len(ids), np.float32), spans, None, unsampled)

    async def _run(self, prompt: Prompt, what: str, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the environment. Raises `RewardFault` (`<what>_raised`, `<what>_timeout`)."""
        future = self._loop.start(work)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await asyncio.wrap_future(future)
        except RewardFault:
            raise
        except Exception as error:  # an environment may raise anything
            if limit.expired():
                raise episode_fault(what, "timeout", prompt, f"did not answer within {self._timeout_s:g} s") from None
            raise episode_fault(what, "raised", prompt, f"raised {error!r}") from error


async def _close(episode: Episode, prompt: Prompt, timeout_s: float) -> None:
    close = getattr(episode, "close", None)
    if close is None:
        return
    try:
        async with asyncio.timeout(timeout_s):
            await contained(close())
    except Exception as error:  # noqa: BLE001 - an environment may raise anything; the rollout is complete without it
        logger.warning("cannot close the episode of prompt %r: %r", prompt.prompt_id, error)
