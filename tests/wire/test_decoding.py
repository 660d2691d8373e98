"""Strict decoding of JSON: what is accepted, and errors that name the field."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import Invalid, Malformed
from replaybuf.wire.config import RunConfig
from replaybuf.wire.contract import AckRequest
from replaybuf.wire.decoding import decode_json
from replaybuf.wire.group import GroupJson
from tests.builders import wire_group, wire_groups


def decoded(body: bytes) -> RunConfig:
    return decode_json(body, RunConfig)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"batch": {}',
        b'{"batch": 5, broken',
        b'{"batch": {}} trailing',
        b"nan",
        b"\xff\xfe",
        b'{"advantage": "\xff", "batch": {}}',
        '{"batch": {}}'.encode("utf-16"),
        b'{"batch": {}, "advantage": "\\ud800"}',
        b'{"batch": {}, "adapters": {"a": {"b":' + b"[" * 100_000,
        b'{"batch": 5, "adapters": {"a": {"b":' + b"[" * 100_000 + b"]" * 100_000 + b"}}}",
        b'{"batch": {}, "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=[
        *("empty", "brace", "cut", "cut behind a fault", "trailing", "word", "not text", "not UTF-8", "UTF-16"),
        *("half a surrogate pair", "nested", "nested behind a fault", "digits"),
    ],
)
def test_invalid_json_is_malformed(body: bytes) -> None:
    with pytest.raises(Malformed, match="body is not JSON"):
        decoded(body)


def test_a_field_given_twice_is_checked_twice() -> None:
    with pytest.raises(Malformed, match=r"filters\[1\]"):
        decoded(b'{"batch": {}, "filters": [{}, {"x": 1}], "filters": []}')


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,0123 batch\\ud8e-.N', max_size=40).map(str.encode))
def test_random_bodies_are_malformed_or_invalid(body: bytes) -> None:
    for raw in (body, b'{"batch":' + body):
        with pytest.raises((Malformed, Invalid)):
            decoded(raw)


@given(wire_groups())
def test_a_group_written_by_python_is_decoded(wire: GroupJson) -> None:
    """Python's encoder writes surrogate pairs and full floats."""
    text = json.dumps(msgspec.to_builtins(wire)).encode()
    assert decode_json(text, GroupJson) == wire


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_are_accepted(value: float) -> None:
    """The check of the group names them later."""
    wire: dict[str, Any] = msgspec.to_builtins(wire_group(prompt_id="Ω😀"))
    wire["rollouts"][0]["reward"] = value
    read = decode_json(json.dumps(wire).encode(), GroupJson)
    assert str(read.rollouts[0].reward) == str(value) and read.prompt_id == "Ω😀"


def test_a_body_with_nan_is_still_checked_strictly() -> None:
    wire: dict[str, Any] = msgspec.to_builtins(wire_group())
    wire["rollouts"][0] |= {"reward": math.nan, "completion_ids": ["3"]}
    with pytest.raises(Malformed, match=r"rollouts\[0\].completion_ids\[0\] is '3'"):
        decode_json(json.dumps(wire).encode(), GroupJson)


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (
            {"good": {"groups_per_batch": 1}, "bad": {"groups_per_batch": 0}},
            r"adapters\[\.{3}\].groups_per_batch; it must be >= 1",
        ),
        (
            {"a.b": {"groups_per_batch": 1}, "c.d": {"groups_per_batch": "x"}},
            r"adapters\[\.{3}\].groups_per_batch: Expected `int",
        ),
        ({"a": {"groups_per_batch": 1}, "b": 5}, r"adapters\[\.{3}\]: Expected `object`, got `int`"),
        ({"c.d": {"groups_per_batch": 0}}, "adapters.c.d.groups_per_batch is 0; it must be >= 1"),
        (
            {f"a{number}": {"groups_per_batch": 1} for number in range(257)},
            "adapters has 257 entries; it must be <= 256",
        ),
    ],
)
def test_an_error_in_a_map_names_the_map_and_the_field(adapters: dict[str, Any], message: str) -> None:
    with pytest.raises((Invalid, Malformed), match=f"^{message}"):
        decoded(json.dumps({"batch": {}, "adapters": adapters}).encode())


def test_a_number_out_of_range_is_named_with_its_bound() -> None:
    with pytest.raises(Invalid, match=r"^batch.seq_len is 1; it must be >= 2$") as caught:
        decoded(b'{"batch": {"seq_len": 1}}')
    assert (caught.value.name, caught.value.value, caught.value.bound) == ("batch.seq_len", 1, ">= 2")


def test_too_many_entries_are_named_with_their_number() -> None:
    metrics = {f"m{number}": 0.5 for number in range(65)}
    with pytest.raises(Invalid) as raised:
        decode_json(json.dumps({"epoch": 1, "metrics": metrics}).encode(), AckRequest)
    assert (raised.value.name, raised.value.value, raised.value.bound) == ("metrics", 65, "<= 64")


def test_a_map_inside_a_list_is_named() -> None:
    wire: dict[str, Any] = msgspec.to_builtins(wire_group())
    wire["rollouts"][1]["rewards"] = {"right": 1.0, "wrong": "much", "worse": None}
    with pytest.raises(Malformed, match=r"^rollouts\[1\]\.rewards\[\.\.\.\]: Expected `float`, got `str`"):
        decode_json(json.dumps(wire).encode(), GroupJson)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"bach": {}}, "body: Object contains unknown field `bach`; valid: batch, strategy, filters, "),
        ({"batch": {"group_size": 1}}, "batch: .* `group_size`; valid: tokens_per_batch, groups_per_batch, seq_len, "),
        ({"batch": {}, "adapters": {"a": {"x": 1}}}, "adapters.a: .* `x`; valid: groups_per_batch, prompts, "),
        ({"batch": {"overlong": "drop"}}, "batch.overlong is 'drop': .*; valid: reject, truncate$"),
    ],
)
def test_an_unknown_field_or_word_is_named_with_the_valid_ones(body: dict[str, Any], message: str) -> None:
    with pytest.raises((Invalid, Malformed), match=f"^{message}"):
        decoded(json.dumps(body).encode())
