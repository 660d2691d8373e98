"""The body of a batch: one safetensors file for one data-parallel rank.

Micro-batch `i` has the tensors `i.input_ids` and so on; `MicroBatch` lists them with their shapes. The metadata key
`replaybuf` holds `BatchMeta` as JSON. Position t of a row holds token t with its mask, advantage and logprob. These
are 0 on padding, on completion tokens that the policy did not sample, and on prompt tokens outside `prompt_mask`. Those
in it have the advantage of their rollout, and `prompt_logprobs` in every column of logprobs that their group has.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import Malformed, counted
from replaybuf.wire.column.token_versions import NO_VERSION
from replaybuf.wire.group import LOGPROBS, OPTIONAL_LOGPROBS, Bools, Float32s, Group, Int32s
from replaybuf.wire.tensor_file import BOOL, FLOAT32, INT32, Field, allocate, split_file, view_tensor

METADATA_KEY = "replaybuf"
BodyExtra: TypeAlias = Literal["token_versions", "lengths", "reward_parts", "metadata"]
"""Parts of a body that a trainer asks for when it attaches."""
BODY_EXTRAS: tuple[BodyExtra, ...] = get_args(BodyExtra)


class RewardPart(msgspec.Struct, frozen=True):
    """Mean of one part of the reward, over the rollouts of a batch that have it."""

    mean: float
    rollouts: int


class BatchMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a body. `tokens` ... `rollouts` are of this rank, `batch_*` of all ranks.

    `version` is the policy version that this step trains, 0 in a run with adapters. `adapters` has one name per
    micro-batch. `group_ids` are the groups of this rank, indexed by `group_index`. `adapters_completed`: adapters whose
    own step this batch completes, with that step. `batch_masked_tokens`: sampled tokens that are too old for the loss,
    in a run with `stale_token_mask`. `batch_reward_mean`, `batch_reward_parts` if the trainer asked for them.
    `group_metadata`, if it asked: that of each of `group_ids`; None if it is not JSON, and once all of the batch take
    more than 16 MiB. Nothing depends on the epoch.
    """

    run: str
    step: int
    generation: int
    batch_id: str
    digest: str
    dp_rank: int
    dp_world_size: int
    version: int
    strategy: str
    options: dict[str, Any]
    micro_batches: int
    adapters: list[str]
    group_ids: list[str]
    tokens: int
    padding: int
    loss_tokens: int
    rollouts: int
    batch_tokens: int
    batch_loss_tokens: int
    batch_rollouts: int
    batch_groups: int
    adapters_completed: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    batch_masked_tokens: int | msgspec.UnsetType = msgspec.UNSET
    batch_reward_mean: float | msgspec.UnsetType = msgspec.UNSET
    batch_reward_parts: dict[str, RewardPart] | msgspec.UnsetType = msgspec.UNSET
    group_metadata: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET


# Built at import: msgspec 0.22 crashes if two threads use a struct for the first time at once.
_decode_meta = msgspec.json.Decoder(BatchMeta).decode


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """One packed row of L tokens holding n rollouts; all arrays are read-only views into the body.

    - `input_ids`, `position_ids` int32 [L]; positions restart at 0 with every rollout
    - `loss_mask` bool [L]; `advantages`, `inference_logprobs`, `ref_logprobs`, `old_logprobs`, `teacher_logprobs`
      float32 [L]
    - `cu_seqlens` int32 [n+1], or [n+2] if padding is the last segment
    - `rewards`, `temperatures`, `sampling_weights` float32 [n]; `policy_versions`, `staleness`, `times_sampled`,
      `group_index`, `rollout_index` int32 [n]
    - if the trainer asked for them: `prompt_lengths`, `completion_lengths` int32 [n], and `token_versions` int32 [L],
      the version that sampled each token, -1 for prompts, padding and text of the environment
    """

    input_ids: Int32s
    position_ids: Int32s
    loss_mask: Bools
    advantages: Float32s
    inference_logprobs: Float32s
    cu_seqlens: Int32s
    rewards: Float32s
    policy_versions: Int32s
    staleness: Int32s
    times_sampled: Int32s
    group_index: Int32s
    rollout_index: Int32s
    temperatures: Float32s
    ref_logprobs: Float32s | None = None
    old_logprobs: Float32s | None = None
    teacher_logprobs: Float32s | None = None
    sampling_weights: Float32s | None = None
    prompt_lengths: Int32s | None = None
    completion_lengths: Int32s | None = None
    token_versions: Int32s | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's part of a batch."""

    meta: BatchMeta
    micro_batches: list[MicroBatch]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BatchGroup:
    """A group in one batch: its columns and the ledger's facts about this use.

    `index` is its position among the groups of the rank; `sampling_weight` comes from the strategy, if it gives any.
    `token_versions` int32 [C]: needed for a body with that extra.
    """

    group: Group
    index: int
    staleness: int
    times_sampled: int
    sampling_weight: float | None = None
    token_versions: Int32s | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """One rollout of a row: its group, and its number in that group."""

    group: BatchGroup
    rollout: int


