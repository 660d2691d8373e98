"""One rollout for people: bounded in bytes, as text where there is a tokenizer."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from replaybuf.wire.answer.samples import Pieces, ShownRollout
from replaybuf.wire.group import Group, Int32s
from replaybuf.wire.text.model_tokenizer import Tokenizer

BYTES_PER_TOKEN = 4
"""Bytes of text that a shown token may take, on average."""
MOST_PARTS = 16
"""Parts of a reward; their names have 4 KiB at most."""
LONGEST_ANSWER = 256


class ShownTokens(NamedTuple):
    """Most tokens of a prompt and of a completion; of longer ones the start and the end are shown."""

    prompt: int
    completion: int


PREVIEW = ShownTokens(256, 512)
SAMPLE = ShownTokens(1024, 2048)
"""A rollout takes at most 16 KiB as text, and 20 KiB as token ids."""


def show_rollout(group: Group, place: int, tokenizer: Tokenizer | None, most: ShownTokens) -> ShownRollout:
    """Show the rollout at a place of its group."""
    prompt, completion = int(group.prompt_lengths[place]), int(group.completion_lengths[place])
    prompt_at, at = int(group.prompt_lengths[:place].sum()), int(group.completion_lengths[:place].sum())
    answer = group.metadata.get("answer")
    return ShownRollout(
        place=place,
        reward=float(group.rewards[place]),
        rewards={name: float(part[place]) for name, part in itertools.islice(group.reward_parts.items(), MOST_PARTS)},
        advantage=None if group.advantages is None else float(group.advantages[place]),
        finish_reason=group.finish_reasons[place],
        prompt=_pieces(group.prompt_ids[prompt_at : prompt_at + prompt], most.prompt, tokenizer),
        prompt_tokens=prompt,
        completion=_pieces(group.completion_ids[at : at + completion], most.completion, tokenizer),
        completion_tokens=completion,
        answer=str(answer)[:LONGEST_ANSWER] if isinstance(answer, str | int | float) else None,
    )


def _pieces(ids: Int32s, most: int, tokenizer: Tokenizer | None) -> Pieces:
    parts = [ids] if len(ids) <= most else [ids[: most // 2], ids[-(most // 2) :]]
    if tokenizer is None:
        return [part.tolist() for part in parts]
    texts = tokenizer.decode(parts, special_tokens=True)
    half = most * BYTES_PER_TOKEN // 2
    if sum(len(text.encode()) for text in texts) <= 2 * half:
        return [*texts]
    return [texts[0].encode()[:half].decode(errors="ignore"), texts[-1].encode()[-half:].decode(errors="ignore")]
