"""Check a group against the limits of a run: a table of rules and rejection reasons."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import Invalid, counted
from replaybuf.wire.column.metadata import check_metadata
from replaybuf.wire.column.token_versions import spans_cover
from replaybuf.wire.group import LARGEST_SCORE, LOGPROBS, OPTIONAL_PER_TOKEN, Bools, Group, Int32s
from replaybuf.wire.names import check_string
from replaybuf.wire.proofs import LARGEST_PROOFS_BYTES

LOGPROB_TOLERANCE = 1e-3
"""A logprob may exceed 0 by this much (nats): engines round."""
LARGEST_PROMPT_INDEX = 2**53 - 1
_ALL_LOGPROBS = (*LOGPROBS, "prompt_logprobs")

# What the methods of an array call, without their overhead: for a small group it is most of the time of all rules.
_least, _most, _all = np.minimum.reduce, np.maximum.reduce, np.logical_and.reduce


class Rejection(msgspec.Struct, frozen=True):
    """Why a group is rejected: a `reason` to count by, and a sentence with name, value and bound."""

    reason: str
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


Rule = Callable[[Group, GroupLimits], str | None]
"""Returns what is wrong with the group, or None. A rule may assume that the group passed the rules before it."""


def check_group(group: Group, limits: GroupLimits) -> Rejection | None:
    """Return why `group` may not enter a run with these limits, or None. One bad rollout rejects the group."""
    for reason, rule in RULES:
        if detail := rule(group, limits):
            return Rejection(reason, detail)
    return None


def check_token_limits(tokens: int, longest: int, limits: GroupLimits) -> Rejection | None:
    """Return why a group of `tokens` tokens, `longest` in its longest rollout, is too large, or None."""
    if detail := _overlong(longest, limits):
        return Rejection("overlong", detail)
    detail = _over_budget(tokens, limits)
    return Rejection("over_budget", detail) if detail else None


def _names(group: Group, _: GroupLimits) -> str | None:
    names = {"group_id": group.group_id, "prompt_id": group.prompt_id, "ticket": group.ticket, "adapter": group.adapter}
    try:
        for name, value in names.items():
            check_string(name, value or "")
        for part in group.reward_parts:
            check_string("the name of a reward", part)
        for reason in {*group.finish_reasons}:
            check_string("finish_reason", reason or "")
    except Invalid as error:
        return error.detail
    return None


def _adapter(group: Group, limits: GroupLimits) -> str | None:
    if group.adapter in (limits.adapters or {""}):
        return None
    return f"adapter is {group.adapter!r}; the run has {sorted(limits.adapters)}"


def _prompt_index(group: Group, _: GroupLimits) -> str | None:
    if group.prompt_index is None or 0 <= group.prompt_index <= LARGEST_PROMPT_INDEX:
        return None
    return f"prompt_index is {group.prompt_index}; it must be in 0..{LARGEST_PROMPT_INDEX}"


def _group_size(group: Group, limits: GroupLimits) -> str | None:
    most = limits.group_size
    least = most if limits.min_group_size is None else limits.min_group_size
    if most is None or least is None or least <= group.rollouts <= most:
        return None
    and_least = "" if least == most else f" and min_group_size is {least}"
    return f"rollouts is {group.rollouts}; group_size is {most}{and_least}"


def _empty_prompt(group: Group, _: GroupLimits) -> str | None:
    return "a rollout has 0 prompt tokens; the minimum is 1" if _least(group.prompt_lengths) < 1 else None


def _empty_completion(group: Group, _: GroupLimits) -> str | None:
    return "a rollout has 0 completion tokens; the minimum is 1" if _least(group.completion_lengths) < 1 else None


def _token_ids(group: Group, limits: GroupLimits) -> str | None:
    for name, ids in (("prompt_ids", group.prompt_ids), ("completion_ids", group.completion_ids)):
        low, high = int(_least(ids)), int(_most(ids))
        if low < 0:
            return f"{name} holds {low}; token ids start at 0"
        if limits.vocab_size is not None and high >= limits.vocab_size:
            return f"{name} holds {high}; vocab_size is {limits.vocab_size}"
    return None


def _prompt_mask(group: Group, _: GroupLimits) -> str | None:
    mask = group.prompt_mask
    if mask is None or not mask.any():
        return None
    if group.prompt_logprobs is None:
        return "prompt_mask has a 1, and the group has no prompt_logprobs; it needs one per prompt token"
    if mask[np.cumsum(group.prompt_lengths) - group.prompt_lengths].any():
        return "prompt_mask is 1 at the first token of a prompt; no token before it predicts it, so it must be 0"
    return None


def _finite_logprobs(group: Group, _: GroupLimits) -> str | None:
    for name in _ALL_LOGPROBS:
        column = getattr(group, name)
        # The maximum and the minimum of a column with NaN are NaN.
        if column is not None and not (math.isfinite(_most(column)) and math.isfinite(_least(column))):
            return f"{name} holds NaN or infinity; finite values are needed"
    return None


def _negative_logprobs(group: Group, _: GroupLimits) -> str | None:
    for name in _ALL_LOGPROBS:
        column = getattr(group, name)
        if column is not None and (highest := _most(column)) > np.float32(LOGPROB_TOLERANCE):
            return f"{name} holds {highest:.6g}; the maximum is {LOGPROB_TOLERANCE}"
    return None


def _rewards(group: Group, _: GroupLimits) -> str | None:
    parts = [(f"rewards.{name}", values) for name, values in group.reward_parts.items()]
    return _not_float32([("reward", group.rewards), *parts])


def _advantages(group: Group, _: GroupLimits) -> str | None:
    return _not_float32([("advantage", group.advantages), ("token_advantages", group.token_advantages)])


def _not_float32(columns: list[tuple[str, npt.NDArray[np.floating] | None]]) -> str | None:
    for name, values in columns:
        if values is not None and not _all(np.abs(values) <= LARGEST_SCORE):
            return f"{name} holds NaN, infinity or a value beyond float32"
    return None


def _temperature(group: Group, _: GroupLimits) -> str | None:
    if _all(np.isfinite(group.temperatures)) and _all(group.temperatures >= 0):
        return None
    return "temperature holds a negative or non-finite value; the minimum is 0"


def _version_spans(group: Group, _: GroupLimits) -> str | None:
    spans = group.version_spans
    if not len(spans):
        return "version_spans is empty; they must cover each completion once"
    if not spans_cover(group):
        return "version_spans do not cover each completion once, from token 0 to its end"
    oldest = int(_least(spans[:, 1]))
    if oldest < 0 or oldest != group.policy_version:
        return f"policy_version is {group.policy_version}; the oldest version in version_spans is {oldest}"
    return None


def _published(group: Group, limits: GroupLimits) -> str | None:
    newest = group.policy_version_max
    if limits.published_version is None or newest <= limits.published_version:
        return None
    return f"the newest policy version is {newest}; the published version is {limits.published_version}"


def _overlong(longest: int, limits: GroupLimits) -> str | None:
    if limits.seq_len is None or longest <= limits.seq_len:
        return None
    return f"a rollout has {counted(longest, 'token')}; seq_len is {limits.seq_len}"


def _over_budget(tokens: int, limits: GroupLimits) -> str | None:
    if limits.tokens_per_batch is None or tokens <= limits.tokens_per_batch:
        return None
    return f"the group has {counted(tokens, 'token')}; tokens_per_batch is {limits.tokens_per_batch}"


def _proofs(group: Group, _: GroupLimits) -> str | None:
    if group.proofs is None or len(group.proofs) <= LARGEST_PROOFS_BYTES:
        return None
    return f"the proofs of the group have {len(group.proofs)} bytes; the maximum is {LARGEST_PROOFS_BYTES}"


def _metadata(group: Group, _: GroupLimits) -> str | None:
    try:
        check_metadata("metadata", group.metadata)
    except Invalid as error:
        return error.detail
    return None


RULES: tuple[tuple[str, Rule], ...] = (
    ("bad_name", _names),
    ("unknown_adapter", _adapter),
    ("bad_prompt_index", _prompt_index),
    ("no_rollouts", lambda group, _: None if group.rollouts else "rollouts is empty; the minimum is 1"),
    ("wrong_group_size", _group_size),
    ("empty_prompt", _empty_prompt),
    ("empty_completion", _empty_completion),
    ("token_out_of_range", _token_ids),
    ("bad_mask", _prompt_mask),
    ("non_finite_logprobs", _finite_logprobs),
    ("positive_logprobs", _negative_logprobs),
    ("non_finite_rewards", _rewards),
    ("non_finite_advantages", _advantages),
    ("bad_temperature", _temperature),
    ("bad_version_spans", _version_spans),
    ("version_above_published", _published),
    ("overlong", lambda group, limits: _overlong(int(_most(group.lengths)), limits)),
    ("over_budget", lambda group, limits: _over_budget(group.tokens, limits)),
    ("proof_too_large", _proofs),
    ("bad_metadata", _metadata),
)


def truncate(group: Group, seq_len: int) -> Group:
    """Cut completions so that no rollout is longer than `seq_len` tokens; return the same group if none is.

    At least one completion token stays, so a prompt of `seq_len` tokens or more still makes its rollout too long.
    A group with wrong version spans is not changed: it is to be rejected.
    """
    longest = np.maximum(seq_len - group.prompt_lengths, 1)
    lengths = np.minimum(group.completion_lengths, longest).astype(np.int32)
    if np.array_equal(lengths, group.completion_lengths) or _version_spans(group, GroupLimits()):
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
