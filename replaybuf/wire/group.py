"""A group: the rollouts of one prompt, scored together. The atomic unit of the buffer.

Two forms with the same fields: `GroupJson` is the JSON form (lists, one object per rollout), `Group` the form in memory
(numpy columns over all rollouts, in rollout order). Shapes: n rollouts, P prompt tokens and C completion tokens in
total; `completion_ids` [C] holds all completions in order, `completion_lengths` [n] the length of each.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import GroupRejected, counted
from replaybuf.wire.drop_reasons import RejectionReason
from replaybuf.wire.names import Name
from replaybuf.wire.proofs import join_proofs, split_proofs

OptionalLogprobs: TypeAlias = Literal["ref_logprobs", "old_logprobs", "teacher_logprobs"]
"""Logprobs, float32 [C] in nats, that a group may have besides those of sampling.

`old_logprobs`: of one policy version, the proximal policy of decoupled PPO (Fu et al. 2025, AReaL).
"""
OPTIONAL_LOGPROBS: tuple[OptionalLogprobs, ...] = get_args(OptionalLogprobs)
LOGPROBS = ("inference_logprobs", *OPTIONAL_LOGPROBS)
OPTIONAL_PER_TOKEN = (*OPTIONAL_LOGPROBS, "token_advantages")
"""Optional columns with a value per completion token."""

LARGEST_ROLLOUTS = 1 << 15
LARGEST_REWARD_PARTS = 256
LARGEST_SCORE = float(np.finfo(np.float32).max)
"""Rewards and advantages reach the trainer as float32; larger values would become infinity."""

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Uint8s = npt.NDArray[np.uint8]
TokenIds: TypeAlias = Sequence[int] | Int32s
"""One sequence of token ids: a list, or int32 [T]."""


def hash_name(name: str) -> int:
    """Return a 31-bit number for the name of an adapter or source, the same on any machine; 0 = no name."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF if name else 0


