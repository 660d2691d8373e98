"""Chunks of what goes to Redis at once."""

from __future__ import annotations

import itertools

import pytest

from replaybuf.store.chunks import CHUNK_BYTES, split_chunks


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([1, 2], [2]),
        ([CHUNK_BYTES, 1], [1, 1]),
        ([CHUNK_BYTES - 1, 1, 1], [2, 1]),
        ([1, CHUNK_BYTES + 1, 1], [1, 1, 1]),
        ([1] * 7, [3, 3, 1]),
        ([1, CHUNK_BYTES, 1, 1, 1, 1], [1, 1, 3, 1]),
    ],
)
def test_a_chunk_has_one_item_or_stays_within_both_bounds(sizes: list[int], expected: list[int]) -> None:
    """Items and their order do not change."""
    items = list(enumerate(sizes))
    cut = list(split_chunks(items, lambda item: item[1], 3))
    assert [len(chunk) for chunk in cut] == expected
    assert list(itertools.chain(*cut)) == items
