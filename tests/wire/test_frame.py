"""Frames: any group round trips as views; any broken frame raises `BrokenFrame`."""

from __future__ import annotations

import gc
import hashlib
import itertools
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import BrokenFrame, Malformed
from replaybuf.wire.column.columns import ALIGNMENT_BYTES
from replaybuf.wire.frame import (
    checksum,
    decode_frame,
    encode_frame,
    smallest_frame_bytes,
    split_frames,
    stored_checksum,
)
from replaybuf.wire.group import Group
from replaybuf.wire.group_check import GroupLimits, check_group
from tests.builders import COLUMNS, assert_same_group, group, groups, rollout

PREFIX = struct.Struct("<4sIQII")
"""Magic, crc32c of what follows, length of the frame, format version, length of the header."""


def sample() -> Group:
    """Build a group that uses every column."""
    return group(
        *(
            rollout(
                prompt_mask=[0, 1],
                prompt_logprobs=[0.0, -0.5],
                completion_mask=[1, 0, 1],
                ref_logprobs=[-1.0] * 3,
                old_logprobs=[-1.5] * 3,
                teacher_logprobs=[-2.0] * 3,
                token_advantages=[0.5] * 3,
                advantage=float(k),
                rewards={"correct": 1.0},
                finish_reason="stop",
                proof=bytes([k]) * k,
            )
            for k in range(3)
        ),
        ticket="t0-5-1",
        prompt_index=5,
        metadata={"env": "gsm8k", "tries": [1, 2.5, None]},
    )


def sealed(frame: bytes | bytearray) -> bytes:
    """Set the checksum of changed bytes, as a producer with a bug would."""
    made = bytearray(frame)
    struct.pack_into("<I", made, 4, checksum(made))
    return bytes(made)


def frame_of(header: bytes, tail: bytes = b"") -> bytes:
    """Build a frame from the bytes of header and columns, with right lengths and checksum."""
    total = PREFIX.size + len(header) + len(tail)
    return sealed(PREFIX.pack(b"RBF1", 0, total, 1, len(header)) + header + tail)


def header_of(frame: bytes) -> dict[str, Any]:
    """Decode the header of a frame as plain values."""
    header: dict[str, Any] = msgspec.msgpack.decode(frame[PREFIX.size : PREFIX.size + PREFIX.unpack_from(frame)[4]])
    return header


def with_header(frame: bytes, header: dict[str, Any]) -> bytes:
    """Replace the header; all offsets move by multiples of 64 bytes if the new header is longer."""
    old, new = PREFIX.unpack_from(frame)[4], msgspec.msgpack.encode(header)
    assert len(new) <= old or PREFIX.size + len(new) <= min(c[1] for c in header_of(frame)["columns"].values())
    body = bytearray(frame)
    body[PREFIX.size : PREFIX.size + len(new)] = new
    PREFIX.pack_into(body, 0, b"RBF1", 0, len(body), 1, len(new))
    return sealed(body)


# ---------------------------------------------------------------------- round trip


@given(groups())
def test_any_group_round_trips(made: Group) -> None:
    frame = encode_frame(made)
    assert_same_group(decode_frame(frame), made)
    assert encode_frame(decode_frame(frame)) == frame, "the same group gives the same bytes"


@given(st.lists(groups(longest=3), max_size=4))
def test_a_body_may_hold_several_frames(several: list[Group]) -> None:
    body = b"".join(encode_frame(made) for made in several)
    read = [decode_frame(frame) for frame in split_frames(body)]
    assert len(read) == len(several)
    for first, other in zip(read, several, strict=True):
        assert_same_group(first, other)


