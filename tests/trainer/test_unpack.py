"""Results of a torch trainer come back to the rollouts and groups they belong to."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from replaybuf.client import unpack
from replaybuf.errors import Invalid
from replaybuf_trainer.reading import TensorBatch, read_tensors
from replaybuf_trainer.unpack import Values, per_group, per_rollout
from tests.trainer.batches import packed_body, rollouts

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def batch() -> TensorBatch:
    """Two rows of rollouts and an empty filler, with padding."""
    return read_tensors(packed_body(rollouts(3, seed=1), [[0, 2], [1], []], pad_to_multiple_of=8))


def values_of(batch: TensorBatch) -> list[torch.Tensor]:
    """What a forward pass gives: whole numbers here, which every type holds."""
    return [torch.arange(len(row.input_ids)) % 100 for row in batch.host.micro_batches]


def a_gradient(values: torch.Tensor) -> torch.Tensor:
    return values.float().requires_grad_() * 1


FORMS = [a_gradient, *(lambda v, d=d: v.to(d) for d in (torch.bfloat16, torch.float16, torch.float64, torch.int64))]


@pytest.mark.parametrize("form", FORMS, ids=["gradient", "bfloat16", "float16", "float64", "int64"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_tensors_are_taken_as_they_come_from_a_forward_pass(batch: TensorBatch, form: object, device: str) -> None:
    """With a gradient, in half precision, of rows as tensors or as views of the host: the same as of numpy."""
    plain = [values.numpy() for values in values_of(batch)]
    made: list[Values] = [form(values).to(device) for values in values_of(batch)]  # type: ignore[operator]
    moved = batch.to(device)
    expected = unpack.per_group(batch.host, plain)
    assert per_group(moved, made) == per_group(batch.host, made) == expected
    for tensors, host, values, known in zip(moved.micro_batches, batch.host.micro_batches, made, plain, strict=True):
        wanted = unpack.per_rollout(host, known, "sampled")
        for row in (tensors, host):
            sampled = per_rollout(row, values, "sampled")
            assert {key: part.tolist() for key, part in sampled.items()} == {k: v.tolist() for k, v in wanted.items()}


def test_float64_keeps_its_digits_and_more_dimensions_are_kept(batch: TensorBatch) -> None:
    row = batch.host.micro_batches[0]
    values = torch.rand(len(row.input_ids), 3, dtype=torch.float64)
    parts = per_rollout(row, values).values()
    assert np.array_equal(np.concatenate(list(parts)), values[: sum(map(len, parts))].numpy())


def test_values_of_another_length_are_rejected(batch: TensorBatch) -> None:
    """A dimension for the batch, as models give it, is one too many."""
    with pytest.raises(Invalid, match=r"row_values has shape \[1, 24\]; the micro-batch has 24 tokens"):
        per_rollout(batch.micro_batches[0], torch.zeros(1, 24))


def test_the_core_rejects_tensors_with_advice(batch: TensorBatch) -> None:
    """The core does not import torch. It rejects tensors, and the message names the module that accepts them."""
    row = batch.host.micro_batches[0]
    zeros = torch.zeros(len(row.input_ids))
    for values in (zeros.requires_grad_(), zeros.detach().bfloat16()):
        with pytest.raises(Invalid, match=r"numpy cannot read.*replaybuf_trainer\.unpack"):
            unpack.per_rollout(row, values)
    with pytest.raises(Invalid, match=r"got dict, expected MicroBatch.*replaybuf_trainer\.unpack"):
        unpack.per_rollout(batch.micro_batches[0], zeros)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"got TensorBatch, expected Batch.*replaybuf_trainer\.unpack"):
        unpack.per_group(batch, [])  # type: ignore[arg-type]


def test_the_core_imports_no_torch_for_it() -> None:
    program = "import sys, replaybuf.client.unpack; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=os.environ, timeout=60, check=False).returncode == 0
