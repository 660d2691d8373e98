"""The size of ledger records: every record of a legal run can be stored in Redis."""

from __future__ import annotations

from replaybuf.store import keys
from replaybuf.wire.config import LARGEST_INTEGER, LARGEST_OPTIONS_BYTES, LARGEST_STORED_BYTES, MOST_GROUPS
from replaybuf.wire.ledger import BatchEntry, encode_record
from replaybuf.wire.names import LONGEST_NAME_BYTES
from tests.builders import batch_record


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
    assert 100e6 < largest < LARGEST_STORED_BYTES / 2
