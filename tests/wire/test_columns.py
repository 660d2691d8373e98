"""Columns of frames: compression, and headers that must not crash the reader or exhaust its memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import BrokenFrame, TooLarge
from replaybuf.wire.column.columns import ALIGNMENT_BYTES, COMPRESSED_FROM_BYTES, KINDS
from replaybuf.wire.frame import LARGEST_FRAME_BYTES, LARGEST_HEADER_BYTES, decode_frame, encode_frame, is_compressed
from replaybuf.wire.group import LARGEST_REWARD_PARTS, LARGEST_ROLLOUTS, Group
from tests.builders import COLUMNS, assert_same_group, group, groups, rollout
from tests.fuzz.targets import check_frame, sample
from tests.wire.test_frame import PREFIX, frame_of, header_of, sealed

Change = Callable[[dict[str, list[Any]]], object]

MEMORY_PER_BYTE = 100
"""An empty map is one byte of msgpack and 64 in memory, with 8 more for its place in a list."""
MEMORY_AT_LEAST = 1 << 20


def long_group(tokens: int = COMPRESSED_FROM_BYTES, seed: int | None = None) -> Group:
    """Build one rollout with this many completion tokens: two ids in turn, or random ones."""
    ids = np.arange(tokens) % 2 if seed is None else np.random.default_rng(seed).integers(0, 2**31, tokens)
    made = rollout(completion_ids=ids.tolist(), inference_logprobs=[-0.5] * tokens, ref_logprobs=[-0.5] * tokens)
    return group(made)


def columns_of(frame: bytes) -> dict[str, list[Any]]:
    """Read dtype, offset, length and codec of each column."""
    columns: dict[str, list[Any]] = header_of(frame)["columns"]
    return columns


def frame_with(
    source: Group, contents: dict[str, bytes], change: Change = lambda columns: None, **fields: Any
) -> bytes:
    """Write a frame by hand: `contents` replaces columns, `change` edits the table of columns."""
    frame = encode_frame(source)
    header = header_of(frame) | fields
    start = offset = 8192
    tail = bytearray()
    for name, column in header["columns"].items():
        content = contents.get(name, frame[column[1] : column[1] + column[2]])
        column[1:3] = offset, len(content)
        column[3] = "zstd" if content[:4] == zstandard.FRAME_HEADER else "raw"
        tail += content + bytes(-len(content) % ALIGNMENT_BYTES)
        offset = start + len(tail)
    change(header["columns"])
    encoded = msgspec.msgpack.encode(header)
    made = PREFIX.pack(b"RBF1", 0, start + len(tail), 1, len(encoded)) + encoded
    return sealed(made + bytes(start - len(made)) + tail)


def rejection(frame: bytes, max_bytes: int = LARGEST_FRAME_BYTES) -> BrokenFrame:
    """Return the error for a frame; the memory used must be bounded by its size."""
    tracemalloc.start()
    try:
        with pytest.raises(BrokenFrame) as caught:
            decode_frame(frame, max_bytes=max_bytes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= MEMORY_PER_BYTE * len(frame) + MEMORY_AT_LEAST
    return caught.value


# ---------------------------------------------------------------------- compression


@given(groups(longest=6), st.integers(1, 400))
def test_a_compressed_group_round_trips(made: Group, times: int) -> None:
    """For any choice of compressed columns; the same group gives the same bytes."""
    repeated = msgspec.structs.replace(
        made,
        prompt_ids=np.tile(made.prompt_ids, times),
        prompt_lengths=made.prompt_lengths * np.int32(times),
        prompt_mask=None if made.prompt_mask is None else np.tile(made.prompt_mask, times),
        prompt_logprobs=None if made.prompt_logprobs is None else np.tile(made.prompt_logprobs, times),
    )
    frame = encode_frame(repeated, compress=True)
    assert_same_group(decode_frame(frame), repeated)
    assert encode_frame(decode_frame(frame), compress=True) == frame
    assert is_compressed(frame) == (columns_of(frame)["prompt_ids"][3] == "zstd")
    assert len(frame) <= len(encode_frame(repeated))


def test_ids_and_masks_are_compressed_and_logprobs_are_not() -> None:
    frame = encode_frame(long_group(), compress=True)
    codecs = {name: column[3] for name, column in columns_of(frame).items()}
    assert [name for name, codec in codecs.items() if codec == "zstd"] == ["completion_ids", "completion_mask"]


def test_small_and_incompressible_columns_stay_raw() -> None:
    """A frame with raw columns only equals the uncompressed frame."""
    small = long_group(COMPRESSED_FROM_BYTES // 4 - 1)
    assert encode_frame(small, compress=True) == encode_frame(small)
    noise = columns_of(encode_frame(long_group(seed=0), compress=True))
    assert (noise["completion_ids"][3], noise["completion_mask"][3]) == ("raw", "zstd")


def test_compression_is_off_by_default() -> None:
    assert not is_compressed(encode_frame(long_group()))


def test_unpacked_columns_cannot_be_written_to() -> None:
    assert not decode_frame(encode_frame(long_group(), compress=True)).completion_ids.flags.writeable


def test_compressed_logprobs_are_readable() -> None:
    """Any column with a value per token may be compressed."""
    made = long_group()
    packed = zstandard.ZstdCompressor().compress(made.inference_logprobs.tobytes())
    assert_same_group(decode_frame(frame_with(made, {"inference_logprobs": packed})), made)


# ---------------------------------------------------------------------- invalid compressed bytes


def ids(count: int) -> bytes:
    """Return the bytes of `count` token ids."""
    return bytes(4 * count)


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (zstandard.ZstdCompressor().compress(ids(3)), "decompresses to 12 bytes"),
        (zstandard.ZstdCompressor().compress(ids(1 << 20)), "decompresses to 4194304 bytes"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(ids(4)), "decompresses to"),
        (zstandard.ZstdCompressor().compress(ids(4))[:-1], "does not decompress"),
        (zstandard.ZstdCompressor().compress(ids(4)) + b"\0", "does not decompress"),
        (zstandard.ZstdCompressor().compress(ids(4)) * 2, "does not decompress"),
        (zstandard.FRAME_HEADER, "does not decompress"),
        (zstandard.FRAME_HEADER + b"\x80\x80" + (16).to_bytes(4, "little") + b"\1\0\0", "with a window of"),
    ],
    ids=["too few", "too many", "size unknown", "cut", "bytes behind", "twice", "empty", "huge window"],
)
def test_compressed_ids_that_do_not_match_the_lengths_are_rejected(packed: bytes, message: str) -> None:
    error = rejection(frame_with(group(), {"prompt_ids": packed}))
    assert error.name == "prompt_ids" and message in error.detail


def test_a_frame_that_decompresses_beyond_the_bound_is_rejected_first() -> None:
    """16 MiB of ids in 600 bytes; lengths and zstd agree, so only the bound rejects it."""
    tokens = 4 << 20
    packed = zstandard.ZstdCompressor().compress(ids(tokens))
    lengths = np.array([tokens - 2, 2], "<i4").tobytes()
    frame = frame_with(group(), {"prompt_ids": packed, "prompt_lengths": lengths})
    error = rejection(frame, max_bytes=1 << 20)
    assert (error.name, error.bound) == ("max_bytes", 1 << 20)
    assert error.value == len(frame) - len(packed) + 4 * tokens
    assert decode_frame(frame, max_bytes=error.value).nbytes > 4 * tokens


def test_the_bound_holds_for_all_columns_together() -> None:
    made = long_group()
    frame = encode_frame(made, compress=True)
    unpacked = rejection(frame, max_bytes=len(frame)).value
    assert unpacked > made.nbytes
    decode_frame(frame, max_bytes=unpacked)
    assert rejection(frame, max_bytes=unpacked - 1).bound == unpacked - 1
    assert rejection(encode_frame(made), max_bytes=made.nbytes).name == "max_bytes"


@pytest.mark.parametrize("name", ["prompt_lengths", "completion_lengths", "rewards", "temperatures", "version_spans"])
def test_a_column_that_is_not_per_token_may_not_be_compressed(name: str) -> None:
    made = group(*(rollout() for _ in range(64)))
    column = getattr(made, name)
    packed = zstandard.ZstdCompressor().compress(column.tobytes())
    assert rejection(frame_with(made, {name: packed})).name in (name, "rollouts")


@given(st.data())
def test_any_changed_byte_of_a_compressed_column_is_handled(data: st.DataObject) -> None:
    frame = bytearray(encode_frame(sample(tokens=300), compress=True))
    _, offset, length, _ = columns_of(bytes(frame))["completion_ids"]
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(offset, offset + length - 1))] = data.draw(st.integers(0, 255))
    check_frame(sealed(frame))


# ---------------------------------------------------------------------- invalid tables of columns


NUMBERS = st.integers(-1, 300).map(lambda n: n * 16) | st.sampled_from([-(2**63), 2**31, 2**53, 2**63, 2**64 - 1])


@given(st.data())
def test_any_table_of_columns_gives_a_group_within_the_frame_or_a_broken_frame(data: st.DataObject) -> None:
    """Moved, stretched, renamed, retyped and doubled columns under a right checksum."""
    made = data.draw(st.sampled_from([sample(), sample(300), group()]))

    def change(columns: dict[str, list[Any]]) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            name = data.draw(st.sampled_from(sorted(columns)))
            place = data.draw(st.integers(0, 5))
            if place < 4:
                values = (st.sampled_from(["<i4", "<f4", "<f8", "|b1", "O"]), NUMBERS, NUMBERS, st.just("zstd"))[place]
                columns[name][place] = data.draw(values)
            elif place == 4:
                columns[data.draw(st.sampled_from(["rewards.x", "rewards.", *COLUMNS]))] = list(columns[name])
            else:
                columns[data.draw(st.sampled_from([*COLUMNS, "nonsense"]))] = columns.pop(name)

    check_frame(frame_with(made, {}, change))


def test_columns_may_not_overlap() -> None:
    """Otherwise a small frame could encode a group of any size."""

    def change(columns: dict[str, list[Any]]) -> None:
        columns["rewards.x"] = list(columns["rewards"])

    assert "the part before it ends at" in rejection(frame_with(group(), {}, change)).detail


def test_an_unknown_column_is_rejected() -> None:
    """It may come from a newer producer, or be a typo."""
    frame = frame_with(group(), {}, lambda columns: columns.update(entropy=["<f4", 1 << 20, 0, "raw"]))
    assert "unknown column 'entropy'" in rejection(frame).detail


def test_an_unknown_key_of_the_header_is_rejected() -> None:
    error = rejection(frame_with(group(), {}, entropy=1))
    assert error.name == "header" and "unknown field `entropy`" in error.detail


def test_too_many_columns_are_rejected() -> None:
    parts = {f"rewards.r{number}": ["<f8", 1 << 20, 0, "raw"] for number in range(LARGEST_REWARD_PARTS + len(KINDS))}
    error = rejection(frame_with(group(), {}, lambda columns: columns.update(parts)))
    assert error.name == "columns" and "the maximum is" in error.detail


@pytest.mark.parametrize(
    ("lengths", "name"),
    [([2**31 - 1] * 2, "prompt_ids"), ([-(2**31), 2**31 - 1], "prompt_lengths"), ([0, 0], "prompt_ids")],
    ids=str,
)
def test_lengths_that_do_not_match_the_tokens_are_rejected(lengths: list[int], name: str) -> None:
    frame = frame_with(group(), {"prompt_lengths": np.array(lengths, "<i4").tobytes()})
    assert rejection(frame).name == name


def test_too_many_rollouts_are_rejected() -> None:
    """The check comes before the lengths are read."""
    many = bytes(4 * (LARGEST_ROLLOUTS + 1))
    error = rejection(frame_with(group(), {"prompt_lengths": many, "completion_lengths": many}))
    assert f"frame has {LARGEST_ROLLOUTS + 1} rollouts; the maximum is {LARGEST_ROLLOUTS}" in error.detail


def test_a_frame_may_have_no_rollouts() -> None:
    """`check_group` rejects it, not the decoder."""
    empty = frame_with(group(), dict.fromkeys(columns_of(encode_frame(group())), b""), finish_reasons=[])
    assert decode_frame(empty).rollouts == 0


# ---------------------------------------------------------------------- memory use of headers


@pytest.mark.parametrize(
    "metadata",
    [b"\x81\xa1a\xdd" + (1 << 17).to_bytes(4, "big") + b"\x80" * (1 << 17), b"\x81\xa1a" + b"\x91" * (1 << 17)],
    ids=["empty maps", "nested lists"],
)
def test_the_memory_of_a_header_is_proportional_to_its_bytes(metadata: bytes) -> None:
    header = b"\x81\xa8metadata" + metadata
    rejection(frame_of(header))


def test_a_header_above_its_limit_is_neither_read_nor_written() -> None:
    error = rejection(frame_of(b"\x80" + bytes(LARGEST_HEADER_BYTES)))
    assert (error.name, error.bound) == ("header", LARGEST_HEADER_BYTES)
    with pytest.raises(TooLarge, match=f"the header of the group has .* bytes; the maximum is {LARGEST_HEADER_BYTES}"):
        encode_frame(group(metadata={"text": "x" * LARGEST_HEADER_BYTES}))


@pytest.mark.parametrize("reasons", [["stop"] * (1 << 15), [None] * (1 << 17)], ids=["texts", "nothing"])
def test_too_many_finish_reasons_are_rejected(reasons: list[str | None]) -> None:
    header = header_of(encode_frame(group())) | {"finish_reasons": reasons}
    for column in header["columns"].values():
        column[1:3] = 0, 0
    assert rejection(frame_of(msgspec.msgpack.encode(header))).name == "rollouts"
