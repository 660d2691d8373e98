"""Proofs of rollouts: two columns of a group, in JSON as base64."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from replaybuf.errors import BrokenFrame, GroupRejected
from replaybuf.wire.frame import decode_frame, encode_frame
from replaybuf.wire.group import group_to_json
from replaybuf.wire.group_check import GroupLimits, check_group
from replaybuf.wire.group_json import decode_json_groups
from replaybuf.wire.proofs import LARGEST_PROOFS_BYTES
from tests.builders import group, rollout, wire_group
from tests.wire.test_columns import frame_with

PROOFS = [b"", b"\x00\xff", b"second"]


def proven(*proofs: bytes) -> Any:
    """Build a group whose rollouts have these proofs."""
    return group(*(rollout(proof=proof) for proof in proofs))


def test_proofs_come_back_byte_by_byte_from_a_frame_and_from_json() -> None:
    """Lengths differ, one is empty; JSON has them as base64."""
    made = proven(*PROOFS)
    assert made.proof_lengths.tolist() == [0, 2, 6]
    assert [rollout.proof for rollout in group_to_json(decode_frame(encode_frame(made))).rollouts] == PROOFS
    body = msgspec.json.encode(wire_group(*(rollout(proof=proof) for proof in PROOFS)))
    assert base64.b64encode(PROOFS[2]) in body
    (decoded,) = decode_json_groups(body, 1 << 20)
    assert decoded.group is not None and encode_frame(decoded.group) == encode_frame(made)


def test_a_proof_that_only_some_rollouts_have_is_rejected() -> None:
    with pytest.raises(GroupRejected, match=r"rollouts\[1\].proof is missing") as caught:
        group(rollout(proof=b"a"), rollout())
    assert caught.value.reason == "length_mismatch"


def test_proofs_above_their_bound_are_rejected() -> None:
    """The bound is for all rollouts together."""
    half = bytes(LARGEST_PROOFS_BYTES // 2)
    assert check_group(proven(half, half), GroupLimits()) is None
    rejection = check_group(proven(half, half + b"x"), GroupLimits())
    assert rejection is not None and rejection.reason == "proof_too_large"
    assert str(LARGEST_PROOFS_BYTES + 1) in rejection.detail


@pytest.mark.parametrize(
    ("contents", "change", "name"),
    [
        ({}, lambda columns: columns.pop("proofs"), "proofs"),
        ({}, lambda columns: columns.pop("proof_lengths"), "proofs"),
        ({"proofs": b"1234567"}, lambda columns: None, "proofs"),
        ({"proof_lengths": b"\xff\xff\xff\xff" * 2}, lambda columns: None, "proof_lengths"),
    ],
    ids=["no proofs", "no lengths", "other length", "negative length"],
)
def test_a_frame_with_proofs_that_do_not_fit_their_lengths_is_broken(
    contents: dict[str, bytes], change: Callable[[dict[str, list[Any]]], object], name: str
) -> None:
    with pytest.raises(BrokenFrame) as caught:
        decode_frame(frame_with(proven(b"abc", b"d"), contents, change))
    assert caught.value.name == name