def encode_batch(
    meta: BatchMeta,
    rows: Sequence[Sequence[Segment]],
    *,
    pad_to_multiple_of: int = 1,
    extras: Collection[BodyExtra] = (),
) -> memoryview:
    """Write the body of one rank: `rows[i]` are the rollouts of micro-batch `i`, in order.

    A row is padded to a multiple of `pad_to_multiple_of`; an empty row gets one padding segment. `extras` adds
    tensors; `meta` has the other extras. The same arguments give the same bytes.
    """
    rollouts = _rollouts_of([segment for row in rows for segment in row], extras)
    counts = [len(row) for row in rows]
    ends = [0, *itertools.accumulate(counts)]
    marks = [[0, *itertools.accumulate(rollouts.tokens[first:last])] for first, last in itertools.pairwise(ends)]
    lengths = [padded_length(own[-1], pad_to_multiple_of) for own in marks]
    for own, length in zip(marks, lengths, strict=True):
        if length > own[-1]:  # the padding is a segment
            own.append(length)
    fields = [
        Field("input_ids", INT32, lengths),
        Field("position_ids", INT32, lengths),
        Field("loss_mask", BOOL, lengths),
        Field("advantages", FLOAT32, lengths),
        *(Field(name, FLOAT32, lengths) for name in rollouts.logprobs),
        Field("cu_seqlens", INT32, [len(own) for own in marks]),
        *(Field(name, values.dtype, counts) for name, values in rollouts.numbers.items()),
        *([] if rollouts.versions is None else [Field("token_versions", INT32, lengths)]),
    ]
    body = allocate({METADATA_KEY: msgspec.json.encode(meta).decode()}, fields, len(rows))
    numbers = np.stack([values.view(np.int32) for values in rollouts.numbers.values()])
    blank = _Blank.of(max(lengths, default=0))
    for number, own in enumerate(marks):
        out = body.words[body.word_starts[number] :]
        mask = body.flags[body.flag_starts[number] :][: lengths[number]]
        _fill(rollouts, range(ends[number], ends[number + 1]), own, numbers, out, mask, blank)
    return body.whole


