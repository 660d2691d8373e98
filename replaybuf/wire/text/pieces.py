"""Pieces of a rollout in token ids, and the columns of a group from them.

::

    prompt ─► sampled ─► environment ─► sampled ─► ...      followed_by: pieces of one rollout
              mask 1     mask 0         mask 1
    rollout 0, rollout 1, ...                               join_pieces: rollouts of one prompt
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from replaybuf.wire.group import Bools, Float32s, Float64s, Group, Int32s


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive tokens of one rollout, T >= 0 of them.

    `token_ids` int32 [T]; `logprobs` float32 [T] in nats; `spans` int32 [k, 3]: version, first token, one past the
    last, where neighbours differ in version; `finish_reason` after the last token; `mask` bool [T]: False where an
    environment wrote the token, None = all tokens were sampled.
    """

    token_ids: Int32s
    logprobs: Float32s
    spans: Int32s
    finish_reason: str | None
    mask: Bools | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> Bools:
        """The mask, bool [T]."""
        return np.ones(len(self), np.bool_) if self.mask is None else self.mask

    def version_falls(self, later: Piece) -> bool:
        """Return whether the version is lower in the tokens sampled next: a rewind took back weights between."""
        return bool(len(self) and len(later) and later.spans[0, 0] < self.spans[-1, 0])

    def followed_by(self, later: Piece) -> Piece:
        """Join with the tokens that come next."""
        one_mask = self.mask is None and later.mask is None
        return Piece(
            np.concatenate([self.token_ids, later.token_ids]),
            np.concatenate([self.logprobs, later.logprobs]),
            merge_spans(np.concatenate([self.spans, later.spans + np.array([0, len(self), len(self)], np.int32)])),
            later.finish_reason,
            None if one_mask else np.concatenate([self.sampled, later.sampled]),
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Completions:
    """The n completions of one prompt, as columns.

    - `completion_ids` int32 [C], `completion_lengths` int32 [n], `inference_logprobs` float32 [C] in nats
    - `version_spans` int32 [k, 4]: rollout, policy version, first completion token, one past the last
    - `finish_reasons`: one per completion
    - `completion_mask` bool [C]: False where an environment wrote the token; None = all tokens were sampled
    """

    completion_ids: Int32s
    completion_lengths: Int32s
    inference_logprobs: Float32s
    version_spans: Int32s
    finish_reasons: tuple[str | None, ...]
    completion_mask: Bools | None = None

    @property
    def policy_version(self) -> int:
        """Version that sampled the oldest token."""
        return int(self.version_spans[:, 1].min())

    @property
    def completions(self) -> list[Int32s]:
        """Token ids of each completion, int32 [T]; views."""
        ends = self.completion_lengths.cumsum().tolist()
        return [self.completion_ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def join_pieces(rollouts: Sequence[Piece]) -> Completions:
    """Join n >= 1 rollouts to columns."""
    spans = [np.insert(piece.spans, 0, index, axis=1) for index, piece in enumerate(rollouts)]
    one_mask = all(piece.mask is None for piece in rollouts)
    return Completions(
        completion_ids=np.concatenate([piece.token_ids for piece in rollouts]),
        completion_lengths=np.array([len(piece) for piece in rollouts], np.int32),
        inference_logprobs=np.concatenate([piece.logprobs for piece in rollouts]),
        version_spans=np.concatenate(spans).astype(np.int32),
        finish_reasons=tuple(piece.finish_reason for piece in rollouts),
        completion_mask=None if one_mask else np.concatenate([piece.sampled for piece in rollouts]),
    )


def group_of_completions(
    prompts: Sequence[Int32s],
    completions: Completions,
    *,
    rewards: Float64s,
    temperatures: Sequence[float],
    **fields: Any,
) -> Group:
    """Make a group of n completions with their prompts, int32 [P] each; `fields` are further fields of the group."""
    mask = completions.completion_mask
    return Group(
        policy_version=completions.policy_version,
        prompt_ids=np.concatenate(prompts),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        completion_ids=completions.completion_ids,
        completion_lengths=completions.completion_lengths,
        completion_mask=np.ones(len(completions.completion_ids), np.bool_) if mask is None else mask,
        inference_logprobs=completions.inference_logprobs,
        version_spans=completions.version_spans,
        finish_reasons=completions.finish_reasons,
        rewards=rewards,
        temperatures=np.array(temperatures, np.float32),
        **fields,
    )


def merge_spans(spans: Int32s) -> Int32s:
    """Drop empty spans and merge neighbours of the same version; int32 [k, 3] to int32 [m, 3]."""
    spans = spans[spans[:, 2] > spans[:, 1]]
    if not len(spans):
        return spans
    starts = np.flatnonzero(np.append(True, spans[1:, 0] != spans[:-1, 0]))
    merged = spans[starts]
    merged[:, 2] = spans[np.append(starts[1:], len(spans)) - 1, 2]
    return merged