@pytest.mark.parametrize(
    ("made", "size", "digest"),
    [
        (group(), 1312, "3f4e2ff6fba7bf8f"),
        (
            msgspec.structs.replace(
                sample(), old_logprobs=None, prompt_mask=None, prompt_logprobs=None, proofs=None, proof_lengths=None
            ),
            1688,
            "5e157444cbd53408",
        ),
        (group(rollout(rewards={"a" * n: 1.0 for n in range(1, 9)})), 2120, "313a43eb12302958"),
    ],
    ids=["plain", "those of the first release", "parts"],
)
def test_an_absent_column_changes_no_byte_of_a_frame(made: Group, size: int, digest: str) -> None:
    """Frames in Redis and their checksums outlive the release that wrote them."""
    frame = encode_frame(made)
    assert (len(frame), hashlib.blake2b(frame, digest_size=8).hexdigest()) == (size, digest)


@pytest.mark.parametrize("rollouts", [1, 2, 8, 63, 64, 1000, 5000])
def test_no_frame_is_smaller_than_smallest_frame_bytes(rollouts: int) -> None:
    """As the service stores it: with id and advantages."""
    shortest = rollout(prompt_ids=[1], completion_ids=[2], inference_logprobs=[-0.1], advantage=0.0)
    frame = encode_frame(group(*[shortest] * rollouts, prompt_id=""))
    assert 0 <= len(frame) - smallest_frame_bytes(rollouts) <= 64


def test_a_frame_begins_as_documented() -> None:
    frame = encode_frame(sample())
    magic, crc, total, version, header_length = PREFIX.unpack_from(frame)
    assert (magic, total, version) == (b"RBF1", len(frame), 1)
    assert crc == checksum(frame) == stored_checksum(frame)
    header = header_of(frame)
    assert {name: header[name] for name in ("group_id", "ticket", "prompt_index", "metadata")} == {
        "group_id": "g",
        "ticket": "t0-5-1",
        "prompt_index": 5,
        "metadata": {"env": "gsm8k", "tries": [1, 2.5, None]},
    }
    assert header_length == len(msgspec.msgpack.encode(header))


@given(groups())
def test_columns_start_at_multiples_of_64_bytes_and_do_not_overlap(made: Group) -> None:
    frame = encode_frame(made)
    end = PREFIX.size + PREFIX.unpack_from(frame)[4]
    for dtype, offset, length, codec in header_of(frame)["columns"].values():
        assert offset % ALIGNMENT_BYTES == 0 and offset >= end and codec == "raw"
        assert length % np.dtype(dtype).itemsize == 0
        end = offset + length
    assert end == len(frame)


def test_columns_are_read_only_views_into_the_frame() -> None:
    frame = encode_frame(sample())
    whole = np.frombuffer(frame, np.uint8)
    read = decode_frame(frame)
    for column in (*(getattr(read, name) for name in COLUMNS), *read.reward_parts.values()):
        assert np.shares_memory(column, whole)
        with pytest.raises(ValueError, match="read-only"):
            column.reshape(-1)[0] = 0


def test_a_frame_gives_the_garbage_collector_nothing_to_visit() -> None:
    """A batch may have 100,000 groups: with a view of each column a full collection took 0.2 s, now 1 ms."""
    frames = [encode_frame(group()) for _ in range(50)]
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        groups = [decode_frame(frame) for frame in frames]
        gc.collect(0)  # empty containers and tuples of strings leave the collector
        assert len(gc.get_objects()) - before < len(groups)
    finally:
        gc.enable()


def test_a_writable_buffer_is_not_written_through_its_columns() -> None:
    frame = bytearray(encode_frame(sample()))
    assert not decode_frame(frame).prompt_ids.flags.writeable


# ---------------------------------------------------------------------- broken bytes


def test_every_flipped_bit_is_detected() -> None:
    """In prefix, header, columns and the gaps between columns."""
    frame = bytearray(encode_frame(sample()))
    for position in range(len(frame)):
        for bit in range(8):
            frame[position] ^= 1 << bit
            with pytest.raises(BrokenFrame):
                decode_frame(frame)
            frame[position] ^= 1 << bit
    decode_frame(frame)


@given(groups(), st.data())
def test_a_changed_byte_of_any_frame_is_detected(made: Group, data: st.DataObject) -> None:
    frame = bytearray(encode_frame(made))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BrokenFrame):
        decode_frame(frame)


