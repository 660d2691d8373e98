"""Policy version of each token of a group, from its version spans, and the mask of tokens that are too old.

The version of a batch minus the version of a token is its age. Environment and prompt tokens have no version. A group
whose spans do not cover each completion once has the `policy_version` of the group for all its tokens.
"""

from __future__ import annotations

import msgspec
import numpy as np

from replaybuf.wire.group import Group, Int32s

NO_VERSION = -1
"""Version of tokens that no policy sampled: prompts, text of the environment, padding."""


def token_versions(group: Group) -> Int32s:
    """Return the version that sampled each completion token, int32 [C]; `NO_VERSION` where `completion_mask` is 0."""
    versions = _versions_of(group)
    return versions if group.completion_mask.all() else np.where(group.completion_mask, versions, np.int32(NO_VERSION))


def mask_stale(group: Group, least: int | None) -> Group:
    """Clear the masks at tokens of versions below `least`; return the same group if there are none.

    Nobody knows the version of a prompt token in the loss; it counts as that of the group's oldest token.
    """
    if least is None or group.policy_version >= least:
        return group
    kept = group.completion_mask & (_versions_of(group) >= least)
    return msgspec.structs.replace(group, completion_mask=kept, prompt_mask=None)


def count_stale(group: Group, least: int) -> int:
    """Count the tokens whose mask `mask_stale` clears."""
    if group.policy_version >= least:
        return 0
    prompts = 0 if group.prompt_mask is None else np.count_nonzero(group.prompt_mask)
    return int(np.count_nonzero(group.completion_mask & (_versions_of(group) < least)) + prompts)


def _versions_of(group: Group) -> Int32s:
    """Return the version of the span that holds each completion token, int32 [C]."""
    spans = group.version_spans
    if _one_span_each(group):
        return np.repeat(spans[:, 1], group.completion_lengths)
    if not _cover_once(group):
        return np.full(len(group.completion_ids), group.policy_version, np.int32)
    spans = spans[np.lexsort((spans[:, 2], spans[:, 0]))]
    return np.repeat(spans[:, 1], spans[:, 3] - spans[:, 2])


def spans_cover(group: Group) -> bool:
    """Check whether the version spans, in any order, cover each completion once, from token 0 to its end."""
    return _one_span_each(group) or _cover_once(group)


def _one_span_each(group: Group) -> bool:
    """Check whether each rollout has one span over its completion, in order.

    Most groups are like this, and this takes a tenth of the time of `_cover_once`.
    """
    lengths = group.completion_lengths.tolist()
    if len(group.version_spans) != len(lengths):
        return False
    rollouts, _, starts, ends = group.version_spans.T.tolist()
    return ends == lengths and rollouts == list(range(len(lengths))) and not any(starts) and all(ends)


def _cover_once(group: Group) -> bool:
    """Check the same for any number of spans per rollout, in any order."""
    spans = group.version_spans
    if not len(spans):
        return False
    spans = spans[np.lexsort((spans[:, 2], spans[:, 0]))]
    is_first = np.ones(len(spans), np.bool_)
    np.not_equal(spans[1:, 0], spans[:-1, 0], out=is_first[1:])
    is_last = np.append(is_first[1:], True)
    expected_start = np.zeros(len(spans), np.int32)
    np.copyto(expected_start[1:], spans[:-1, 3], where=~is_first[1:])
    return (
        np.array_equal(spans[is_first, 0], np.arange(group.rollouts))
        and bool((spans[:, 2] == expected_start).all())
        and bool((spans[:, 3] > spans[:, 2]).all())
        and np.array_equal(spans[is_last, 3], group.completion_lengths)
    )
