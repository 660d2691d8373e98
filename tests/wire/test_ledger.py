"""Ledger records of large batches: Redis can store them, and they are encoded and decoded in pieces."""

from __future__ import annotations

import msgspec
import pytest

from replaybuf.store import keys
from replaybuf.wire import ledger
from replaybuf.wire.config import LARGEST_INTEGER, LARGEST_OPTIONS_BYTES, LARGEST_STORED_BYTES, MOST_GROUPS
from replaybuf.wire.ledger import (
    PIECE,
    AdapterStep,
    AnyRecord,
    BatchEntry,
    EvictRecord,
    decode_record,
    encode_record,
)
from replaybuf.wire.names import LONGEST_NAME_BYTES
from tests.builders import batch_entry, batch_record


def test_the_largest_batch_record_is_smaller_than_redis_accepts() -> None:
    """As many groups as a batch may have, each with the longest strings and numbers."""
    name = "x" * LONGEST_NAME_BYTES
    entry = BatchEntry(
        number=LARGEST_INTEGER,
        group_id=name,
        prompt_id=name,
        prompt_index=LARGEST_INTEGER,
        adapter="a" * 63,
        policy_version=2**31 - 1,
        staleness=2**31 - 1,
        times_sampled=2**31 - 1,
        tokens=2**31 - 1,
        payload_key=keys.payload("r" * 63, name),
        weight=0.1,
    )
    sizes = [len(encode_record(batch_record(0, [entry] * n))) for n in (1000, 2000)]
    largest = sizes[0] + (sizes[1] - sizes[0]) / 1000 * MOST_GROUPS + LARGEST_OPTIONS_BYTES
    assert 10e6 < largest < LARGEST_STORED_BYTES / 2


@pytest.mark.parametrize("size", [0, 1, 15, 16, PIECE, PIECE + 1, PIECE + 15, 2 * PIECE + 16, 65_535, 65_536])
def test_a_batch_has_the_same_bytes_however_many_pieces_it_is_encoded_in(size: int) -> None:
    """So older releases read the ledger, and an append that is repeated is recognised."""
    record = msgspec.structs.replace(
        batch_record(3, [batch_entry(n + 1) for n in range(size)]),
        options={"groups": [], "order": "groups"},
        adapters={"groups": AdapterStep(1, 2, size, True)},
        turn="groups",
    )
    raw = encode_record(record)
    assert raw == msgspec.msgpack.encode(record)
    assert decode_record(raw) == record == msgspec.msgpack.decode(raw, type=AnyRecord)


def test_a_large_batch_is_decoded_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec keeps Python's lock during a call: 50 ms for 100,000 groups, so no other thread runs."""
    sizes: list[int] = []
    decode = ledger._decode_entries

    def counted(raw: bytes) -> list[BatchEntry]:
        entries = decode(raw)
        sizes.append(len(entries))
        return entries

    monkeypatch.setattr(ledger, "_decode_entries", counted)
    raw = encode_record(batch_record(0, [batch_entry(n + 1) for n in range(5 * PIECE + 7)]))
    assert isinstance(decode_record(raw), ledger.BatchRecord)
    assert sizes == [*[PIECE] * 5, 7]


def test_a_large_record_without_groups_is_decoded() -> None:
    """Evictions of 65,536 groups are longer than what is decoded at once for a batch."""
    record = EvictRecord(step=1, numbers={"too_stale": list(range(100_000, 165_536))})
    assert decode_record(encode_record(record)) == record
