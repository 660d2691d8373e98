"""Answers encoded in pieces: the same JSON, of which no piece is large."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.service.http.reply import json_pieces
from replaybuf.service.http.reply.json_pieces import encode_pieces

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=3), values, max_size=4))
def test_pieces_join_to_the_same_json(value: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_pieces, "PIECE_ITEMS", 2)
        assert json.loads(b"".join(encode_pieces(value))) == value


@pytest.mark.parametrize("shape", [(0,), (5,), (4096,), (100_000,), (5000, 3)], ids=str)
def test_arrays_become_lists(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    assert json.loads(b"".join(encode_pieces({"x": array}))) == {"x": array.tolist()}


def test_no_piece_is_large() -> None:
    """The encoder holds the event loop for one piece."""
    value = {
        "array": np.zeros(1_000_000, np.float32),
        "structs": [{"numbers": list(range(100_000))} for _ in range(3)],
        "raw": msgspec.Raw(b"[1]"),
    }
    assert max(map(len, encode_pieces(value))) < 64 * 1024
