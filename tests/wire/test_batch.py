"""Batch bodies: layout of design section 5, read by safetensors too; invalid bodies are `Malformed`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import Malformed
from replaybuf.wire import tensor_file
from replaybuf.wire.batch import (
    METADATA_KEY,
    BatchGroup,
    BatchMeta,
    BodyExtra,
    MicroBatch,
    Segment,
    encode_batch,
    padded_length,
    read_batch,
)
from replaybuf.wire.column.token_versions import token_versions
from replaybuf.wire.group import group_to_json
from tests.builders import batch_meta, group, group_of_lengths, groups, rollout

PER_TOKEN = {
    "input_ids": np.int32,
    "position_ids": np.int32,
    "loss_mask": np.bool_,
    "advantages": np.float32,
    "inference_logprobs": np.float32,
}
PER_ROLLOUT = {
    "rewards": np.float32,
    "policy_versions": np.int32,
    "staleness": np.int32,
    "times_sampled": np.int32,
    "group_index": np.int32,
    "rollout_index": np.int32,
    "temperatures": np.float32,
}
COMPUTED = ("ref_logprobs", "old_logprobs", "teacher_logprobs")
LENGTHS = ("prompt_lengths", "completion_lengths")
ORDER = (
    *PER_TOKEN,
    *COMPUTED,
    "cu_seqlens",
    *PER_ROLLOUT,
    "sampling_weights",
    *LENGTHS,
    "token_versions",
)
OPTIONAL = (*COMPUTED, "sampling_weights", *LENGTHS, "token_versions")
EXTRAS: list[tuple[BodyExtra, ...]] = [(), ("lengths",), ("token_versions",), ("token_versions", "lengths")]
Rows = list[list[Segment]]
Tensors = dict[str, npt.NDArray[Any]]


def whole(*used: BatchGroup) -> list[Segment]:
    """List every rollout of these groups."""
    return [Segment(entry, k) for entry in used for k in range(entry.group.rollouts)]


def use(made: Any, index: int = 0, **fields: Any) -> BatchGroup:
    """Use a group for the first time, on-policy."""
    return BatchGroup(**{"group": made, "index": index, "staleness": 0, "times_sampled": 1} | fields)


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """Draw groups and deal their rollouts over rows, some of which may stay empty."""
    weighted = draw(st.booleans())
    used = [
        use(
            made,
            index,
            token_versions=token_versions(made),
            staleness=draw(st.integers(0, 5)),
            times_sampled=draw(st.integers(1, 4)),
            sampling_weight=draw(st.floats(0, 4, width=32)) if weighted else None,
        )
        for index, made in enumerate(draw(st.lists(groups(longest=4), max_size=3)))
    ]
    rows: Rows = [[] for _ in range(draw(st.integers(1, 4)))]
    for segment in whole(*used):
        rows[draw(st.integers(0, len(rows) - 1))].append(segment)
    return rows


def meta_of(rows: Rows, **fields: Any) -> BatchMeta:
    """Build metadata with the right number of micro-batches."""
    return batch_meta(micro_batches=len(rows), adapters=[""] * len(rows), **fields)


def expected_row(row: list[Segment], multiple: int, present: set[str]) -> Tensors:
    """Build a row slowly: one Python list per tensor, token by token."""
    tokens: dict[str, list[Any]] = {name: [] for name in (*PER_TOKEN, *COMPUTED, "token_versions")}
    rollouts: dict[str, list[Any]] = {name: [] for name in (*PER_ROLLOUT, "sampling_weights", *LENGTHS)}
    ends = [0]
    for segment in row:
        wire = group_to_json(segment.group.group)
        rollout = wire.rollouts[segment.rollout]
        prompt, length = len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout.completion_ids)
        mask = (rollout.prompt_mask or [0] * prompt) + list(rollout.completion_mask or [])
        tokens["input_ids"] += rollout.prompt_ids + rollout.completion_ids
        tokens["position_ids"] += range(length)
        tokens["loss_mask"] += mask
        advantage = float(np.float32(0.0 if rollout.advantage is None else rollout.advantage))
        by_token = [0.0 if rollout.prompt_mask is None else advantage] * prompt + (
            rollout.token_advantages or [advantage] * len(rollout.completion_ids)
        )
        tokens["advantages"] += [bit * value for bit, value in zip(mask, by_token, strict=True)]
        for name in ("inference_logprobs", *COMPUTED):
            own = getattr(rollout, name)
            values = [0.0] * length if own is None else (rollout.prompt_logprobs or [0.0] * prompt) + own
            tokens[name] += [bit * value for bit, value in zip(mask, values, strict=True)]
        by_position = [version for version, start, end in rollout.version_spans or [] for _ in range(start, end)]
        sampled = zip(rollout.completion_mask or [], by_position, strict=True)
        tokens["token_versions"] += [-1] * prompt + [version if bit else -1 for bit, version in sampled]
        ends.append(ends[-1] + length)
        entry = segment.group
        rollouts["prompt_lengths"].append(prompt)
        rollouts["completion_lengths"].append(len(rollout.completion_ids))
        rollouts["rewards"].append(rollout.reward)
        rollouts["policy_versions"].append(wire.policy_version)
        rollouts["staleness"].append(entry.staleness)
        rollouts["times_sampled"].append(entry.times_sampled)
        rollouts["group_index"].append(entry.index)
        rollouts["rollout_index"].append(segment.rollout)
        rollouts["temperatures"].append(rollout.temperature)
        rollouts["sampling_weights"].append(1.0 if entry.sampling_weight is None else entry.sampling_weight)
    padding = -ends[-1] % multiple or (multiple if not row else 0)
    for name, values in tokens.items():
        blank = -1 if name == "token_versions" else 0
        values += range(padding) if name == "position_ids" else [blank] * padding
    if padding:
        ends.append(ends[-1] + padding)
    types: dict[str, Any] = {**PER_TOKEN, **PER_ROLLOUT, **dict.fromkeys((*LENGTHS, "token_versions"), np.int32)}
    laid: Tensors = {"cu_seqlens": np.array(ends, np.int32)}
    for name, values in (tokens | rollouts).items():
        if name not in OPTIONAL or name in present:
            laid[name] = np.array(values, types.get(name, np.float32))
    return laid


def present_in(rows: Rows, extras: tuple[BodyExtra, ...] = ()) -> set[str]:
    """List the optional tensors that at least one group of the rank has, and those that were asked for."""
    used = [segment.group for row in rows for segment in row]
    present = {name for name in COMPUTED if any(getattr(entry.group, name) is not None for entry in used)}
    present |= {"token_versions"} & {*extras} | ({*LENGTHS} if "lengths" in extras else set())
    return present | ({"sampling_weights"} if any(entry.sampling_weight is not None for entry in used) else set())


# ---------------------------------------------------------------------- content of a body


@given(batches(), st.sampled_from([1, 2, 8, 64]), st.sampled_from(EXTRAS))
def test_a_body_has_every_token_at_its_position(rows: Rows, multiple: int, extras: tuple[BodyExtra, ...]) -> None:
    """Read with safetensors alone: position t holds token t, its mask, advantage and logprob; zeros elsewhere."""
    body = encode_batch(meta_of(rows), rows, pad_to_multiple_of=multiple, extras=extras)
    tensors = safetensors.numpy.load(bytes(body))
    expected = {
        f"{number}.{name}": tensor
        for number, row in enumerate(rows)
        for name, tensor in expected_row(row, multiple, present_in(rows, extras)).items()
    }
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape, name
        np.testing.assert_array_equal(tensors[name], tensor, err_msg=name)


def written_plainly(meta: BatchMeta, expected: list[Tensors]) -> bytes:
    """Write a body slowly: header by `json`, then each tensor's bytes, 4-byte items before single bytes."""
    named = [(f"{number}.{name}", row[name]) for number, row in enumerate(expected) for name in ORDER if name in row]
    named.sort(key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: msgspec.json.encode(meta).decode()}}
    end = 0
    for name, tensor in named:
        dtype = {"int32": "I32", "float32": "F32", "bool": "BOOL"}[tensor.dtype.name]
        header[name] = {"dtype": dtype, "shape": [len(tensor)], "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.tobytes() for _, tensor in named)


@given(batches(), st.sampled_from([1, 2, 8, 64]), st.text(max_size=4), st.sampled_from(EXTRAS))
def test_the_bytes_equal_those_of_the_slow_writer(
    rows: Rows, multiple: int, group_id: str, extras: tuple[BodyExtra, ...]
) -> None:
    """Every release writes the same body, including signs of zeros and non-ASCII text.

    Uninitialised memory must not appear in it.
    """
    meta = meta_of(rows, group_ids=[group_id])
    expected = [expected_row(row, multiple, present_in(rows, extras)) for row in rows]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(np, "empty", lambda length, dtype: np.full(length, 0xAA).astype(dtype))
        body = encode_batch(meta, rows, pad_to_multiple_of=multiple, extras=extras)
    assert bytes(body) == written_plainly(meta, expected)


@given(batches(), st.sampled_from([1, 4]))
def test_read_batch_agrees_with_safetensors(rows: Rows, multiple: int) -> None:
    body = encode_batch(meta_of(rows), rows, pad_to_multiple_of=multiple)
    read, tensors = read_batch(body), safetensors.numpy.load(bytes(body))
    assert len(read.micro_batches) == len(rows)
    for number, micro_batch in enumerate(read.micro_batches):
        for field in dataclasses.fields(MicroBatch):
            column = getattr(micro_batch, field.name)
            if column is None:
                assert f"{number}.{field.name}" not in tensors
            else:
                np.testing.assert_array_equal(column, tensors.pop(f"{number}.{field.name}"))
    assert not tensors


@given(batches(), st.sampled_from([1, 2, 8, 64]))
def test_rows_are_padded_to_a_multiple_and_segments_add_up(rows: Rows, multiple: int) -> None:
    """cu_seqlens has one segment per rollout, and one more for padding; positions restart at 0 with each."""
    for row, out in zip(
        rows, read_batch(encode_batch(meta_of(rows), rows, pad_to_multiple_of=multiple)).micro_batches, strict=True
    ):
        tokens = sum(int(s.group.group.lengths[s.rollout]) for s in row)
        length = len(out.input_ids)
        assert length == padded_length(tokens, multiple) and length % multiple == 0 and length - tokens < multiple + 1
        assert len(out.cu_seqlens) == len(row) + 1 + (length > tokens)
        assert out.cu_seqlens[0] == 0 and out.cu_seqlens[-1] == length and (np.diff(out.cu_seqlens) > 0).all()
        assert np.flatnonzero(out.position_ids == 0).tolist() == out.cu_seqlens[:-1].tolist()
        assert not out.loss_mask[tokens:].any() and not out.advantages[tokens:].any()


@given(batches(), st.sampled_from([1, 8]))
def test_the_same_batch_gives_the_same_bytes(rows: Rows, multiple: int) -> None:
    once = encode_batch(meta_of(rows), rows, pad_to_multiple_of=multiple)
    again = encode_batch(meta_of(rows), [list(row) for row in rows], pad_to_multiple_of=multiple)
    assert bytes(once) == bytes(again)


def test_an_empty_filler_micro_batch_has_no_rollout_and_one_padding_segment() -> None:
    rows: Rows = [whole(use(group())), []]
    filler = read_batch(encode_batch(meta_of(rows), rows, pad_to_multiple_of=8)).micro_batches[1]
    assert filler.cu_seqlens.tolist() == [0, 8]
    assert filler.position_ids.tolist() == list(range(8))
    assert not filler.input_ids.any() and not filler.loss_mask.any()
    assert all(len(getattr(filler, name)) == 0 for name in PER_ROLLOUT)


@pytest.mark.parametrize(
    ("optional", "size", "digest"),
    [
        ({}, 2720, "77a7d962cbc7a662"),
        ({"ref_logprobs": [-1.0] * 3, "teacher_logprobs": [-2.0] * 3}, 3200, "209752c9efdc24ed"),
    ],
    ids=["plain", "with logprobs"],
)
def test_absent_logprobs_change_no_byte_of_a_body(optional: Any, size: int, digest: str) -> None:
    """A step has the same bytes after an update of the service."""
    used = use(group(rollout(**optional), rollout(reward=0.0, **optional)), staleness=1)
    body = encode_batch(batch_meta(), [whole(used), []], pad_to_multiple_of=8)
    assert (len(body), hashlib.blake2b(body, digest_size=8).hexdigest()) == (size, digest)


def test_a_masked_token_carries_no_advantage_and_no_logprob() -> None:
    """Tool text is part of the input but not of the loss."""
    made = group(rollout(completion_mask=[1, 0, 1], ref_logprobs=[-1.0, -2.0, -3.0], advantage=-2.0))
    out = read_batch(encode_batch(batch_meta(), [whole(use(made))])).micro_batches[0]
    assert out.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert out.loss_mask.tolist() == [False, False, True, False, True]
    assert out.advantages.tolist() == [0, 0, -2, 0, -2]
    assert out.inference_logprobs.tolist() == [0, 0, -0.25, 0, -1]
    assert out.ref_logprobs is not None and out.ref_logprobs.tolist() == [0, 0, -1, 0, -3]


def test_a_prompt_token_in_the_loss_has_the_advantage_of_its_rollout_and_the_logprob_of_the_engine() -> None:
    """Columns of other models cover the completion; at prompt tokens they hold the engine's, so nothing pulls there."""
    trained = rollout(
        prompt_mask=[0, 1],
        prompt_logprobs=[-7.0, -0.75],
        completion_mask=[1, 0, 1],
        ref_logprobs=[-1.0, -2.0, -3.0],
        token_advantages=[0.5, 0.25, 0.125],
        advantage=-2.0,
    )
    plain = rollout(ref_logprobs=[-1.0, -2.0, -3.0], token_advantages=[0.5, 0.25, 0.125], advantage=3.0)
    out = read_batch(encode_batch(batch_meta(), [whole(use(group(trained, plain)))])).micro_batches[0]
    assert out.loss_mask.tolist() == [False, True, True, False, True, *[False] * 2, *[True] * 3]
    assert out.advantages[:5].tolist() == [0, -2, 0.5, 0, 0.125] and not out.advantages[5:7].any()
    assert out.inference_logprobs[:5].tolist() == [0, -0.75, -0.25, 0, -1]
    assert out.ref_logprobs is not None and out.ref_logprobs[:7].tolist() == [0, -0.75, -1, 0, -3, 0, 0]


def test_optional_tensors_are_in_all_micro_batches_of_a_rank_or_in_none() -> None:
    """A trainer may stack them; groups without values have zeros there, weights of 1."""
    with_both = use(group(rollout(ref_logprobs=[-1.0] * 3)), 0, sampling_weight=0.5)
    plain = use(group(rollout()), 1)
    rows = [whole(plain), whole(with_both), []]
    read = read_batch(encode_batch(meta_of(rows), rows)).micro_batches
    assert [None if m.ref_logprobs is None else m.ref_logprobs.tolist() for m in read] == [
        [0.0] * 5,
        [0, 0, -1, -1, -1],
        [0.0],
    ]
    weights = [None if m.sampling_weights is None else m.sampling_weights.tolist() for m in read]
    assert weights == [[1.0], [0.5], []]
    assert all(m.teacher_logprobs is None for m in read)


def test_the_metadata_is_json_under_one_key() -> None:
    """Text of any language; the epoch is not in it."""
    rows: Rows = [whole(use(group()))]
    meta = batch_meta(run="lauf", group_ids=["naïve/数学"], options={"max_staleness": 1})
    body = bytes(encode_batch(meta, rows))
    assert read_batch(body).meta == meta
    length = int.from_bytes(body[:8], "little")
    read = json.loads(json.loads(body[8 : 8 + length])["__metadata__"][METADATA_KEY])
    assert read == msgspec.to_builtins(meta)
    assert set(read) == {
        *("run", "step", "generation", "batch_id", "digest", "dp_rank", "dp_world_size", "version", "strategy"),
        *("options", "micro_batches", "adapters", "group_ids", "tokens", "padding", "loss_tokens", "rollouts"),
        *("batch_tokens", "batch_loss_tokens", "batch_rollouts", "batch_groups"),
    }


@pytest.mark.parametrize("length", range(8))
def test_tensors_are_aligned_to_their_items(length: int) -> None:
    """For any header length: data start at a multiple of 8 bytes, 4-byte columns first."""
    rows = [whole(use(group_of_lengths([3]))), whole(use(group_of_lengths([6, 2])))]
    body = encode_batch(meta_of(rows, run="r" * length), rows)
    base = np.frombuffer(body, np.uint8).ctypes.data
    for micro_batch in read_batch(body).micro_batches:
        for field in dataclasses.fields(MicroBatch):
            column = getattr(micro_batch, field.name)
            if column is not None and len(column):
                assert (column.ctypes.data - base) % column.itemsize == 0, field.name
                assert not column.flags.writeable


@pytest.mark.parametrize(
    ("tokens", "multiple", "length"), [(0, 1, 1), (0, 8, 8), (1, 8, 8), (8, 8, 8), (9, 8, 16), (7, 1, 7)]
)
def test_a_length_is_rounded_up_to_a_multiple(tokens: int, multiple: int, length: int) -> None:
    assert padded_length(tokens, multiple) == length


# ---------------------------------------------------------------------- invalid bodies


def sample_body() -> bytes:
    """Build a body of two micro-batches."""
    rows: Rows = [whole(use(group())), []]
    return bytes(encode_batch(meta_of(rows), rows, pad_to_multiple_of=4))


def with_header(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def test_a_body_cut_short_anywhere_is_malformed() -> None:
    body = sample_body()
    for end in range(len(body)):
        with pytest.raises(Malformed):
            read_batch(body[:end])


@given(st.binary(max_size=120))
def test_random_bytes_are_malformed(raw: bytes) -> None:
    for body in (raw, with_header(raw), with_header(b'{"__metadata__":' + raw)):
        with pytest.raises(Malformed):
            read_batch(body)


@given(st.data())
def test_garbled_bodies_are_malformed_or_readable(data: st.DataObject) -> None:
    """The data has no checksum of its own. Changed header bytes must not crash the reader."""
    body = bytearray(sample_body())
    header = 8 + int.from_bytes(body[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Malformed):
        read_batch(bytes(body))


def changed(**tensor: Any) -> bytes:
    """Build the sample body with one tensor's entry changed."""
    body = sample_body()
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    header["0.input_ids"] |= tensor
    return with_header(header, body[8 + length :])


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "I64"},
        {"dtype": ["I32"]},
        {"shape": []},
        {"shape": [5]},
        {"shape": [-1]},
        {"shape": "1"},
        {"shape": [1e300]},
        {"data_offsets": [0]},
        {"data_offsets": [-4, 0]},
        {"data_offsets": [8, 4]},
        {"data_offsets": [0, 10**30]},
        {"data_offsets": [0.0, 48.0]},
        {"data_offsets": ["0", "48"]},
        {"data_offsets": None},
    ],
    ids=str,
)
def test_a_wrong_tensor_entry_is_malformed(tensor: dict[str, Any]) -> None:
    read_batch(changed())
    with pytest.raises(Malformed):
        read_batch(changed(**tensor))


