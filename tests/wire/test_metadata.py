"""Metadata: accepted objects round trip, errors name the rejected value."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import Invalid
from replaybuf.wire.column.metadata import DEEPEST, LARGEST_INTEGER, MOST_NESTED, SMALLEST_INTEGER, check_metadata

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(SMALLEST_INTEGER - 2, LARGEST_INTEGER + 2)
    | st.floats()
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def nested(levels: int) -> dict[str, Any]:
    """Return an object with `levels` levels."""
    inner: Any = []
    for _ in range(levels - 2):
        inner = [inner]
    return {"x": inner}


def integers_in(value: Any) -> list[int]:
    """List the integers in a value."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return ([value] if isinstance(value, int) else []) + [n for inner in inside for n in integers_in(inner)]


@given(st.dictionaries(st.text(max_size=3), anything, max_size=4))
def test_accepted_objects_are_readable_and_integers_beyond_64_bits_are_rejected(value: dict[str, Any]) -> None:
    """As msgpack (frames, ledger) and as JSON (answers)."""
    fits = all(SMALLEST_INTEGER <= number <= LARGEST_INTEGER for number in integers_in(value))
    try:
        check_metadata("it", value)
    except Invalid as error:
        assert not fits and error.detail.startswith(f"{error.name} is {error.value}; integers are from")
    else:
        assert fits
        json.loads(msgspec.json.encode(msgspec.msgpack.decode(msgspec.msgpack.encode(value))))


def test_an_integer_beyond_64_bits_is_rejected_with_its_path() -> None:
    """The error reports the size of a very long number instead of its digits."""
    with pytest.raises(Invalid, match=r"^metadata\.seeds\[1\]\.of is 18446744073709551616; integers are from -2"):
        check_metadata("metadata", {"seeds": [{"of": 2**64 - 1}, {"of": 2**64}], "more": 2**70})
    with pytest.raises(Invalid, match=r"^metadata\.x is a number of 40001 bits; integers") as caught:
        check_metadata("metadata", {"x": 2**40000})
    assert (caught.value.name, caught.value.bound) == ("metadata.x", [-(2**63), 2**64 - 1])


@pytest.mark.parametrize("levels", [DEEPEST + 1, 200, 5000])
def test_deep_nesting_is_rejected_with_depth_and_bound(levels: int) -> None:
    """Also an object that contains itself."""
    check_metadata("metadata", nested(DEEPEST))
    with pytest.raises(Invalid, match=rf"^metadata is nested {min(levels, 1000)} deep; the maximum is 64$") as caught:
        check_metadata("metadata", nested(levels))
    assert (caught.value.value, caught.value.bound) == (min(levels, 1000), DEEPEST)
    endless: dict[str, Any] = {}
    endless["self"] = endless
    with pytest.raises(Invalid, match="nested 1000 deep"):
        check_metadata("metadata", endless)


@pytest.mark.parametrize("value", [object(), msgspec.msgpack.Ext(5, b""), {(1, 2): 3}], ids=["object", "ext", "key"])
def test_values_that_are_not_json_are_rejected_by_type(value: Any) -> None:
    """A Python producer may pass any object. Some encode as msgpack and would break each answer with them."""
    with pytest.raises(Invalid, match=r"^metadata does not encode: (Encoding objects of type|Only dicts)") as caught:
        check_metadata("metadata", {"source": value})
    assert caught.value.name == "metadata"


@pytest.mark.parametrize("inner", [[], {}, [[]], {"a": {}}], ids=str)
def test_too_many_objects_and_lists_are_rejected(inner: Any) -> None:
    """The check takes a turn of a loop for each of them, while other calls wait."""
    check_metadata("x", {"a": [inner] * MOST_NESTED, "b": ["text"] * 2 * MOST_NESTED})
    with pytest.raises(Invalid, match=f"objects and lists . deep; the maximum is {MOST_NESTED}") as caught:
        check_metadata("x", {"a": [inner] * (MOST_NESTED + 1)})
    assert (caught.value.name, caught.value.bound) == ("x", MOST_NESTED)