def read_batch(body: bytes | bytearray | memoryview) -> Batch:
    """Read a body into views. Raises `Malformed` if it is not a body or is cut short."""
    header, data = split_file(body)
    try:
        meta = _decode_meta(header.pop("__metadata__")[METADATA_KEY])
        tensors = {name: view_tensor(data, entry) for name, entry in header.items()}
        if not 0 <= meta.micro_batches <= len(tensors):
            detail = f"{counted(meta.micro_batches, 'micro-batch')} do not fit {counted(len(tensors), 'tensor')}"
            raise ValueError(detail)
        rows: dict[str, dict[str, Any]] = {str(number): {} for number in range(meta.micro_batches)}
        for name, view in tensors.items():
            number, _, field = name.partition(".")
            rows[number][field] = view
        return Batch(meta, [MicroBatch(**row) for row in rows.values()])
    except (KeyError, IndexError, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise Malformed(f"batch body does not match its header: {error}", name="body") from error


def padded_length(tokens: int, pad_to_multiple_of: int) -> int:
    """Round a row's tokens up to a multiple; an empty row is one multiple long."""
    return max(1, -(-tokens // pad_to_multiple_of)) * pad_to_multiple_of


class _Rollouts(NamedTuple):
    """The rollouts of a body in row order.

    - `groups`, `places`: the group of each, and its number in that group
    - `prompts`, `completions`: its tokens in the columns of its group; `tokens`: their number
    - `numbers`: columns with one value per rollout, by name
    - `logprobs`: names of logprob columns that any group has
    - `versions`: the token versions of its group; None without that extra
    """

    groups: list[Group]
    places: list[int]
    prompts: list[slice]
    completions: list[slice]
    tokens: list[int]
    numbers: dict[str, npt.NDArray[Any]]
    logprobs: list[str]
    versions: list[Int32s | None] | None


class _Blank(NamedTuple):
    """Constant parts of rows: zeros for prompts and padding, and positions from 0."""

    ids: Int32s
    zeros: Float32s
    falses: Bools
    positions: Int32s

    @classmethod
    def of(cls, length: int) -> _Blank:
        """Build constants for `length` tokens."""
        zeros = np.zeros(length, np.float32)
        return cls(zeros.view(np.int32), zeros, np.zeros(length, np.bool_), np.arange(length, dtype=np.int32))


def _rollouts_of(segments: Sequence[Segment], extras: Collection[BodyExtra]) -> _Rollouts:
    """Look up all rollouts in their groups at once: a body has thousands."""
    uses = list({id(segment.group): segment.group for segment in segments}.values())
    position = {id(use): number for number, use in enumerate(uses)}
    owners = np.array([position[id(segment.group)] for segment in segments], np.intp)
    places = [segment.rollout for segment in segments]
    first = np.array([0, *itertools.accumulate(use.group.rollouts for use in uses)], np.intp)[owners]
    at = first + np.array(places, np.intp)

    def per_rollout(name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype), *(getattr(use.group, name) for use in uses)], dtype=dtype)[at]

    def per_group(values: list[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.array(values, dtype)[owners]

    def spans(name: str) -> tuple[list[slice], Int32s]:
        lengths = np.concatenate([np.zeros(1, np.int32), *(getattr(use.group, name) for use in uses)])
        ends = np.cumsum(lengths)
        starts = ends[at] - ends[first]  # relative to the start of the group
        tokens = lengths[at + 1]
        return list(map(slice, starts.tolist(), (starts + tokens).tolist())), tokens

    prompts, prompt_tokens = spans("prompt_lengths")
    completions, completion_tokens = spans("completion_lengths")
    numbers = {
        "rewards": per_rollout("rewards", np.float32),
        "policy_versions": per_group([use.group.policy_version for use in uses], np.int32),
        "staleness": per_group([use.staleness for use in uses], np.int32),
        "times_sampled": per_group([use.times_sampled for use in uses], np.int32),
        "group_index": per_group([use.index for use in uses], np.int32),
        "rollout_index": np.array(places, np.int32),
        "temperatures": per_rollout("temperatures", np.float32),
    }
    if any(use.sampling_weight is not None for use in uses):
        weights = [1.0 if use.sampling_weight is None else use.sampling_weight for use in uses]
        numbers["sampling_weights"] = per_group(weights, np.float32)
    if "lengths" in extras:
        numbers |= {"prompt_lengths": prompt_tokens, "completion_lengths": completion_tokens}
    return _Rollouts(
        groups=[segment.group.group for segment in segments],
        places=places,
        prompts=prompts,
        completions=completions,
        tokens=(prompt_tokens + completion_tokens).tolist(),
        numbers=numbers,
        logprobs=[
            name
            for name in LOGPROBS
            if name not in OPTIONAL_LOGPROBS or any(getattr(use.group, name) is not None for use in uses)
        ],
        versions=[segment.group.token_versions for segment in segments] if "token_versions" in extras else None,
    )


def _fill(
    rollouts: _Rollouts, own: range, marks: list[int], numbers: Int32s, out: Int32s, mask: Bools, blank: _Blank
) -> None:
    """Write one row: few calls that each copy much. `own`: its rollouts; `out`: from its first tensor on."""
    length, logprobs = len(mask), len(rollouts.logprobs)
    _fill_tokens(rollouts, own, out[: (3 + logprobs) * length], mask, blank)
    at = (3 + logprobs) * length
    out[at : at + len(marks)] = marks
    at += len(marks)
    out[at : at + len(numbers) * len(own)].reshape(len(numbers), -1)[:] = numbers[:, own.start : own.stop]
    at += len(numbers) * len(own)
    if rollouts.versions is not None:
        _fill_versions(rollouts, rollouts.versions, own.start, own.stop, out[at : at + length])


def _fill_tokens(rollouts: _Rollouts, own: range, out: Int32s, mask: Bools, blank: _Blank) -> None:
    """Write the columns of a row with one value per token, from `input_ids` to the last logprobs."""
    length = len(mask)
    ids: list[Int32s] = []
    positions: list[Int32s] = []
    masks: list[Bools] = []
    logprobs: dict[str, list[Float32s]] = {name: [] for name in rollouts.logprobs}
    scores = out[2 * length :].view(np.float32)
    advantages = scores[:length]
    advantages[:] = 0.0
    end = candidates = 0  # tokens that have a value before the mask is applied
    for number in own:
        group, prompt, completion = rollouts.groups[number], rollouts.prompts[number], rollouts.completions[number]
        p, c = prompt.stop - prompt.start, completion.stop - completion.start
        ids += (group.prompt_ids[prompt], group.completion_ids[completion])
        positions.append(blank.positions[: p + c])
        before, prompt_logprobs = blank.falses[:p], blank.zeros[:p]
        if group.prompt_mask is not None and group.prompt_logprobs is not None:
            before, prompt_logprobs = group.prompt_mask[prompt], group.prompt_logprobs[prompt]
            advantages[end : end + p] = 0.0 if group.advantages is None else group.advantages[rollouts.places[number]]
            candidates += p
        masks += (before, group.completion_mask[completion])
        for name, values in logprobs.items():
            column = getattr(group, name)
            values += (blank.zeros[: p + c],) if column is None else (prompt_logprobs, column[completion])
        if group.token_advantages is not None:
            advantages[end + p : end + p + c] = group.token_advantages[completion]
        elif group.advantages is not None:
            advantages[end + p : end + p + c] = group.advantages[rollouts.places[number]]
        end += p + c
        candidates += c
    padding = length - end
    ids.append(blank.ids[:padding])
    np.concatenate([*ids, *positions, blank.positions[:padding]], out=out[: 2 * length])
    np.concatenate([*masks, blank.falses[:padding]], out=mask)
    for values in logprobs.values():
        values.append(blank.zeros[:padding])
    np.concatenate([*itertools.chain.from_iterable(logprobs.values())], out=scores[length:])
    if np.count_nonzero(mask) < candidates:
        # Costs a tenth of the body, and changes nothing if all completion tokens were sampled.
        columns = scores.reshape(-1, length)
        np.multiply(columns, mask.astype(np.float32), out=columns)


def _fill_versions(rollouts: _Rollouts, versions: Sequence[Int32s | None], first: int, last: int, out: Int32s) -> None:
    out[:] = NO_VERSION
    end = 0
    for number in range(first, last):
        prompt, completion, known = rollouts.prompts[number], rollouts.completions[number], versions[number]
        start = end + prompt.stop - prompt.start
        end = start + completion.stop - completion.start
        if known is not None:
            out[start:end] = known[completion]