@given(groups(longest=3), st.data())
def test_a_frame_with_missing_or_extra_bytes_is_broken(made: Group, data: st.DataObject) -> None:
    frame = encode_frame(made)
    for other in (frame[: data.draw(st.integers(0, len(frame) - 1))], frame + data.draw(st.binary(min_size=1))):
        with pytest.raises(BrokenFrame):
            decode_frame(other)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_broken_frame(raw: bytes) -> None:
    for frame in (raw, b"RBF1" + raw, sealed((b"RBF1" + raw).ljust(PREFIX.size, b"\0"))):
        with pytest.raises(BrokenFrame):
            decode_frame(frame)


@given(st.binary(max_size=60))
def test_a_random_header_with_a_right_checksum_is_a_broken_frame(header: bytes) -> None:
    with pytest.raises(BrokenFrame):
        decode_frame(frame_of(header))


@pytest.mark.parametrize(
    "metadata",
    [
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\x01",
        b"\x81\x80\x01",
        b"\xa1\xff",
        b"\xc1",
        b"\xd7\xff" + b"\xff" * 8,
    ],
    ids=["deeply nested", "array of 2^32", "map of 2^32", "map as key", "not UTF-8", "reserved byte", "bad timestamp"],
)
def test_metadata_that_does_not_decode_breaks_the_frame_and_nothing_else(metadata: bytes) -> None:
    with pytest.raises(BrokenFrame, match="header does not decode"):
        decode_frame(frame_of(b"\x81\xa8metadata\x81\xa1a" + metadata))


@pytest.mark.parametrize(
    ("offset", "value", "name"),
    [(0, b"RBF2", "magic"), (16, b"\2\0\0\0", "version"), (8, b"\0" * 8, "length"), (20, b"\xff" * 4, "length")],
)
def test_a_wrong_prefix_is_named(offset: int, value: bytes, name: str) -> None:
    frame = bytearray(encode_frame(sample()))
    frame[offset : offset + len(value)] = value
    with pytest.raises(BrokenFrame) as caught:
        decode_frame(sealed(frame))
    assert caught.value.name == name and isinstance(caught.value, Malformed)


# ---------------------------------------------------------------------- headers that contradict the columns


@given(st.data())
def test_a_column_with_a_wrong_length_is_rejected(data: st.DataObject) -> None:
    """By the decoder; missing rows of spans are rejected by `check_group`."""
    frame = encode_frame(sample())
    header = header_of(frame)
    name = data.draw(st.sampled_from(sorted(header["columns"])))
    column = header["columns"][name]
    column[2] = data.draw(st.integers(0, 2 * column[2]).filter(lambda n: n != column[2]) | st.integers(-(2**63), 2**63))
    lying = with_header(frame, header)
    if name == "version_spans" and 0 <= column[2] < len(frame) - column[1] and column[2] % 16 == 0:
        assert check_group(decode_frame(lying), GroupLimits()) is not None
    else:
        with pytest.raises(BrokenFrame):
            decode_frame(lying)


@given(st.data())
def test_a_misplaced_column_is_rejected(data: st.DataObject) -> None:
    """Outside the frame, within its header, over another column, or not at a multiple of 64 bytes."""
    frame = encode_frame(sample())
    header = header_of(frame)
    column = header["columns"][data.draw(st.sampled_from(sorted(header["columns"])))]
    free = range(column[1], column[1] + 1)
    if column is next(iter(header["columns"].values())):
        end = PREFIX.size + PREFIX.unpack_from(frame)[4]
        free = range(-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, column[1] + 1, ALIGNMENT_BYTES)
    column[1] = data.draw(st.integers(-70, len(frame) + 70) | st.integers(-(2**63), 2**64 - 1))
    lying = with_header(frame, header)
    if column[1] in free:
        decode_frame(lying)
    else:
        with pytest.raises(BrokenFrame):
            decode_frame(lying)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "<i8"},
        {"dtype": "O"},
        {"dtype": "nonsense"},
        {"codec": "zstd"},
        {"rename": "prompt_idz"},
        {"rename": "rewards.x"},
        {"remove": True},
    ],
    ids=str,
)
def test_a_column_of_another_type_is_rejected(change: dict[str, Any]) -> None:
    frame = encode_frame(sample())
    header = header_of(frame)
    column = header["columns"].pop("prompt_ids")
    if not change.get("remove"):
        column[0], column[3] = change.get("dtype", column[0]), change.get("codec", column[3])
        header["columns"][change.get("rename", "prompt_ids")] = column
    with pytest.raises(BrokenFrame):
        decode_frame(with_header(frame, header))


