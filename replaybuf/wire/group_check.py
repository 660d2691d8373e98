"""Check a group against the limits of a run: rules in order, each with its reason of rejection."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import Invalid, counted
from replaybuf.wire.column.metadata import check_metadata
from replaybuf.wire.column.token_versions import spans_cover
from replaybuf.wire.drop_reasons import RejectionReason
from replaybuf.wire.group import LARGEST_SCORE, LOGPROBS, OPTIONAL_PER_TOKEN, Bools, Group, Int32s
from replaybuf.wire.names import check_string, fit_together
from replaybuf.wire.proofs import LARGEST_PROOFS_BYTES

LOGPROB_TOLERANCE = 1e-3
"""A logprob may exceed 0 by this much (nats): engines round."""
LARGEST_PROMPT_INDEX = 2**53 - 1
_ALL_LOGPROBS = (*LOGPROBS, "prompt_logprobs")
_logprobs_of = operator.attrgetter(*_ALL_LOGPROBS)

_NO_ADAPTERS = frozenset({""})
_HIGHEST_LOGPROB = np.float32(LOGPROB_TOLERANCE)
_BEYOND_FLOAT32 = "{} holds NaN, infinity or a value beyond float32"

# What the methods of an array call, without their overhead: for a small group it is most of the time of all rules.
_least, _most = np.minimum.reduce, np.maximum.reduce


class Rejection(msgspec.Struct, frozen=True):
    """Why a group is rejected: a `reason` to count by, and a sentence with name, value and bound."""

    reason: RejectionReason
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class GroupLimits:
    """Limits of a run; None = no limit. `adapters`: those of the run, empty if it has none."""

    published_version: int | None = None
    adapters: frozenset[str] = frozenset()
    group_size: int | None = None
    min_group_size: int | None = None
    vocab_size: int | None = None
    seq_len: int | None = None
    tokens_per_batch: int | None = None


Check = Callable[[Group, GroupLimits], Rejection | None]


def check_group(group: Group, limits: GroupLimits) -> Rejection | None:
    """Return why `group` may not enter a run with these limits, or None. One bad rollout rejects the group.

    Its rules have an order: of a group that breaks several of them, the first one gives the reason. They are in a few
    functions, because for a small group the calls take most of the time.
    """
    for check in _CHECKS:
        if rejection := check(group, limits):
            return rejection
    return None


def check_token_limits(tokens: int, longest: int, limits: GroupLimits) -> Rejection | None:
    """Return why a group of `tokens` tokens, `longest` in its longest rollout, is too large, or None."""
    if limits.seq_len is not None and longest > limits.seq_len:
        return Rejection("overlong", f"a rollout has {counted(longest, 'token')}; seq_len is {limits.seq_len}")
    if limits.tokens_per_batch is not None and tokens > limits.tokens_per_batch:
        detail = f"the group has {counted(tokens, 'token')}; tokens_per_batch is {limits.tokens_per_batch}"
        return Rejection("over_budget", detail)
    return None


def _check_names(group: Group, limits: GroupLimits) -> Rejection | None:
    names = {"group_id": group.group_id, "prompt_id": group.prompt_id, "ticket": group.ticket, "adapter": group.adapter}
    try:
        if not fit_together([*names.values(), *group.reward_parts, *{*group.finish_reasons}]):
            for name, value in names.items():
                check_string(name, value or "")
            for part in group.reward_parts:
                check_string("the name of a reward", part)
            for reason in {*group.finish_reasons}:
                check_string("finish_reason", reason or "")
    except Invalid as error:
        return Rejection("bad_name", error.detail)
    if group.adapter not in (limits.adapters or _NO_ADAPTERS):
        return Rejection("unknown_adapter", f"adapter is {group.adapter!r}; the run has {sorted(limits.adapters)}")
    index = group.prompt_index
    if index is not None and not 0 <= index <= LARGEST_PROMPT_INDEX:
        return Rejection("bad_prompt_index", f"prompt_index is {index}; it must be in 0..{LARGEST_PROMPT_INDEX}")
    return None


def _check_rollouts(group: Group, limits: GroupLimits) -> Rejection | None:
    rollouts, most = len(group.prompt_lengths), limits.group_size
    if not rollouts:
        return Rejection("no_rollouts", "rollouts is empty; the minimum is 1")
    least = most if limits.min_group_size is None else limits.min_group_size
    if most is not None and least is not None and not least <= rollouts <= most:
        and_least = "" if least == most else f" and min_group_size is {least}"
        return Rejection("wrong_group_size", f"rollouts is {rollouts}; group_size is {most}{and_least}")
    if min(group.prompt_lengths.tolist()) < 1:
        return Rejection("empty_prompt", "a rollout has 0 prompt tokens; the minimum is 1")
    if min(group.completion_lengths.tolist()) < 1:
        return Rejection("empty_completion", "a rollout has 0 completion tokens; the minimum is 1")
    return None


def _check_tokens(group: Group, limits: GroupLimits) -> Rejection | None:
    for name, ids in (("prompt_ids", group.prompt_ids), ("completion_ids", group.completion_ids)):
        if (low := _least(ids)) < 0:
            return Rejection("token_out_of_range", f"{name} holds {low}; token ids start at 0")
        if limits.vocab_size is not None and (high := _most(ids)) >= limits.vocab_size:
            return Rejection("token_out_of_range", f"{name} holds {high}; vocab_size is {limits.vocab_size}")
    mask = group.prompt_mask
    if mask is None or not mask.any():
        return None
    if group.prompt_logprobs is None:
        detail = "prompt_mask has a 1, and the group has no prompt_logprobs; it needs one per prompt token"
        return Rejection("bad_mask", detail)
    if mask[np.cumsum(group.prompt_lengths) - group.prompt_lengths].any():
        detail = "prompt_mask is 1 at the first token of a prompt; no token before it predicts it, so it must be 0"
        return Rejection("bad_mask", detail)
    return None


def _check_logprobs(group: Group, _: GroupLimits) -> Rejection | None:
    positive = None
    for name, column in zip(_ALL_LOGPROBS, _logprobs_of(group), strict=True):
        if column is None:
            continue
        highest = _most(column)
        # The maximum and the minimum of a column with NaN are NaN.
        if not (math.isfinite(highest) and math.isfinite(_least(column))):
            return Rejection("non_finite_logprobs", f"{name} holds NaN or infinity; finite values are needed")
        if highest > _HIGHEST_LOGPROB and positive is None:  # a later column that is not finite comes first
            detail = f"{name} holds {highest:.6g}; the maximum is {LOGPROB_TOLERANCE}"
            positive = Rejection("positive_logprobs", detail)
    return positive


def _check_scores(group: Group, _: GroupLimits) -> Rejection | None:
    if not _fits_float32(group.rewards):
        return Rejection("non_finite_rewards", _BEYOND_FLOAT32.format("reward"))
    for name, values in group.reward_parts.items():
        if not _fits_float32(values):
            return Rejection("non_finite_rewards", _BEYOND_FLOAT32.format(f"rewards.{name}"))
    if group.advantages is not None and not _fits_float32(group.advantages):
        return Rejection("non_finite_advantages", _BEYOND_FLOAT32.format("advantage"))
    if group.token_advantages is not None and not _most(np.abs(group.token_advantages)) <= LARGEST_SCORE:  # or NaN
        return Rejection("non_finite_advantages", _BEYOND_FLOAT32.format("token_advantages"))
    temperatures = group.temperatures.tolist()
    if not (min(temperatures) >= 0 and math.isfinite(sum(temperatures))):
        return Rejection("bad_temperature", "temperature holds a negative or non-finite value; the minimum is 0")
    return None


def _fits_float32(values: npt.NDArray[np.floating]) -> bool:
    """Check a value per rollout, in a list: numpy takes longer for a few."""
    listed = values.tolist()
    # A sum with NaN is NaN, which `min` and `max` may miss.
    return max(listed) <= LARGEST_SCORE and min(listed) >= -LARGEST_SCORE and math.isfinite(sum(listed))


def _check_versions(group: Group, limits: GroupLimits) -> Rejection | None:
    versions = group.version_spans[:, 1].tolist()
    if detail := _wrong_spans(group, versions):
        return Rejection("bad_version_spans", detail)
    newest = max(versions)
    if limits.published_version is not None and newest > limits.published_version:
        detail = f"the newest policy version is {newest}; the published version is {limits.published_version}"
        return Rejection("version_above_published", detail)
    return None


def _wrong_spans(group: Group, versions: list[int]) -> str | None:
    if not versions:
        return "version_spans is empty; they must cover each completion once"
    if not spans_cover(group):
        return "version_spans do not cover each completion once, from token 0 to its end"
    oldest = min(versions)
    if oldest < 0 or oldest != group.policy_version:
        return f"policy_version is {group.policy_version}; the oldest version in version_spans is {oldest}"
    return None


def _check_sizes(group: Group, limits: GroupLimits) -> Rejection | None:
    lengths = group.lengths.tolist()
    if rejection := check_token_limits(sum(lengths), max(lengths), limits):
        return rejection
    if group.proofs is not None and len(group.proofs) > LARGEST_PROOFS_BYTES:
        detail = f"the proofs of the group have {len(group.proofs)} bytes; the maximum is {LARGEST_PROOFS_BYTES}"
        return Rejection("proof_too_large", detail)
    try:
        if group.metadata != {}:  # the usual one
            check_metadata("metadata", group.metadata)
    except Invalid as error:
        return Rejection("bad_metadata", error.detail)
    return None


_CHECKS: tuple[Check, ...] = (
    _check_names,
    _check_rollouts,
    _check_tokens,
    _check_logprobs,
    _check_scores,
    _check_versions,
    _check_sizes,
)


def truncate(group: Group, seq_len: int) -> Group:
    """Cut completions so that no rollout is longer than `seq_len` tokens; return the same group if none is.

    At least one completion token stays, so a prompt of `seq_len` tokens or more still makes its rollout too long.
    A group with wrong version spans is not changed: it is to be rejected.
    """
    longest = np.maximum(seq_len - group.prompt_lengths, 1)
    lengths = np.minimum(group.completion_lengths, longest).astype(np.int32)
    if np.array_equal(lengths, group.completion_lengths) or _wrong_spans(group, group.version_spans[:, 1].tolist()):
        return group
    kept = _kept_tokens(group, lengths)
    cut = lengths < group.completion_lengths
    spans = group.version_spans.copy()
    spans[:, 3] = np.minimum(spans[:, 3], lengths[spans[:, 0]])
    spans = spans[spans[:, 2] < spans[:, 3]]
    optional = {name: getattr(group, name) for name in OPTIONAL_PER_TOKEN}
    return msgspec.structs.replace(
        group,
        policy_version=int(spans[:, 1].min()),
        completion_ids=group.completion_ids[kept],
        completion_lengths=lengths,
        completion_mask=group.completion_mask[kept],
        inference_logprobs=group.inference_logprobs[kept],
        version_spans=spans,
        finish_reasons=tuple("length" if c else r for c, r in zip(cut.tolist(), group.finish_reasons, strict=True)),
        **{name: None if column is None else column[kept] for name, column in optional.items()},
    )


def _kept_tokens(group: Group, lengths: Int32s) -> Bools:
    """Mark the completion tokens that stay, bool [C]: the first `lengths` of each rollout."""
    starts = np.cumsum(group.completion_lengths) - group.completion_lengths
    position = np.arange(len(group.completion_ids)) - np.repeat(starts, group.completion_lengths)
    kept: Bools = position < np.repeat(lengths, group.completion_lengths)
    return kept
