"""Objects of any shape: what is taken can be read again, what is not is named with its place."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import Invalid
from replaybuf.wire.metadata import DEEPEST, LARGEST_INTEGER, SMALLEST_INTEGER, check_metadata
from tests.builders import steady

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
    """Return an object with so many levels, itself the first."""
    inner: Any = []
    for _ in range(levels - 2):
        inner = [inner]
    return {"x": inner}


def integers_in(value: Any) -> list[int]:
    """List the whole numbers in a value."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return ([value] if isinstance(value, int) else []) + [n for inner in inside for n in integers_in(inner)]


@given(st.dictionaries(st.text(max_size=3), anything, max_size=4))
@steady
def test_what_is_taken_is_read_again_and_only_numbers_beyond_64_bits_are_refused(value: dict[str, Any]) -> None:
    """As msgpack, which frames and ledger hold, and as JSON, which is answered."""
    fits = all(SMALLEST_INTEGER <= number <= LARGEST_INTEGER for number in integers_in(value))
    try:
        check_metadata("it", value)
    except Invalid as error:
        assert not fits and error.detail.startswith(f"{error.name} is {error.value}; integers are from")
    else:
        assert fits
        json.loads(msgspec.json.encode(msgspec.msgpack.decode(msgspec.msgpack.encode(value))))


def test_the_number_beyond_64_bits_is_named_with_its_place() -> None:
    """Also in lists of objects; one that would fill the page is told by its size."""
    with pytest.raises(Invalid, match=r"^metadata\.seeds\[1\]\.of is 18446744073709551616; integers are from -2"):
        check_metadata("metadata", {"seeds": [{"of": 2**64 - 1}, {"of": 2**64}], "more": 2**70})
    with pytest.raises(Invalid, match=r"^metadata\.x is a number of 40001 bits; integers") as told:
        check_metadata("metadata", {"x": 2**40000})
    assert (told.value.name, told.value.bound) == ("metadata.x", [-(2**63), 2**64 - 1])


@pytest.mark.parametrize("levels", [DEEPEST + 1, 200, 5000])
def test_what_is_nested_too_deeply_is_refused_with_depth_and_bound(levels: int) -> None:
    """An object that holds itself, too: it has no end."""
    check_metadata("metadata", nested(DEEPEST))
    with pytest.raises(Invalid, match=rf"^metadata is nested {min(levels, 1000)} deep; the maximum is 64$") as told:
        check_metadata("metadata", nested(levels))
    assert (told.value.value, told.value.bound) == (min(levels, 1000), DEEPEST)
    endless: dict[str, Any] = {}
    endless["self"] = endless
    with pytest.raises(Invalid, match="nested 1000 deep"):
        check_metadata("metadata", endless)


def test_what_no_json_can_hold_is_refused_by_its_type() -> None:
    """A producer in Python may hand over anything; it costs its own group, not the call."""
    with pytest.raises(Invalid, match=r"^metadata does not encode: Encoding objects of type object") as caught:
        check_metadata("metadata", {"source": object()})
    assert caught.value.name == "metadata"
