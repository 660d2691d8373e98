"""The body of a batch: one safetensors file for one data-parallel rank.

For micro-batch `i` the tensors `i.input_ids` and so on, as `MicroBatch` lists them with their shapes; the file metadata
key `replaybuf` holds `BatchMeta` as JSON. Token t of a row stands at position t together with its mask, advantage and
logprob; these are 0 on prompt, padding and completion tokens that the policy did not sample.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import Malformed
from replaybuf.group import LOGPROBS, OPTIONAL_LOGPROBS, Bools, Float32s, Group, Int32s

METADATA_KEY = "replaybuf"

_NAMES = {np.dtype(np.int32): "I32", np.dtype(np.float32): "F32", np.dtype(np.bool_): "BOOL"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH = struct.Struct("<Q")
_Shapes = dict[tuple[int, str], tuple[np.dtype[Any], int]]
"""Type and length of each tensor, by micro-batch and name."""


class BatchMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What a body says about itself. `tokens` ... `rollouts` are of this rank, `batch_*` of all ranks.

    `version` is the version of the policy that this step trains, `adapters` has one name per micro-batch and
    `group_ids` the groups of this rank, indexed by `group_index`. Nothing here depends on the epoch.
    Of a run with adapters, where `version` is 0: `adapters_completed`, those whose own step this batch completes, and
    that step.
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


# Made here, not at its first use: msgspec 0.22 crashes where two threads use a struct for the first time at once.
_decode_meta = msgspec.json.Decoder(BatchMeta).decode


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """One packed row of L tokens holding n rollouts; all arrays are read-only views into the body.

    - `input_ids`, `position_ids` int32 [L]; positions restart at 0 with every rollout
    - `loss_mask` bool [L]; `advantages`, `inference_logprobs`, `ref_logprobs`, `old_logprobs`, `teacher_logprobs`
      float32 [L]
    - `cu_seqlens` int32 [n+1], or [n+2] where padding makes the last segment
    - `rewards`, `temperatures`, `sampling_weights` float32 [n]; `policy_versions`, `staleness`, `times_sampled`,
      `group_index`, `rollout_index` int32 [n]
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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The part of one step's batch that one rank trains."""

    meta: BatchMeta
    micro_batches: list[MicroBatch]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BatchGroup:
    """A group as it stands in one batch: its columns and what the ledger says of this use.

    `index` is its position among the groups of the rank, `sampling_weight` what the strategy gave, if it gives any.
    """

    group: Group
    index: int
    staleness: int
    times_sampled: int
    sampling_weight: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """One rollout to be placed in a row: which group, which rollout of it."""

    group: BatchGroup
    rollout: int


def encode_batch(meta: BatchMeta, rows: Sequence[Sequence[Segment]], *, pad_to_multiple_of: int = 1) -> bytearray:
    """Write the body of one rank: `rows[i]` are the rollouts of micro-batch `i`, in order.

    A row is padded to a multiple of `pad_to_multiple_of`; an empty row gets one padding segment. The same arguments
    give the same bytes.
    """
    groups = {id(segment.group): segment.group for row in rows for segment in row}
    present: dict[str, bool] = {
        name: any(getattr(entry.group, name) is not None for entry in groups.values()) for name in OPTIONAL_LOGPROBS
    }
    present["sampling_weights"] = any(entry.sampling_weight is not None for entry in groups.values())
    cuts = {
        key: _Cuts(_bounds(e.group.prompt_lengths), _bounds(e.group.completion_lengths)) for key, e in groups.items()
    }
    pieces = [_pieces_of(row, cuts) for row in rows]
    shapes = {
        (number, name): shape
        for number, row in enumerate(pieces)
        for name, shape in _shapes_of(row, pad_to_multiple_of).items()
        if present.get(name, True)
    }
    body, views = _allocate(meta, shapes)
    columns: list[dict[str, npt.NDArray[Any]]] = [{} for _ in rows]
    for (number, name), view in views.items():
        columns[number][name] = view
    blank = _Blank.of(max((length for _, length in shapes.values()), default=0))
    for row, out in zip(pieces, columns, strict=True):
        _fill(row, out, blank)
    return body


