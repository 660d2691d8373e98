"""Process rewards: convert the ends of stretches from characters or turns to tokens."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence

from replaybuf.errors import counted
from replaybuf.generator.environments.scoring import Scores, reward_fault
from replaybuf.generator.prompts import Encoder, Prompt
from replaybuf.kernel.strategy.advantages import ProcessReward
from replaybuf.wire.group import TokenIds


def by_text(prompt: Prompt, scores: Scores, completions: Sequence[TokenIds], tokenizer: Encoder) -> Scores:
    """Convert ends in characters of the completions' texts to ends in tokens.

    A stretch ends with the token that completes its last character. A stretch that ends with the text ends with the
    completion, including the end-of-sequence token. Raises `RewardFault` for an end outside the text.
    """
    texts = [_Prefixes(ids, tokenizer) for ids in completions]
    return _convert(prompt, scores, [(text.characters, "character", text.token) for text in texts])


def by_turn(prompt: Prompt, scores: Scores, turn_ends: Sequence[Sequence[int]]) -> Scores:
    """Convert numbers of turns to ends in tokens; `turn_ends` of each rollout, in tokens.

    Raises `RewardFault` for a turn that does not exist.
    """
    numbered = [[0, *ends] for ends in turn_ends]
    return _convert(prompt, scores, [(len(ends) - 1, "turn", ends.__getitem__) for ends in numbered])


class _Prefixes:
    """Text lengths of the prefixes of a completion."""

    def __init__(self, ids: TokenIds, tokenizer: Encoder) -> None:
        self._ids = ids
        self._tokenizer = tokenizer
        self.characters = self._length(len(ids))

    def token(self, end: int) -> int:
        """Return the number of tokens up to the character before `end`."""
        if end == self.characters:
            return len(self._ids)
        return bisect.bisect_left(range(len(self._ids)), end, key=self._length)

    def _length(self, tokens: int) -> int:
        # Decodes the whole prefix: one token alone may be part of a character, or another character than in context.
        return len(self._tokenizer.decode([self._ids[:tokens]])[0])


def _convert(prompt: Prompt, scores: Scores, rollouts: Sequence[tuple[int, str, Callable[[int], int]]]) -> Scores:
    """Convert the ends of every rollout, each in 1..bound; `rollouts`: (bound, its unit, conversion)."""
    converted: list[tuple[ProcessReward, ...]] = []
    for stretches, (bound, unit, token_of) in zip(scores.process_rewards, rollouts, strict=True):
        wrong = next((end for end, _ in stretches if not 1 <= end <= bound), None)
        if wrong is not None:
            what = f"has a process reward that ends at {wrong}; the completion has {counted(bound, unit)}"
            raise reward_fault("bad_end", prompt, what)
        converted.append(tuple((token_of(end), reward) for end, reward in stretches))
    return dataclasses.replace(scores, process_rewards=tuple(converted))
