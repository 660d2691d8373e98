"""Groups in JSON decoded in pieces: the same groups, rejections and errors as when decoded at once."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import GroupRejected, Invalid, Malformed
from replaybuf.wire import group_json
from replaybuf.wire.frame import encode_frame
from replaybuf.wire.group import LARGEST_ROLLOUTS, GroupJson
from replaybuf.wire.group_json import decode_json_groups
from tests.builders import rollout, wire_group, wire_groups

MIB = 1 << 20
WRONG = [None, "x", "1,2", 1.5, True, [1, 2], {"a": 1}, 2**31, -(2**70), [], 0, -1]
FIELDS = ["prompt_ids", "completion_ids", "completion_mask", "inference_logprobs", "ref_logprobs", "token_advantages"]
FIELDS += ["prompt_mask", "prompt_logprobs"]


def decode(body: bytes, max_group_bytes: int = 64 * MIB) -> Any:
    """Return the frame, or the rejection, of each group; or the error of the body."""
    try:
        return [
            encode_frame(decoded.group)
            if decoded.group
            else (decoded.rejection and decoded.rejection.reason, str(decoded.rejection))
            for decoded in decode_json_groups(body, max_group_bytes)
        ]
    except (Malformed, Invalid) as error:
        return type(error), error.detail, error.name, error.value, error.bound


def decode_in_pieces(body: bytes) -> Any:
    """Decode every group in pieces, as if it were large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_json, "_SMALL_BYTES", -1)
        patch.setattr(group_json, "_PIECE_BYTES", 3)
        return decode(body)


@given(wire_groups(longest=20), st.booleans(), st.sampled_from([None, 2]))
def test_a_group_decoded_in_pieces_has_the_same_frame(wire: GroupJson, several: bool, indent: int | None) -> None:
    sent = msgspec.to_builtins(wire)
    body = json.dumps({"groups": [sent, sent]} if several else sent, indent=indent).encode()
    assert decode_in_pieces(body) == decode(body)


@given(wire_groups(longest=6), st.sampled_from(FIELDS), st.sampled_from(WRONG), st.integers(0, 5), st.booleans())
def test_a_wrong_value_has_the_same_error_in_pieces(
    wire: GroupJson, field: str, wrong: Any, place: int, whole: bool
) -> None:
    sent: dict[str, Any] = msgspec.to_builtins(wire)
    values = sent["rollouts"][-1][field]
    if whole or not values:
        sent["rollouts"][-1][field] = wrong
    else:
        values[place % len(values)] = wrong
    for body in (sent, {"groups": [msgspec.to_builtins(wire), sent]}):
        assert decode_in_pieces(json.dumps(body).encode()) == decode(json.dumps(body).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"policy_version": "7"},
        {"metadata": 5},
        {"metadata": None},
        {"rollouts": {}},
        {"rollouts": [5]},
        {"rollouts": [{}]},
        {"unknown": 1},
        {"prompt_id": None},
        {"group_id": ["a"]},
    ],
    ids=str,
)
def test_a_wrong_field_has_the_same_error_in_pieces(change: dict[str, Any]) -> None:
    body = json.dumps({"groups": [msgspec.to_builtins(wire_group(rollout())) | change]}).encode()
    assert decode(body)[0] is Malformed
    assert decode_in_pieces(body) == decode(body)


@pytest.mark.parametrize("element", [b"1,", b"[],", b"{},", b'"a",', b"1.5,"], ids=bytes.decode)
@pytest.mark.parametrize(
    "around", [b"[@1]", b'{"x": [@1]}', b'{"groups": [{"x": [@1]}]}', b'{"groups": {"x": [@1]}}'], ids=bytes.decode
)
def test_an_error_takes_less_memory_than_the_body(around: bytes, element: bytes) -> None:
    """Only the values on the path of the error become Python objects."""
    body = around.replace(b"@", element * (4 * MIB // len(element)))
    tracemalloc.start()
    try:
        error = decode(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error[0] is Malformed and peak < len(body) / 2


def test_a_long_text_is_cut_in_an_error() -> None:
    body = json.dumps({"prompt_id": "p", "policy_version": "x" * MIB, "rollouts": []}).encode()
    _, detail, name, value, _ = decode(body)
    assert name == "policy_version" and len(value) < 1100 and len(detail) < 4100


def test_a_group_with_too_much_json_is_rejected_without_decoding_it() -> None:
    """It is not even valid."""
    valid = msgspec.json.encode(wire_group(rollout(), group_id="b"))
    body = b'{"groups": [{"x": [' + b"1," * (16 * 1000) + b"1]}, " + valid + b"]}"
    rejected, kept = decode_json_groups(body, 2000)
    assert rejected.rejection is not None and rejected.rejection.reason == "too_large"
    assert (rejected.rejection.name, rejected.rejection.bound) == ("limits.max_group_bytes", 32_000)
    assert kept.group is not None and kept.group.group_id == "b"


def test_a_large_group_is_rejected_as_soon_as_its_columns_are_too_large() -> None:
    """The rejection names the group, so that a repeat of a stored group can be found."""
    long = rollout(completion_ids=[1] * MIB, inference_logprobs=[-1.0] * MIB)
    body = msgspec.json.encode(wire_group(long, group_id="a", ticket="t0-0-1-1"))
    (decoded,) = decode_json_groups(body, MIB)
    assert decoded.rejection is not None and decoded.rejection.reason == "too_large"
    assert (decoded.group_id, decoded.ticket, decoded.rejection.bound) == ("a", "t0-0-1-1", MIB)
    assert "the columns of the group have at least" in decoded.rejection.detail


def test_too_many_rollouts_or_reward_parts_are_too_large() -> None:
    many = json.dumps({"prompt_id": "p", "policy_version": 0, "rollouts": [{}] * (LARGEST_ROLLOUTS + 1)}).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_json, "_SMALL_BYTES", -1)
        (decoded,) = decode_json_groups(many, 64 * MIB)
    assert decoded.rejection is not None and "32769 rollouts; the maximum is 32768" in decoded.rejection.detail
    parts = wire_group(rollout(rewards={f"r{number}": 1.0 for number in range(257)}))
    (decoded,) = decode_json_groups(msgspec.json.encode(parts), 64 * MIB)
    assert isinstance(decoded.rejection, GroupRejected) and "257 names" in decoded.rejection.detail
