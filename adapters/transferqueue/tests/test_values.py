"""Values survive the way to bytes and back without pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaybuf.errors import Invalid, Malformed
from replaybuf_transferqueue.values import decode, encode


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int64).reshape(2, 3),
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.rand(4, dtype=torch.float32).to(torch.bfloat16),
        torch.arange(12).reshape(3, 4).T,
        torch.tensor([True, False]),
    ],
    ids=["matrix", "scalar", "empty", "bfloat16", "transposed", "bool"],
)
def test_a_tensor_keeps_its_type_shape_and_elements(tensor: torch.Tensor) -> None:
    again = decode(encode(tensor, "f"), "f")
    assert again.dtype == tensor.dtype and again.shape == tensor.shape and torch.equal(again, tensor)
    again.fill_(0)  # users may write to it


@pytest.mark.parametrize("value", [None, 7, -1.5, "text", [1, "a"], {"a": {"b": [1, 2]}, 3: None}, b"bytes"])
def test_a_plain_value_comes_back(value: Any) -> None:
    assert decode(encode(value, "f"), "f") == value


def test_tensors_arrays_and_tensor_dictionaries_inside_a_value_come_back() -> None:
    value = {"t": torch.ones(2), "a": np.arange(4, dtype=np.float16).reshape(2, 2), "n": np.int64(5)}
    again = decode(encode(value, "f"), "f")
    assert torch.equal(again["t"], value["t"]) and again["n"] == 5 and again["a"].dtype == np.float16
    assert (again["a"] == value["a"]).all()
    inner = decode(encode(TensorDict({"x": torch.ones(2, 3)}, batch_size=2), "f"), "f")
    assert inner.batch_size == torch.Size([2]) and torch.equal(inner["x"], torch.ones(2, 3))


def test_a_value_that_needs_pickle_is_rejected_with_the_way_out() -> None:
    with pytest.raises(Invalid, match=r"field 'tools' has a ndarray .* add 'tools' to pickle_fields"):
        encode(np.array([object()]), "tools")
    with pytest.raises(Invalid, match="'scores' has a int"):
        encode(1 << 70, "scores")


def test_pickle_is_read_only_for_fields_that_the_user_named() -> None:
    payload = encode(1 << 70, "scores", ["scores"])
    assert decode(payload, "scores", ["scores"]) == 1 << 70
    with pytest.raises(Malformed, match="field 'scores' is stored as pickle"):
        decode(payload, "scores", ["others"])


def test_bytes_of_an_unknown_kind_are_rejected() -> None:
    with pytest.raises(Malformed, match="kind 9"):
        decode(b"\x09abc", "f")
    with pytest.raises(Malformed, match="dtype 'save_it' is unknown"):
        decode(encode(torch.ones(1), "f").replace(b"float32", b"save_it"), "f")