@pytest.mark.parametrize("reasons", [[], ["stop"] * 2, ["stop"] * 4])
def test_finish_reasons_are_one_per_rollout(reasons: list[str]) -> None:
    frame = encode_frame(sample())
    with pytest.raises(BrokenFrame, match="finish_reasons"):
        decode_frame(with_header(frame, header_of(frame) | {"finish_reasons": reasons}))


@pytest.mark.parametrize("name", ["completion_mask", "prompt_mask"])
@given(st.integers(2, 255))
def test_a_mask_byte_must_be_0_or_1(name: str, value: int) -> None:
    """A byte of 2 would count as two tokens and double an advantage."""
    frame = bytearray(encode_frame(sample()))
    frame[header_of(bytes(frame))["columns"][name][1]] = value
    with pytest.raises(BrokenFrame, match=f"{name} holds a byte other than 0 and 1"):
        decode_frame(sealed(frame))


@pytest.mark.parametrize("name", ["prompt_lengths", "completion_lengths"])
def test_negative_lengths_are_rejected(name: str) -> None:
    frame = bytearray(encode_frame(sample()))
    offset = header_of(bytes(frame))["columns"][name][1]
    lengths = np.frombuffer(frame, "<i4", 3, offset).copy()
    struct.pack_into("<3i", frame, offset, -1, int(lengths[:2].sum()) + 1, int(lengths[2]))
    with pytest.raises(BrokenFrame, match=f"column {name} holds a negative length"):
        decode_frame(sealed(frame))


@given(groups(longest=3), st.data())
def test_any_content_with_a_right_checksum_gives_a_group_or_a_broken_frame(made: Group, data: st.DataObject) -> None:
    """A producer with a bug can write anything with a right checksum; reading it must not crash."""
    frame = bytearray(encode_frame(made))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(8, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = decode_frame(sealed(frame))
    except BrokenFrame:
        return
    check_group(read, GroupLimits(published_version=9))


# ---------------------------------------------------------------------- several frames


@given(st.lists(groups(longest=2), min_size=1, max_size=3), st.data())
def test_a_cut_body_gives_the_complete_frames_before_the_cut(several: list[Group], data: st.DataObject) -> None:
    frames = [encode_frame(made) for made in several]
    body = b"".join(frames)
    cut = data.draw(st.integers(0, len(body) - 1))
    ends = np.cumsum([len(frame) for frame in frames]).tolist()
    whole, read = [end for end in ends if end <= cut], []
    if cut in (0, *whole):
        assert [len(frame) for frame in split_frames(body[:cut])] == [len(frame) for frame in frames[: len(whole)]]
        return
    with pytest.raises(BrokenFrame):
        for frame in split_frames(body[:cut]):
            read.append(bytes(frame))
    assert read == frames[: len(whole)]


@given(st.binary(max_size=80))
def test_random_bodies_end_in_broken_frame(raw: bytes) -> None:
    for body in (raw, b"RBF1" + raw):
        try:
            for frame in split_frames(body):
                assert len(frame) >= PREFIX.size
        except BrokenFrame:
            continue
        assert body == b"" or body[:4] == b"RBF1"


def test_a_frame_of_length_0_does_not_loop() -> None:
    with pytest.raises(BrokenFrame):
        list(itertools.islice(split_frames(PREFIX.pack(b"RBF1", 0, 0, 1, 0) * 2), 3))
