"""What is fuzzed: one function per decoder, which may raise the errors that the decoder documents and nothing else.

Each target holds what it decodes to the promises of its format: arrays within the buffer, sizes within the bound,
every group that passes `check_group` can be encoded, truncated and packed.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from replaybuf.errors import Malformed, NotFound, ReplaybufError
from replaybuf.kernel.rows.index import ENTRY
from replaybuf.kernel.state.tickets import parse_ticket
from replaybuf.service.http.body.append_bodies import decode_incoming
from replaybuf.service.http.body.frame_stream import FrameStream
from replaybuf.store.entries import EntryStrings, default_prompt, encode_strings, read_chunk, read_stored
from replaybuf.wire.batch import BatchGroup, Segment, encode_batch, read_batch
from replaybuf.wire.frame import checksum, decode_frame, encode_frame, is_compressed, split_frames
from replaybuf.wire.group import Group, group_from_json, group_to_json
from replaybuf.wire.group_check import GroupLimits, check_group, truncate
from replaybuf.wire.group_json import decode_json_groups
from tests.builders import batch_meta, group, rollout, wire_group
from tests.fuzz import heads

CORPUS = Path(__file__).parent / "corpus"
LARGEST_BYTES = 1 << 20
"""Bound of decompressed frames; small, so that a fuzzer sees when it is not kept."""

_PREFIX = struct.Struct("<4sIQII")


def frame(data: bytes) -> None:
    """Decode a frame whose magic, lengths and checksum are right: a producer can always write those."""
    check_frame(_sealed(data))


def raw_frame(data: bytes) -> None:
    """Decode bytes as they are."""
    check_frame(data)


def body(data: bytes) -> None:
    """Cut a body into frames and decode each."""
    with contextlib.suppress(Malformed):
        for frame in split_frames(data):
            check_frame(bytes(frame))
    stream = FrameStream(LARGEST_BYTES)
    with contextlib.suppress(Malformed):
        for half in (data[: len(data) // 2], data[len(data) // 2 :]):
            for part in stream.feed(half):
                assert isinstance(part, int) or decode_incoming(part, LARGEST_BYTES)
        stream.end()


def json(data: bytes) -> None:
    """Decode groups as JSON."""
    with contextlib.suppress(ReplaybufError):
        for decoded in decode_json_groups(data, LARGEST_BYTES):
            if decoded.group is not None:
                judge_group(decoded.group)


def batch(data: bytes) -> None:
    """Read a batch body."""
    with contextlib.suppress(Malformed):
        read = read_batch(data)
        whole = np.frombuffer(data, np.uint8)
        for micro_batch in read.micro_batches:
            assert np.shares_memory(micro_batch.input_ids, whole) or not len(micro_batch.input_ids)


def entries(data: bytes) -> None:
    """Read entries of the index stream, from the stream and from the hash of old entries."""
    cut = min(ENTRY.itemsize, len(data))
    fields = [b"n", data[:cut], b"s", data[cut:]]
    assert len(read_chunk([(b"1-0", fields)], "r").numbers) == 1
    chunk = read_chunk([(b"1-0", fields), (b"2-0", fields[:2]), (b"3-0", [])], "r")
    stored = read_stored(np.arange(1, 2), [data], "r")
    assert chunk.malformed[1:].all() and bool(chunk.malformed[0]) == bool(stored.malformed[0])
    for entry in chunk.entries():
        default_prompt(entry.strings.group_id)


def ticket(data: bytes) -> None:
    """Read a ticket; a valid ticket round trips."""
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(NotFound):
        assert parse_ticket(str(parse_ticket(text))) == parse_ticket(text)


def check_frame(data: bytes) -> None:
    """Decode one frame and check the invariants of the group."""
    with contextlib.suppress(Malformed):
        made = decode_frame(data, max_bytes=LARGEST_BYTES)
        assert made.nbytes <= LARGEST_BYTES
        whole = np.frombuffer(data, np.uint8)
        columns = [
            v for v in (*msgspec.structs.astuple(made), *made.reward_parts.values()) if isinstance(v, np.ndarray)
        ]
        assert is_compressed(data) or all(not len(v) or np.shares_memory(v, whole) for v in columns)
        assert not any(v.flags.writeable for v in columns)
        judge_group(made)


def judge_group(made: Group) -> None:
    """Check a group; accepted groups can be written, cut and packed."""
    if check_group(made, GroupLimits(adapters=frozenset({made.adapter}))) is not None:
        return
    again = decode_frame(encode_frame(made, compress=True))
    assert encode_frame(again) == encode_frame(made)
    cut = truncate(made, int(made.prompt_lengths.max()) + 1)
    rows = [[Segment(BatchGroup(group=cut, index=0, staleness=0, times_sampled=1), k) for k in range(cut.rollouts)]]
    read_batch(encode_batch(batch_meta(), rows))
    group_from_json(group_to_json(made))


def sample(tokens: int = 3) -> Group:
    """Build a group that uses every column."""
    return group(
        *(
            rollout(
                completion_ids=[7 + k % 2 for k in range(tokens)],
                completion_mask=[k % 2 for k in range(tokens)],
                inference_logprobs=[-0.5] * tokens,
                ref_logprobs=[-1.0] * tokens,
                old_logprobs=[-1.5] * tokens,
                teacher_logprobs=[-2.0] * tokens,
                token_advantages=[0.5] * tokens,
                advantage=float(number),
                rewards={"correct": 1.0},
                version_spans=[(0, 0, 1), (1, 1, tokens)],
                finish_reason="stop",
                proof=bytes([number]) * number,
            )
            for number in range(2)
        ),
        ticket="t0-5-1",
        prompt_index=5,
        metadata={"env": "gsm8k", "tries": [1, 2.5, None]},
    )


def _sealed(data: bytes) -> bytes:
    if len(data) < _PREFIX.size:
        return data
    made = bytearray(data)
    header_length = min(_PREFIX.unpack_from(made)[4], len(made) - _PREFIX.size)
    _PREFIX.pack_into(made, 0, b"RBF1", 0, len(made), 1, header_length)
    struct.pack_into("<I", made, 4, checksum(made))
    return bytes(made)


def _seed_frames() -> list[bytes]:
    return [
        encode_frame(sample()),
        encode_frame(group()),
        encode_frame(sample(tokens=140), compress=True),
        encode_frame(sample(tokens=60)),
    ]


def _seed_batch() -> bytes:
    entry = BatchGroup(group=sample(), index=0, staleness=1, times_sampled=1, sampling_weight=0.5)
    rows = [[Segment(entry, 0), Segment(entry, 1)], []]
    return bytes(encode_batch(batch_meta(micro_batches=2), rows, pad_to_multiple_of=8))


def _seed_entry() -> bytes:
    strings = EntryStrings("p0", "gsm8k/1", "", "rb:p:{r:p0}:00", "t0-0-1-1", np.array([5, 5], "<i4").tobytes())
    raw: bytes = np.zeros(1, ENTRY).tobytes() + encode_strings(strings)
    return raw


def _seed_json() -> list[bytes]:
    body = msgspec.json.encode(group_to_json(sample()))
    return [body, b'{"groups":[' + body + b"," + msgspec.json.encode(wire_group()) + b"]}"]


class Target(NamedTuple):
    """A decoder to fuzz, and valid bytes to start from."""

    run: Callable[[bytes], None]
    seeds: list[bytes]


TARGETS = {
    "head": Target(heads.head, heads.SEEDS),
    "frame": Target(frame, _seed_frames()),
    "raw_frame": Target(raw_frame, _seed_frames()),
    "body": Target(body, [b"".join(_seed_frames()[:2])]),
    "json": Target(json, _seed_json()),
    "batch": Target(batch, [_seed_batch()]),
    "entries": Target(entries, [_seed_entry()]),
    "ticket": Target(ticket, [b"t0-5-1-1", "französisch/t3-77-2-9".encode()]),
}
