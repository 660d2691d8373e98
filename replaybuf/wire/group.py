"""A group: the rollouts of one prompt, scored together. The atomic unit of the buffer.

Two forms with the same fields: `GroupJson` is the wire form (lists, one object per rollout), `Group` the form in
memory (numpy columns over all rollouts, in rollout order). Shapes: n rollouts, P prompt tokens and C completion tokens
in total; `completion_ids[C]` holds the completions one after another, `completion_lengths[n]` where each one ends.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import GroupRejected, Invalid
from replaybuf.wire.metadata import check_metadata

LOGPROB_TOLERANCE = 1e-3
"""A logprob may exceed 0 by this much (nats): engines round."""
LARGEST_PROMPT_INDEX = 2**53 - 1
LARGEST_SCORE = float(np.finfo(np.float32).max)
"""Rewards and advantages travel to the trainer as float32; what is beyond its range would arrive as infinity."""

OptionalLogprobs: TypeAlias = Literal["ref_logprobs", "old_logprobs", "teacher_logprobs"]
"""Logprobs, float32 [C] in nats, that a group may carry beside those its tokens were sampled with.

`old_logprobs`: by one version of the policy, the proximal policy of decoupled PPO (Fu et al. 2025, AReaL).
"""
OPTIONAL_LOGPROBS: tuple[OptionalLogprobs, ...] = get_args(OptionalLogprobs)
LOGPROBS = ("inference_logprobs", *OPTIONAL_LOGPROBS)
OPTIONAL_PER_TOKEN = (*OPTIONAL_LOGPROBS, "token_advantages")
"""Columns with a value per completion token that a group may lack."""

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
TokenIds: TypeAlias = Sequence[int] | Int32s
"""One sequence of token ids: a list, or int32 [T]."""


def hash_name(name: str) -> int:
    """Number a name (of a source: environment, data set; of an adapter), the same on any machine; 0 = no name."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF if name else 0