def read_batch(body: bytes | bytearray | memoryview) -> Batch:
    """Read a body into views. Raises `Malformed` where it is not one or is cut short."""
    header, data = _split_body(body)
    try:
        meta = _decode_meta(header.pop("__metadata__")[METADATA_KEY])
        tensors = {name: _view(data, entry) for name, entry in header.items()}
        if not 0 <= meta.micro_batches <= len(tensors):
            raise ValueError(f"{meta.micro_batches} micro-batches cannot stand in {len(tensors)} tensors")
        rows: dict[str, dict[str, Any]] = {str(number): {} for number in range(meta.micro_batches)}
        for name, view in tensors.items():
            number, _, field = name.partition(".")
            rows[number][field] = view
        return Batch(meta, [MicroBatch(**row) for row in rows.values()])
    except (KeyError, IndexError, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise Malformed(f"batch body does not hold what its header says: {error}", name="body") from error


def padded_length(tokens: int, pad_to_multiple_of: int) -> int:
    """Round a row's tokens up to a multiple; an empty row is one multiple long."""
    return max(1, -(-tokens // pad_to_multiple_of)) * pad_to_multiple_of


class _Cuts(NamedTuple):
    """Where the rollouts of a group begin and end in its prompt and completion columns: n+1 bounds each."""

    prompts: list[int]
    completions: list[int]


class _Piece(NamedTuple):
    """One rollout of a row: where its prompt and its completion begin in its group's columns, tokens of each."""

    segment: Segment
    prompt_start: int
    prompt_tokens: int
    completion_start: int
    completion_tokens: int
    tokens: int


class _Blank(NamedTuple):
    """What rows have in common: zeros stand on prompts for mask and logprobs, positions count from 0."""

    zeros: Float32s
    falses: Bools
    positions: Int32s

    @classmethod
    def of(cls, length: int) -> _Blank:
        """Make runs of `length` tokens."""
        return cls(np.zeros(length, np.float32), np.zeros(length, np.bool_), np.arange(length, dtype=np.int32))


def _bounds(lengths: Int32s) -> list[int]:
    return [0, *itertools.accumulate(lengths.tolist())]


def _pieces_of(row: Sequence[Segment], cuts: dict[int, _Cuts]) -> list[_Piece]:
    pieces = []
    for segment in row:
        (prompts, completions), k = cuts[id(segment.group)], segment.rollout
        p, c = prompts[k + 1] - prompts[k], completions[k + 1] - completions[k]
        pieces.append(_Piece(segment, prompts[k], p, completions[k], c, p + c))
    return pieces


def _shapes_of(row: Sequence[_Piece], multiple: int) -> dict[str, tuple[np.dtype[Any], int]]:
    tokens = sum(piece.tokens for piece in row)
    length = padded_length(tokens, multiple)
    n = len(row)
    int32, float32 = np.dtype(np.int32), np.dtype(np.float32)
    return {
        "input_ids": (int32, length),
        "position_ids": (int32, length),
        "loss_mask": (np.dtype(np.bool_), length),
        "advantages": (float32, length),
        **dict.fromkeys(LOGPROBS, (float32, length)),
        "cu_seqlens": (int32, n + 1 + (length > tokens)),
        "rewards": (float32, n),
        "policy_versions": (int32, n),
        "staleness": (int32, n),
        "times_sampled": (int32, n),
        "group_index": (int32, n),
        "rollout_index": (int32, n),
        "temperatures": (float32, n),
        "sampling_weights": (float32, n),
    }


def _allocate(meta: BatchMeta, shapes: _Shapes) -> tuple[bytearray, dict[tuple[int, str], npt.NDArray[Any]]]:
    # safetensors wants no holes; 4-byte columns first keeps every column aligned.
    tensors = {}
    offsets = {}
    end = 0
    for (number, name), (dtype, length) in sorted(shapes.items(), key=lambda item: -item[1][0].itemsize):
        offsets[number, name] = end
        end += dtype.itemsize * length
        tensors[f"{number}.{name}"] = {
            "dtype": _NAMES[dtype],
            "shape": [length],
            "data_offsets": [offsets[number, name], end],
        }
    told = {"__metadata__": {METADATA_KEY: msgspec.json.encode(meta).decode()}}
    encoded = json.dumps(told, separators=(",", ":")).encode()
    if tensors:  # json takes ten times as long, which matters for thousands of rows; msgspec does not escape to ASCII
        encoded = encoded[:-1] + b"," + msgspec.json.encode(tensors)[1:]
    encoded += b" " * (-len(encoded) % 8)
    start = _LENGTH.size + len(encoded)
    body = bytearray(start + end)
    _LENGTH.pack_into(body, 0, len(encoded))
    body[_LENGTH.size : start] = encoded
    views = {key: np.frombuffer(body, dtype, length, start + offsets[key]) for key, (dtype, length) in shapes.items()}
    return body, views


def _fill(row: Sequence[_Piece], out: dict[str, npt.NDArray[Any]], blank: _Blank) -> None:
    """Write one row, a column at a time: few calls that each copy much."""
    n = len(row)
    groups = [piece.segment.group.group for piece in row]
    uses = [piece.segment.group for piece in row]
    rollouts = [piece.segment.rollout for piece in row]
    ends = list(itertools.accumulate(piece.tokens for piece in row))
    end = ends[-1] if ends else 0
    length = len(out["input_ids"])
    if n:
        _fill_tokens(row, {name: column[:end] for name, column in out.items()}, blank)
    if length > end:
        out["position_ids"][end:] = blank.positions[: length - end]
        ends.append(length)
    out["cu_seqlens"][1:] = ends
    out["rewards"][:] = [group.rewards[k] for group, k in zip(groups, rollouts, strict=True)]
    out["temperatures"][:] = [group.temperatures[k] for group, k in zip(groups, rollouts, strict=True)]
    out["policy_versions"][:] = [group.policy_version for group in groups]
    out["staleness"][:] = [use.staleness for use in uses]
    out["times_sampled"][:] = [use.times_sampled for use in uses]
    out["group_index"][:] = [use.index for use in uses]
    out["rollout_index"][:] = rollouts
    if "sampling_weights" in out:
        out["sampling_weights"][:] = [1.0 if use.sampling_weight is None else use.sampling_weight for use in uses]


def _fill_tokens(row: Sequence[_Piece], out: dict[str, npt.NDArray[Any]], blank: _Blank) -> None:
    """Write what stands at each token of at least one rollout; `out` ends where the padding begins."""
    ids: list[Int32s] = []
    positions: list[Int32s] = []
    masks: list[Bools] = []
    logprobs: dict[str, list[Float32s]] = {name: [] for name in LOGPROBS if name in out}
    end = 0
    for segment, p0, p, c0, c, tokens in row:
        group, completion = segment.group.group, slice(c0, c0 + c)
        ids += (group.prompt_ids[p0 : p0 + p], group.completion_ids[completion])
        positions.append(blank.positions[:tokens])
        masks += (blank.falses[:p], group.completion_mask[completion])
        for name, values in logprobs.items():
            column = getattr(group, name)
            values += (blank.zeros[:p], blank.zeros[:c] if column is None else column[completion])
        if group.token_advantages is not None:
            out["advantages"][end + p : end + tokens] = group.token_advantages[completion]
        elif group.advantages is not None:
            out["advantages"][end + p : end + tokens] = group.advantages[segment.rollout]
        end += tokens
    np.concatenate(ids, out=out["input_ids"])
    np.concatenate(positions, out=out["position_ids"])
    np.concatenate(masks, out=out["loss_mask"])
    for name, values in logprobs.items():
        np.concatenate(values, out=out[name])
    if np.count_nonzero(out["loss_mask"]) < sum(piece.completion_tokens for piece in row):
        # Where all completion tokens were sampled this would change nothing and costs a tenth of the body.
        ones = out["loss_mask"].astype(np.float32)
        for name in ("advantages", *logprobs):
            np.multiply(out[name], ones, out=out[name])


def _split_body(body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], memoryview]:
    buffer = memoryview(body).toreadonly()
    if len(buffer) < _LENGTH.size:
        raise Malformed(f"batch body has {len(buffer)} bytes; at least {_LENGTH.size} are needed", name="body")
    length = _LENGTH.unpack_from(buffer)[0]
    if length > len(buffer) - _LENGTH.size:
        raise Malformed(f"batch header says {length} bytes; the body has {len(buffer)}", name="body", value=length)
    try:
        header = msgspec.json.decode(buffer[_LENGTH.size : _LENGTH.size + length], type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Malformed(f"batch header does not decode: {error}", name="body") from error
    return header, buffer[_LENGTH.size + length :]


def _view(data: memoryview, entry: dict[str, Any]) -> npt.NDArray[Any]:
    start, end = entry["data_offsets"]
    dtype = _DTYPES[entry["dtype"]]
    if not 0 <= start <= end <= len(data) or end - start != dtype.itemsize * entry["shape"][0]:
        raise ValueError(f"tensor bytes {start}..{end} do not fit a body of {len(data)} bytes")
    return np.frombuffer(data, dtype, entry["shape"][0], start)