@pytest.mark.parametrize(
    "name", ["2.input_ids", "-1.input_ids", "x.input_ids", "0.unknown", "0.self", "input_ids", "0"]
)
def test_an_unknown_tensor_is_malformed(name: str) -> None:
    body = sample_body()
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    header[name] = header["0.input_ids"]
    with pytest.raises(Malformed):
        read_batch(with_header(header, body[8 + length :]))


@pytest.mark.parametrize("micro_batches", [-1, 0, 1, 3, 10**12, 10**30, "2", None])
def test_a_wrong_number_of_micro_batches_is_malformed(micro_batches: object) -> None:
    """Also a number too large for memory."""
    body = sample_body()
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    meta = json.loads(header["__metadata__"][METADATA_KEY]) | {"micro_batches": micro_batches}
    header["__metadata__"][METADATA_KEY] = json.dumps(meta)
    with pytest.raises(Malformed):
        read_batch(with_header(header, body[8 + length :]))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{}",
        b'{"__metadata__":[]}',
        b'{"__metadata__":{"replaybuf":"{}"}}',
        b'{"__metadata__":{"replaybuf":7}}',
        b'{"a":' + b"[" * 100_000,
        b'{"a":"\xff"}',
        b'{"a":' + b"9" * 5000 + b"}",
    ],
    ids=["nothing", "list", "no metadata", "metadata list", "no fields", "number", "nested", "not UTF-8", "digits"],
)
def test_an_invalid_header_is_malformed(header: bytes) -> None:
    with pytest.raises(Malformed):
        read_batch(with_header(header))


def test_a_header_longer_than_the_body_is_malformed() -> None:
    with pytest.raises(Malformed, match="batch header says"):
        read_batch((2**63).to_bytes(8, "little") + b"{}")


def test_safetensors_rejects_a_cut_body() -> None:
    with pytest.raises(safetensors.SafetensorError):
        safetensors.numpy.load(sample_body()[:-1])


@given(text=st.text(max_size=40), piece=st.integers(1, 5))
def test_the_header_is_the_same_json_for_pieces_of_any_size(text: str, piece: int) -> None:
    """A long text is escaped piece by piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "_PIECE", piece)
        body = tensor_file.allocate({METADATA_KEY: text}, [], 0).whole
    expected = json.dumps({"__metadata__": {METADATA_KEY: text}}, separators=(",", ":"))
    assert bytes(body[8:]).decode().rstrip(" ") == expected.rstrip(" ")