class RolloutJson(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One sampled completion in JSON. Lists over completion tokens have equal length; logprobs in nats.

    `prompt_mask` and `prompt_logprobs` have a value per prompt token. `proof` is base64, for an admission plug-in.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    inference_logprobs: list[float]
    reward: float
    prompt_mask: list[int] | None = None
    prompt_logprobs: list[float] | None = None
    completion_mask: list[int] | None = None
    ref_logprobs: list[float] | None = None
    old_logprobs: list[float] | None = None
    teacher_logprobs: list[float] | None = None
    token_advantages: list[float] | None = None
    rewards: dict[Name, float] = {}
    advantage: float | None = None
    version_spans: list[tuple[int, int, int]] | None = None
    finish_reason: Name | None = None
    temperature: float = 1.0
    proof: bytes | None = None


class GroupJson(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One group in JSON, the body of `POST /v1/runs/{run}/groups`."""

    prompt_id: Name
    policy_version: int
    rollouts: list[RolloutJson]
    group_id: Name | None = None
    ticket: Name | None = None
    prompt_index: int | None = None
    adapter: Name = ""
    metadata: dict[str, Any] = {}


class Group(msgspec.Struct, frozen=True, eq=False, kw_only=True, gc=False):
    """One group as columns.

    - `prompt_ids` int32 [P], `prompt_lengths` int32 [n]
    - `completion_ids` int32 [C], `completion_lengths` int32 [n]
    - `completion_mask` bool [C]: False = token not sampled by the policy (tool or environment text)
    - `prompt_mask` bool [P]: True = the token is in the loss; None = none is. `prompt_logprobs` float32 [P], nats: of
      the policy that wrote it
    - `inference_logprobs`, `ref_logprobs`, `old_logprobs`, `teacher_logprobs` float32 [C], nats
    - `rewards`, `advantages` float64 [n]; `reward_parts` float64 [n] by name
    - `token_advantages` float32 [C]: replace the advantage of the whole rollout
    - `version_spans` int32 [k, 4]: rollout, policy version, first completion token, one past the last
    - `temperatures` float32 [n], `finish_reasons` one per rollout
    - `proofs` uint8 [B]: the proofs of all rollouts, one after another; `proof_lengths` int32 [n]: bytes of each
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
    prompt_mask: Bools | None = None
    prompt_logprobs: Float32s | None = None
    ref_logprobs: Float32s | None = None
    old_logprobs: Float32s | None = None
    teacher_logprobs: Float32s | None = None
    token_advantages: Float32s | None = None
    advantages: Float64s | None = None
    reward_parts: dict[str, Float64s] = {}
    proofs: Uint8s | None = None
    proof_lengths: Int32s | None = None
    ticket: str | None = None
    prompt_index: int | None = None
    adapter: str = ""
    metadata: dict[str, Any] = {}

    @property
    def rollouts(self) -> int:
        """The number of rollouts."""
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> Int32s:
        """Tokens per rollout, prompt and completion, int32 [n]."""
        return self.prompt_lengths + self.completion_lengths

    @property
    def sampled_lengths(self) -> Int32s:
        """Tokens per rollout that the policy sampled as its completion, int32 [n]."""
        if self.completion_mask.all():
            return self.completion_lengths
        return _count(self.completion_mask, self.completion_lengths)

    @property
    def loss_lengths(self) -> Int32s:
        """Tokens per rollout in the loss, of prompt and completion, int32 [n]."""
        if self.prompt_mask is None:
            return self.sampled_lengths
        return self.sampled_lengths + _count(self.prompt_mask, self.prompt_lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all rollouts, prompts and completions."""
        # In lists: numpy takes longer for a group's few lengths.
        tokens: int = sum(self.prompt_lengths.tolist()) + sum(self.completion_lengths.tolist())
        return tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        nbytes = 0
        for column in (*_columns_of(self), *self.reward_parts.values()):
            if column is not None:
                nbytes += column.nbytes
        return nbytes

    @property
    def policy_version_max(self) -> int:
        """The newest version that sampled a token of this group."""
        if not len(self.version_spans):
            return self.policy_version
        newest: int = max(self.version_spans[:, 1].tolist())
        return newest


def _count(mask: Bools, lengths: Int32s) -> Int32s:
    """Count the True values of consecutive parts of a mask, int32 [n]."""
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    starts = [0, *ends[:-1]]
    return np.array([np.count_nonzero(mask[a:b]) for a, b in zip(starts, ends, strict=True)], np.int32)


_COLUMNS = ("prompt_ids", "prompt_lengths", "prompt_mask", "prompt_logprobs", *LOGPROBS)
_COLUMNS += ("completion_ids", "completion_lengths", "completion_mask")
_COLUMNS += ("rewards", "advantages", "token_advantages", "version_spans", "temperatures", "proofs", "proof_lengths")
_columns_of = operator.attrgetter(*_COLUMNS)


def group_from_json(wire: GroupJson) -> Group:
    """Convert the JSON form to columns; a rollout may have arrays instead of lists.

    Raises `GroupRejected` if the lists of a rollout differ in length or a number does not fit its column. All other
    checks are in `check_group`.
    """
    rollouts = wire.rollouts
    check_rollouts(len(rollouts))
    for number, rollout in enumerate(rollouts):
        _check_lengths(number, rollout)
    has_advantage = [rollout.advantage is not None for rollout in rollouts]
    if any(has_advantage) and not all(has_advantage):
        raise _rejected("partial_advantages", "advantage", _SOME, _ALL_OR_NONE)
    optional: dict[str, Any] = {
        name: _optional(name, [getattr(rollout, name) for rollout in rollouts]) for name in OPTIONAL_PER_TOKEN
    }
    prompt_lengths = [len(rollout.prompt_ids) for rollout in rollouts]
    completion_lengths = [len(rollout.completion_ids) for rollout in rollouts]
    names = sorted({name for rollout in rollouts for name in rollout.rewards})
    if len(names) > LARGEST_REWARD_PARTS:
        raise _rejected("too_large", "rewards", f"{len(names)} names", f"at most {LARGEST_REWARD_PARTS}")
    if any(len(rollout.rewards) != len(names) for rollout in rollouts):
        raise _rejected("length_mismatch", "rewards", "different names per rollout", "the same names in every rollout")
    return Group(
        group_id=wire.group_id,
        prompt_id=wire.prompt_id,
        policy_version=wire.policy_version,
        prompt_ids=_ids("prompt_ids", [r.prompt_ids for r in rollouts]),
        prompt_lengths=np.array(prompt_lengths, np.int32),
        completion_ids=_ids("completion_ids", [r.completion_ids for r in rollouts]),
        completion_lengths=np.array(completion_lengths, np.int32),
        completion_mask=_mask("completion_mask", [r.completion_mask for r in rollouts], completion_lengths, absent=1),
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
        **_prompt_columns(rollouts, prompt_lengths),
        **join_proofs([rollout.proof for rollout in rollouts]),
        **optional,
    )


def group_to_json(group: Group) -> GroupJson:
    """Convert columns to the JSON form (Python lists)."""
    rollouts = []
    for fields in split_rollouts(group):
        lists = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in fields.items()}
        lists["version_spans"] = [tuple(span) for span in lists["version_spans"]]
        rollouts.append(RolloutJson(**lists))
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


def split_rollouts(group: Group) -> Iterator[dict[str, Any]]:
    """Yield the fields of each rollout, as `RolloutJson` has them, but arrays instead of lists of numbers."""
    prompt_ends = np.cumsum(group.prompt_lengths).tolist()
    ends = np.cumsum(group.completion_lengths).tolist()
    spans = group.version_spans[np.argsort(group.version_spans[:, 0], kind="stable")]
    span_ends = np.searchsorted(spans[:, 0], np.arange(group.rollouts + 1)).tolist()
    proofs = split_proofs(group.proofs, group.proof_lengths, group.rollouts)
    mask = group.completion_mask.view(np.int8)
    prompt_mask = None if group.prompt_mask is None else group.prompt_mask.view(np.int8)
    for number in range(group.rollouts):
        prompt = slice(prompt_ends[number] - int(group.prompt_lengths[number]), prompt_ends[number])
        completion = slice(ends[number] - int(group.completion_lengths[number]), ends[number])
        optional = {name: getattr(group, name) for name in OPTIONAL_PER_TOKEN}
        yield {
            "prompt_ids": group.prompt_ids[prompt],
            "completion_ids": group.completion_ids[completion],
            "inference_logprobs": group.inference_logprobs[completion],
            "reward": float(group.rewards[number]),
            "prompt_mask": None if prompt_mask is None else prompt_mask[prompt],
            "prompt_logprobs": None if group.prompt_logprobs is None else group.prompt_logprobs[prompt],
            "completion_mask": mask[completion],
            **{name: None if column is None else column[completion] for name, column in optional.items()},
            "rewards": {name: float(part[number]) for name, part in group.reward_parts.items()},
            "advantage": None if group.advantages is None else float(group.advantages[number]),
            "version_spans": spans[span_ends[number] : span_ends[number + 1], 1:],
            "finish_reason": group.finish_reasons[number],
            "temperature": float(group.temperatures[number]),
            "proof": proofs[number],
        }


_PER_PROMPT = ("prompt_mask", "prompt_logprobs")
_SOME, _ALL_OR_NONE = "missing for some rollouts", "given for all rollouts or none"


def _rejected(reason: RejectionReason, name: str, value: object, bound: str) -> GroupRejected:
    return GroupRejected(reason, f"{name}: {value}; needed: {bound}", name=name, value=str(value), bound=bound)


def _check_lengths(number: int, rollout: RolloutJson) -> None:
    per_completion = ("completion_mask", "inference_logprobs", *OPTIONAL_PER_TOKEN)
    per_token = (("completion", rollout.completion_ids, per_completion), ("prompt", rollout.prompt_ids, _PER_PROMPT))
    for what, ids, names in per_token:
        for name in names:
            values = getattr(rollout, name)
            if values is not None and len(values) != len(ids):
                raise _rejected(
                    "length_mismatch",
                    f"rollouts[{number}].{name}",
                    counted(len(values), "value"),
                    f"one per {what} token, {len(ids)}",
                )


def check_rollouts(rollouts: int) -> None:
    """Raise `GroupRejected` for more rollouts than a group may have."""
    if rollouts > LARGEST_ROLLOUTS:
        detail = f"the group has {rollouts} rollouts; the maximum is {LARGEST_ROLLOUTS}"
        raise GroupRejected("too_large", detail, name="rollouts", value=rollouts, bound=LARGEST_ROLLOUTS)


def _ids(name: str, lists: Sequence[TokenIds]) -> Int32s:
    flat = _joined(lists)
    try:
        return np.asarray(flat).astype(np.int32) if isinstance(flat, np.ndarray) else np.array(flat, np.int32)
    except OverflowError:
        raise _rejected("token_out_of_range", name, max(flat, key=abs), "a 32-bit token id") from None


def _joined(lists: Sequence[Any]) -> Any:
    """Join lists or arrays."""
    if lists and isinstance(lists[0], np.ndarray):
        return np.concatenate(lists)
    return [value for values in lists for value in values]


def _flat(lists: Sequence[list[float]]) -> Float32s:
    with np.errstate(over="ignore"):  # an overflow becomes infinity, which `check_group` rejects
        return np.asarray(_joined(lists), np.float32)


def _optional(name: str, lists: Sequence[list[float] | None]) -> Float32s | None:
    present = [values for values in lists if values is not None]
    if not present:
        return None
    if len(present) != len(lists):
        raise _rejected("length_mismatch", name, _SOME, _ALL_OR_NONE)
    return _flat(present)


def _mask(name: str, masks: Sequence[Any], lengths: Sequence[int], *, absent: int) -> Bools:
    """Join the masks of all rollouts; a rollout without one has `absent` at each of its tokens."""
    flat = _joined([[absent] * n if mask is None else mask for mask, n in zip(masks, lengths, strict=True)])
    if not (np.isin(flat, (0, 1)).all() if isinstance(flat, np.ndarray) else {0, 1}.issuperset(flat)):
        raise _rejected("bad_mask", name, "a value other than 0 and 1", "0 or 1")
    return np.asarray(flat, np.bool_)


def _prompt_columns(rollouts: Sequence[RolloutJson], lengths: Sequence[int]) -> dict[str, Any]:
    """Return mask and logprobs of the prompt tokens, 0 where a token is not in the loss; none if no token is."""
    masks = [rollout.prompt_mask for rollout in rollouts]
    if all(mask is None for mask in masks):
        return {}
    mask = _mask("prompt_mask", masks, lengths, absent=0)
    if not mask.any():
        return {}
    for number, rollout in enumerate(rollouts):
        if rollout.prompt_logprobs is None and rollout.prompt_mask is not None and np.any(rollout.prompt_mask):
            name, bound = f"rollouts[{number}].prompt_logprobs", f"one per prompt token, {lengths[number]}"
            raise _rejected("length_mismatch", name, "missing, and prompt_mask has a 1", bound)
    logprobs = _flat(
        [[0.0] * n if r.prompt_logprobs is None else r.prompt_logprobs for r, n in zip(rollouts, lengths, strict=True)]
    )
    return {"prompt_mask": mask, "prompt_logprobs": np.where(mask, logprobs, np.float32(0))}


def _spans(wire: GroupJson) -> Int32s:
    spans = [
        (number, *span)
        for number, rollout in enumerate(wire.rollouts)
        for span in _spans_of(rollout, wire.policy_version)
    ]
    try:
        return np.array(spans, np.int32).reshape(-1, 4)
    except OverflowError:
        raise _rejected("bad_version_spans", "version_spans", "a number above 2^31", "a 32-bit number") from None


def _spans_of(rollout: RolloutJson, policy_version: int) -> list[tuple[int, int, int]]:
    if rollout.version_spans is None:
        return [(policy_version, 0, len(rollout.completion_ids))]
    return rollout.version_spans
