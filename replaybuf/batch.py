"""The body of a batch: one safetensors file for one data-parallel rank.

For micro-batch `i` the tensors `i.input_ids` and so on, as `MicroBatch` lists them with their shapes; the file metadata
key `replaybuf` holds `BatchMeta` as JSON. Token t of a row stands at position t together with its mask, advantage and
logprob; these are 0 on prompt, padding and completion tokens that the policy did not sample.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import Malformed
from replaybuf.group import Bools, Float32s, Group, Int32s

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


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """One packed row of L tokens holding n rollouts; all arrays are read-only views into the body.

    - `input_ids`, `position_ids` int32 [L]; positions restart at 0 with every rollout
    - `loss_mask` bool [L]; `advantages`, `inference_logprobs`, `ref_logprobs`, `teacher_logprobs` float32 [L]
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
    groups = {id(segment.group): segment.group for row in rows for segment in row}.values()
    present = {
        name: any(getattr(entry.group, name) is not None for entry in groups)
        for name in ("ref_logprobs", "teacher_logprobs")
    }
    present["sampling_weights"] = any(entry.sampling_weight is not None for entry in groups)
    shapes = {
        (number, name): shape
        for number, row in enumerate(rows)
        for name, shape in _shapes_of(row, pad_to_multiple_of).items()
        if present.get(name, True)
    }
    body, views = _allocate(meta, shapes)
    columns: list[dict[str, npt.NDArray[Any]]] = [{} for _ in rows]
    for (number, name), view in views.items():
        columns[number][name] = view
    for row, out in zip(rows, columns, strict=True):
        _fill(row, out)
    return body


def read_batch(body: bytes | bytearray | memoryview) -> Batch:
    """Read a body into views. Raises `Malformed` where it is not one or is cut short."""
    header, data = _split_body(body)
    try:
        meta = msgspec.json.decode(header.pop("__metadata__")[METADATA_KEY], type=BatchMeta)
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


def _shapes_of(row: Sequence[Segment], multiple: int) -> dict[str, tuple[np.dtype[Any], int]]:
    tokens = sum(int(s.group.group.lengths[s.rollout]) for s in row)
    length = padded_length(tokens, multiple)
    n = len(row)
    int32, float32 = np.dtype(np.int32), np.dtype(np.float32)
    return {
        "input_ids": (int32, length),
        "position_ids": (int32, length),
        "loss_mask": (np.dtype(np.bool_), length),
        "advantages": (float32, length),
        "inference_logprobs": (float32, length),
        "ref_logprobs": (float32, length),
        "teacher_logprobs": (float32, length),
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
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: msgspec.json.encode(meta).decode()}}
    offsets = {}
    end = 0
    for (number, name), (dtype, length) in sorted(shapes.items(), key=lambda item: -item[1][0].itemsize):
        offsets[number, name] = end
        end += dtype.itemsize * length
        header[f"{number}.{name}"] = {
            "dtype": _NAMES[dtype],
            "shape": [length],
            "data_offsets": [offsets[number, name], end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    start = _LENGTH.size + len(encoded)
    body = bytearray(start + end)
    _LENGTH.pack_into(body, 0, len(encoded))
    body[_LENGTH.size : start] = encoded
    views = {key: np.frombuffer(body, dtype, length, start + offsets[key]) for key, (dtype, length) in shapes.items()}
    return body, views


def _fill(row: Sequence[Segment], out: dict[str, npt.NDArray[Any]]) -> None:
    end = 0
    out["cu_seqlens"][0] = 0
    for number, segment in enumerate(row):
        entry, group, k = segment.group, segment.group.group, segment.rollout
        prompt, completion = int(group.prompt_lengths[k]), int(group.completion_lengths[k])
        p0 = int(group.prompt_lengths[:k].sum())
        c0 = int(group.completion_lengths[:k].sum())
        source = slice(c0, c0 + completion)
        start, split, end = end, end + prompt, end + prompt + completion
        mask = group.completion_mask[source]
        out["input_ids"][start:split] = group.prompt_ids[p0 : p0 + prompt]
        out["input_ids"][split:end] = group.completion_ids[source]
        out["position_ids"][start:end] = np.arange(end - start, dtype=np.int32)
        out["loss_mask"][split:end] = mask
        advantage = 0.0 if group.advantages is None else group.advantages[k]
        np.multiply(mask, np.float32(advantage), out=out["advantages"][split:end])
        for name in ("inference_logprobs", "ref_logprobs", "teacher_logprobs"):
            values = getattr(group, name)
            if values is not None:
                np.multiply(values[source], mask, out=out[name][split:end])
        out["cu_seqlens"][number + 1] = end
        out["rewards"][number] = group.rewards[k]
        out["policy_versions"][number] = group.policy_version
        out["staleness"][number] = entry.staleness
        out["times_sampled"][number] = entry.times_sampled
        out["group_index"][number] = entry.index
        out["rollout_index"][number] = k
        out["temperatures"][number] = group.temperatures[k]
        if "sampling_weights" in out:
            out["sampling_weights"][number] = 1.0 if entry.sampling_weight is None else entry.sampling_weight
    length = len(out["input_ids"])
    if length > end:
        out["position_ids"][end:] = np.arange(length - end, dtype=np.int32)
        out["cu_seqlens"][len(row) + 1] = length


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