class RolloutJson(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One sampled completion on the wire. Lists over completion tokens have equal length; logprobs in nats."""

    prompt_ids: list[int]
    completion_ids: list[int]
    inference_logprobs: list[float]
    reward: float
    completion_mask: list[int] | None = None
    ref_logprobs: list[float] | None = None
    old_logprobs: list[float] | None = None
    teacher_logprobs: list[float] | None = None
    token_advantages: list[float] | None = None
    rewards: dict[str, float] = {}
    advantage: float | None = None
    version_spans: list[tuple[int, int, int]] | None = None
    finish_reason: str | None = None
    temperature: float = 1.0


class GroupJson(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One group on the wire, as `POST /v1/runs/{run}/groups` takes it."""

    prompt_id: str
    policy_version: int
    rollouts: list[RolloutJson]
    group_id: str | None = None
    ticket: str | None = None
    prompt_index: int | None = None
    adapter: str = ""
    metadata: dict[str, Any] = {}


class Group(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One group as columns.

    - `prompt_ids` int32 [P], `prompt_lengths` int32 [n]
    - `completion_ids` int32 [C], `completion_lengths` int32 [n]
    - `completion_mask` bool [C]: False = token not sampled by the policy (tool or environment text)
    - `inference_logprobs`, `ref_logprobs`, `old_logprobs`, `teacher_logprobs` float32 [C], nats
    - `rewards`, `advantages` float64 [n]; `reward_parts` float64 [n] by name
    - `token_advantages` float32 [C]: train on these, where they are there, instead of one for the whole rollout
    - `version_spans` int32 [k, 4]: rollout, policy version, first completion token, one past the last
    - `temperatures` float32 [n], `finish_reasons` one per rollout
    """

    group_id: str | None
    prompt_id: str
    policy_version: int
    prompt_ids: Int32s
    prompt_lengths: Int32s
    completion_ids: Int32s
    completion_lengths: Int32s
    completion_mask: Bools
    inference_logprobs: Float32s
    rewards: Float64s
    version_spans: Int32s
    temperatures: Float32s
    finish_reasons: tuple[str | None, ...]
    ref_logprobs: Float32s | None = None
    old_logprobs: Float32s | None = None
    teacher_logprobs: Float32s | None = None
    token_advantages: Float32s | None = None
    advantages: Float64s | None = None
    reward_parts: dict[str, Float64s] = {}
    ticket: str | None = None
    prompt_index: int | None = None
    adapter: str = ""
    metadata: dict[str, Any] = {}

    @property
    def rollouts(self) -> int:
        """Count the rollouts."""
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> Int32s:
        """Tokens per rollout, prompt and completion, int32 [n]."""
        return self.prompt_lengths + self.completion_lengths

    @property
    def sampled_lengths(self) -> Int32s:
        """Tokens per rollout that the policy sampled, int32 [n]: mostly all of its completion."""
        if self.completion_mask.all():
            return self.completion_lengths
        ends = np.cumsum(self.completion_lengths, dtype=np.int64).tolist()
        mask, starts = self.completion_mask, [0, *ends[:-1]]
        return np.array([np.count_nonzero(mask[a:b]) for a, b in zip(starts, ends, strict=True)], np.int32)

    @property
    def tokens(self) -> int:
        """Tokens of all rollouts, prompts and completions."""
        return int(self.prompt_lengths.sum()) + int(self.completion_lengths.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        values = (getattr(self, name) for name in self.__struct_fields__)
        return sum(v.nbytes for v in (*values, *self.reward_parts.values()) if isinstance(v, np.ndarray))

    @property
    def policy_version_max(self) -> int:
        """Newest version that sampled a token of this group."""
        return int(self.version_spans[:, 1].max()) if len(self.version_spans) else self.policy_version


class Rejection(msgspec.Struct, frozen=True):
    """Why a group was refused at the door: a `reason` to count by and a sentence with name, value and bound."""

    reason: str
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class GroupLimits:
    """What the door checks a group against; None = no bound. `adapters`: those of the run, empty = it has none."""

    published_version: int | None = None
    adapters: frozenset[str] = frozenset()
    group_size: int | None = None
    vocab_size: int | None = None
    seq_len: int | None = None
    tokens_per_batch: int | None = None


def group_from_json(wire: GroupJson) -> Group:
    """Turn the wire form into columns.

    Raises `GroupRejected` where the lists of a rollout disagree in length or a number does not fit its column;
    everything else is left to `check_group`.
    """
    rollouts = wire.rollouts
    for number, rollout in enumerate(rollouts):
        _check_lengths(number, rollout)
    has_advantage = [rollout.advantage is not None for rollout in rollouts]
    if any(has_advantage) and not all(has_advantage):
        raise _refused("partial_advantages", "advantage", "missing for some rollouts", "given for all rollouts or none")
    optional: dict[str, Any] = {
        name: _optional(name, [getattr(rollout, name) for rollout in rollouts]) for name in OPTIONAL_PER_TOKEN
    }
    names = sorted({name for rollout in rollouts for name in rollout.rewards})
    if any(len(rollout.rewards) != len(names) for rollout in rollouts):
        raise _refused("length_mismatch", "rewards", "different names per rollout", "the same names in every rollout")
    return Group(
        group_id=wire.group_id,
        prompt_id=wire.prompt_id,
        policy_version=wire.policy_version,
        prompt_ids=_ids("prompt_ids", [r.prompt_ids for r in rollouts]),
        prompt_lengths=np.array([len(r.prompt_ids) for r in rollouts], np.int32),
        completion_ids=_ids("completion_ids", [r.completion_ids for r in rollouts]),
        completion_lengths=np.array([len(r.completion_ids) for r in rollouts], np.int32),
        completion_mask=_mask(rollouts),
        inference_logprobs=_flat([r.inference_logprobs for r in rollouts]),
        rewards=np.array([r.reward for r in rollouts], np.float64),
        advantages=np.array([r.advantage for r in rollouts], np.float64) if rollouts and all(has_advantage) else None,
        reward_parts={name: np.array([r.rewards[name] for r in rollouts], np.float64) for name in names},
        version_spans=_spans(wire),
        temperatures=_flat([[r.temperature for r in rollouts]]),
        finish_reasons=tuple(r.finish_reason for r in rollouts),
        ticket=wire.ticket,
        prompt_index=wire.prompt_index,
        adapter=wire.adapter,
        metadata=wire.metadata,
        **optional,
    )


def group_to_json(group: Group) -> GroupJson:
    """Turn columns into the wire form (Python lists)."""
    prompt_ends = np.cumsum(group.prompt_lengths).tolist()
    ends = np.cumsum(group.completion_lengths).tolist()
    rollouts = []
    for number in range(group.rollouts):
        prompt = slice(prompt_ends[number] - int(group.prompt_lengths[number]), prompt_ends[number])
        completion = slice(ends[number] - int(group.completion_lengths[number]), ends[number])
        spans = group.version_spans[group.version_spans[:, 0] == number, 1:].tolist()
        optional: dict[str, Any] = {name: _listed(getattr(group, name), completion) for name in OPTIONAL_PER_TOKEN}
        rollouts.append(
            RolloutJson(
                prompt_ids=group.prompt_ids[prompt].tolist(),
                completion_ids=group.completion_ids[completion].tolist(),
                completion_mask=group.completion_mask[completion].astype(np.int32).tolist(),
                inference_logprobs=group.inference_logprobs[completion].tolist(),
                reward=float(group.rewards[number]),
                rewards={name: float(part[number]) for name, part in group.reward_parts.items()},
                advantage=None if group.advantages is None else float(group.advantages[number]),
                version_spans=[(span[0], span[1], span[2]) for span in spans],
                finish_reason=group.finish_reasons[number],
                temperature=float(group.temperatures[number]),
                **optional,
            )
        )
    return GroupJson(
        group_id=group.group_id,
        ticket=group.ticket,
        prompt_index=group.prompt_index,
        prompt_id=group.prompt_id,
        adapter=group.adapter,
        policy_version=group.policy_version,
        rollouts=rollouts,
        metadata=group.metadata,
    )


def _listed(column: Float32s | None, completion: slice) -> list[float] | None:
    return None if column is None else column[completion].tolist()


def check_group(group: Group, bounds: GroupLimits) -> Rejection | None:
    """Say why `group` may not enter a run with these bounds, or None. All rollouts are judged together."""
    return (
        _check_size(group, bounds)
        or _check_tokens(group, bounds)
        or _check_numbers(group)
        or _check_spans(group)
        or _check_published(group, bounds)
        or check_room(group.tokens, int(group.lengths.max()), bounds)
        or _check_metadata(group)
    )


def _check_size(group: Group, bounds: GroupLimits) -> Rejection | None:
    if group.adapter not in (bounds.adapters or {""}):
        return Rejection("unknown_adapter", f"adapter is {group.adapter!r}; the run has {sorted(bounds.adapters)}")
    if group.prompt_index is not None and not 0 <= group.prompt_index <= LARGEST_PROMPT_INDEX:
        return Rejection(
            "bad_prompt_index", f"prompt_index is {group.prompt_index}; it must be in 0..{LARGEST_PROMPT_INDEX}"
        )
    if not group.rollouts:
        return Rejection("no_rollouts", "rollouts is empty; a group has at least one")
    if bounds.group_size is not None and group.rollouts != bounds.group_size:
        return Rejection("wrong_group_size", f"rollouts is {group.rollouts}; group_size is {bounds.group_size}")
    if int(group.prompt_lengths.min()) < 1:
        return Rejection("empty_prompt", "a rollout has 0 prompt tokens; at least 1 is needed")
    if int(group.completion_lengths.min()) < 1:
        return Rejection("empty_completion", "a rollout has 0 completion tokens; at least 1 is needed")
    return None


def check_room(tokens: int, longest: int, bounds: GroupLimits) -> Rejection | None:
    """Return why a group of so many tokens, with a longest rollout of so many, is too large; None if it is not."""
    if bounds.seq_len is not None and longest > bounds.seq_len:
        return Rejection("overlong", f"a rollout has {longest} tokens; seq_len is {bounds.seq_len}")
    if bounds.tokens_per_batch is not None and tokens > bounds.tokens_per_batch:
        return Rejection("over_budget", f"the group has {tokens} tokens; tokens_per_batch is {bounds.tokens_per_batch}")
    return None


def _check_tokens(group: Group, bounds: GroupLimits) -> Rejection | None:
    for name, ids in (("prompt_ids", group.prompt_ids), ("completion_ids", group.completion_ids)):
        low, high = int(ids.min()), int(ids.max())
        if low < 0:
            return Rejection("token_out_of_range", f"{name} holds {low}; token ids start at 0")
        if bounds.vocab_size is not None and high >= bounds.vocab_size:
            return Rejection("token_out_of_range", f"{name} holds {high}; vocab_size is {bounds.vocab_size}")
    return None


def _check_numbers(group: Group) -> Rejection | None:
    for name in LOGPROBS:
        column: Float32s | None = getattr(group, name)
        if column is None:
            continue
        highest = column.max()
        if not (np.isfinite(highest) and np.isfinite(column.min())):  # NaN is both, where there is one
            return Rejection("non_finite_logprobs", f"{name} holds NaN or infinity; finite values are needed")
        if highest > np.float32(LOGPROB_TOLERANCE):
            return Rejection("positive_logprobs", f"{name} holds {highest:.6g}; at most {LOGPROB_TOLERANCE} is allowed")
    for name, values in [("reward", group.rewards), *((f"rewards.{k}", v) for k, v in group.reward_parts.items())]:
        if not (np.abs(values) <= LARGEST_SCORE).all():
            return Rejection("non_finite_rewards", f"{name} holds NaN, infinity or a value beyond float32")
    for name, given in (("advantage", group.advantages), ("token_advantages", group.token_advantages)):
        if given is not None and not (np.abs(given) <= LARGEST_SCORE).all():
            return Rejection("non_finite_advantages", f"{name} holds NaN, infinity or a value beyond float32")
    if not (np.isfinite(group.temperatures).all() and (group.temperatures >= 0).all()):
        return Rejection("bad_temperature", "temperature holds a negative or non-finite value; 0 or more is needed")
    return None


def _check_spans(group: Group) -> Rejection | None:
    spans = group.version_spans
    if not len(spans):
        return Rejection("bad_version_spans", "version_spans is empty; they cover each completion once")
    if not (_one_span_each(group) or _cover_once(group)):
        return Rejection(
            "bad_version_spans", "version_spans do not cover each completion once, from token 0 to its end"
        )
    oldest = int(spans[:, 1].min())
    if oldest < 0 or oldest != group.policy_version:
        return Rejection(
            "bad_version_spans",
            f"policy_version is {group.policy_version}; the oldest version in version_spans is {oldest}",
        )
    return None


def _one_span_each(group: Group) -> bool:
    """Say whether each rollout has one span over all of it, in order.

    Most groups are so, and a few numbers are compared in a tenth of the time that `_cover_once` takes.
    """
    if len(group.version_spans) != group.rollouts:
        return False
    rollouts, _, starts, ends = group.version_spans.T.tolist()
    return (
        rollouts == list(range(group.rollouts))
        and not any(starts)
        and all(ends)
        and ends == group.completion_lengths.tolist()
    )


def _cover_once(group: Group) -> bool:
    """Say whether the spans, in whatever order, cover each completion once, from token 0 to its end."""
    spans = group.version_spans
    order = np.lexsort((spans[:, 2], spans[:, 0]))
    spans = spans[order]
    starts_rollout = np.ones(len(spans), np.bool_)
    np.not_equal(spans[1:, 0], spans[:-1, 0], out=starts_rollout[1:])
    ends_rollout = np.append(starts_rollout[1:], True)
    expected_start = np.zeros(len(spans), np.int32)
    np.copyto(expected_start[1:], spans[:-1, 3], where=~starts_rollout[1:])
    return (
        np.array_equal(spans[starts_rollout, 0], np.arange(group.rollouts))
        and bool((spans[:, 2] == expected_start).all())
        and bool((spans[:, 3] > spans[:, 2]).all())
        and np.array_equal(spans[ends_rollout, 3], group.completion_lengths)
    )


def _check_published(group: Group, bounds: GroupLimits) -> Rejection | None:
    if bounds.published_version is not None and group.policy_version_max > bounds.published_version:
        return Rejection(
            "version_above_published",
            f"the newest policy version is {group.policy_version_max}; "
            f"the published version is {bounds.published_version}",
        )
    return None


def _check_metadata(group: Group) -> Rejection | None:
    try:
        check_metadata("metadata", group.metadata)
    except Invalid as error:
        return Rejection("bad_metadata", error.detail)
    return None


def _refused(reason: str, name: str, value: object, bound: str) -> GroupRejected:
    return GroupRejected(reason, f"{name}: {value}; needed: {bound}", name=name, value=str(value), bound=bound)


def _check_lengths(number: int, rollout: RolloutJson) -> None:
    expected = len(rollout.completion_ids)
    for name in ("completion_mask", "inference_logprobs", *OPTIONAL_PER_TOKEN):
        values = getattr(rollout, name)
        if values is not None and len(values) != expected:
            raise _refused(
                "length_mismatch",
                f"rollouts[{number}].{name}",
                f"{len(values)} values",
                f"one per completion token, {expected}",
            )


def _ids(name: str, lists: Sequence[list[int]]) -> Int32s:
    flat = [token for ids in lists for token in ids]
    try:
        return np.array(flat, np.int32)
    except OverflowError:
        raise _refused("token_out_of_range", name, max(flat, key=abs), "a 32-bit token id") from None


def _flat(lists: Sequence[list[float]]) -> Float32s:
    with np.errstate(over="ignore"):  # what overflows float32 becomes infinite and is refused as such
        return np.array([value for values in lists for value in values], np.float32)


def _optional(name: str, lists: Sequence[list[float] | None]) -> Float32s | None:
    present = [values for values in lists if values is not None]
    if not present:
        return None
    if len(present) != len(lists):
        raise _refused("length_mismatch", name, "missing for some rollouts", "given for all rollouts or none")
    return _flat(present)


def _mask(rollouts: Sequence[RolloutJson]) -> Bools:
    masks = [r.completion_mask if r.completion_mask is not None else [1] * len(r.completion_ids) for r in rollouts]
    flat = [bit for mask in masks for bit in mask]
    if any(bit not in (0, 1) for bit in flat):
        raise _refused("bad_mask", "completion_mask", "a value other than 0 and 1", "0 or 1")
    return np.array(flat, np.bool_)


def _spans(wire: GroupJson) -> Int32s:
    spans = [
        (number, *span)
        for number, rollout in enumerate(wire.rollouts)
        for span in (
            rollout.version_spans
            if rollout.version_spans is not None
            else [(wire.policy_version, 0, len(rollout.completion_ids))]
        )
    ]
    try:
        return np.array(spans, np.int32).reshape(-1, 4)
    except OverflowError:
        raise _refused("bad_version_spans", "version_spans", "a number above 2^31", "a 32-bit number") from None


def truncate(group: Group, seq_len: int) -> Group:
    """Cut completions so that no rollout is longer than `seq_len` tokens; the same group where none is.

    At least one completion token stays, so a prompt of `seq_len` tokens or more still makes its rollout too long.
    A group whose version spans are wrong stays as it is: it is to be refused, not mended.
    """
    room = np.maximum(seq_len - group.prompt_lengths, 1)
    lengths = np.minimum(group.completion_lengths, room).astype(np.int32)
    if np.array_equal(lengths, group.completion_lengths) or _check_spans(group):
        return group
    starts = np.cumsum(group.completion_lengths) - group.completion_lengths
    keep = np.concatenate([np.arange(s, s + n) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)])
    cut = lengths < group.completion_lengths
    spans = group.version_spans.copy()
    ends = lengths[spans[:, 0]]
    spans[:, 3] = np.minimum(spans[:, 3], ends)
    spans = spans[spans[:, 2] < spans[:, 3]]
    columns: dict[str, Any] = {name: getattr(group, name) for name in OPTIONAL_PER_TOKEN}
    return msgspec.structs.replace(
        group,
        policy_version=int(spans[:, 1].min()) if len(spans) else group.policy_version,
        completion_ids=group.completion_ids[keep],
        completion_lengths=lengths,
        completion_mask=group.completion_mask[keep],
        inference_logprobs=group.inference_logprobs[keep],
        version_spans=spans,
        finish_reasons=tuple("length" if c else r for c, r in zip(cut.tolist(), group.finish_reasons, strict=True)),
        **{name: None if column is None else column[keep] for name, column in columns.items()},
    )
