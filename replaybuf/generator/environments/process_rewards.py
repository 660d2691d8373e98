"""Process rewards: from where an environment says that a stretch of a completion ends to the token there."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence

from replaybuf.generator.environments.scoring import Scores, reward_fault
from replaybuf.generator.prompts.prompt import Encoder, Prompt
from replaybuf.kernel.advantages import ProcessReward
from replaybuf.wire.group import TokenIds


def by_text(prompt: Prompt, scores: Scores, completions: Sequence[TokenIds], tokenizer: Encoder) -> Scores:
    """Count the ends of process rewards in tokens where they are counted in characters of the completions' texts.

    A stretch ends with the token that completes its last character; one that ends with the text ends with the
    completion, so that the end of sequence is part of it. Raises `RewardFault` for an end that is not in the text.
    """
    texts = [_Prefixes(ids, tokenizer) for ids in completions]
    return _counted(prompt, scores, [(len(text), "characters", text.token) for text in texts])


def by_turn(prompt: Prompt, scores: Scores, turn_ends: Sequence[Sequence[int]]) -> Scores:
    """Count the ends in tokens where they are numbers of turns; `turn_ends` of each rollout, in tokens.

    Raises `RewardFault` for a turn that was not taken.
    """
    numbered = [[0, *ends] for ends in turn_ends]
    return _counted(prompt, scores, [(len(ends) - 1, "turns", ends.__getitem__) for ends in numbered])


class _Prefixes:
    """How long the text is after so many tokens; its length is that of the whole text."""

    def __init__(self, ids: TokenIds, tokenizer: Encoder) -> None:
        self._ids = ids
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return self._after(len(self._ids))

    def token(self, end: int) -> int:
        """Return how many tokens it takes to the character before `end`."""
        if end == len(self):
            return len(self._ids)
        return bisect.bisect_left(range(len(self._ids)), end, key=self._after)

    def _after(self, tokens: int) -> int:
        # Decoded afresh for each guess: a token alone may be no character, or another one than among others.
        return len(self._tokenizer.decode([self._ids[:tokens]])[0])


def _counted(prompt: Prompt, scores: Scores, rollouts: Sequence[tuple[int, str, Callable[[int], int]]]) -> Scores:
    """Translate the ends, each in 1..bound, of every rollout: (bound, its unit, translation)."""
    found: list[tuple[ProcessReward, ...]] = []
    for taken, (bound, unit, token_of) in zip(scores.process_rewards, rollouts, strict=True):
        wrong = next((end for end, _ in taken if not 1 <= end <= bound), None)
        if wrong is not None:
            what = f"has a process reward that ends at {wrong}; the completion has {bound} {unit}"
            raise reward_fault("bad_end", prompt, what)
        found.append(tuple((token_of(end), reward) for end, reward in taken))
    return dataclasses.replace(scores, process_rewards=tuple(found))
