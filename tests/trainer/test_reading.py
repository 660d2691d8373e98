"""Batches as tensors: views of the body, the reader that makes them, the data set over it."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from replaybuf.client.client import Client
from replaybuf.client.reader import ReaderOptions
from replaybuf.errors import Invalid, Malformed
from replaybuf.wire.batch import BatchGroup, Segment, encode_batch, read_batch
from replaybuf.wire.contract import Attachment
from replaybuf_trainer import reading
from replaybuf_trainer.reading import BatchDataset, TensorReader, read_tensors
from tests import builders
from tests.conftest import RunClient, ServeProcess, group
from tests.trainer.batches import packed_body, rollouts

STEPS = 2
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")


def body() -> bytes:
    """A body of three micro-batches, one of them an empty filler, with reference logprobs and weights."""
    return packed_body(rollouts(3, seed=1), [[0, 2], [1], []], pad_to_multiple_of=8, sampling_weight=0.5)


@pytest.mark.parametrize("pin_memory", [False, pytest.param(True, marks=needs_cuda)])
def test_tensors_are_the_columns_of_the_body(pin_memory: bool) -> None:
    """By the same names, types and values; what a body lacks is left out."""
    raw = body()
    batch, expected = read_tensors(raw, pin_memory=pin_memory), read_batch(raw)
    assert batch.meta == expected.meta
    for tensors, row in zip(batch.micro_batches, expected.micro_batches, strict=True):
        arrays = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        assert tensors.keys() == {name for name, array in arrays.items() if array is not None}
        for name, tensor in tensors.items():
            assert torch.equal(tensor, torch.tensor(arrays[name])), name
            assert tensor.is_pinned() == (pin_memory and tensor.numel() > 0)
    assert "teacher_logprobs" not in batch.micro_batches[0]


def test_old_policy_logprobs_are_a_tensor_of_their_own() -> None:
    """Where a group has them: each at its token, 0 elsewhere."""
    made = builders.group(builders.rollout(completion_mask=[1, 0, 1], old_logprobs=[-1.5, -2.5, -3.5]))
    entry = BatchGroup(group=made, index=0, staleness=0, times_sampled=1)
    (row,) = read_tensors(bytes(encode_batch(builders.batch_meta(), [[Segment(entry, 0)]]))).micro_batches
    assert row["old_logprobs"].tolist() == [0.0, 0.0, -1.5, 0.0, -3.5]
    assert row["old_logprobs"].dtype == torch.float32
    assert "old_logprobs" not in read_tensors(body()).micro_batches[0]


def test_tensors_are_views_of_the_body_without_a_warning() -> None:
    """No token is copied: all tensors lie within the one buffer."""
    raw = bytearray(body())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_tensors(bytes(raw))
    whole = torch.frombuffer(raw, dtype=torch.uint8)
    batch = read_tensors(memoryview(raw))
    for row in batch.micro_batches:
        for tensor in row.values():
            inside = whole.data_ptr() <= tensor.data_ptr() <= whole.data_ptr() + len(raw) - tensor.nbytes
            assert inside or not tensor.numel()
    ids, at = batch.micro_batches[0]["input_ids"], batch.host.micro_batches[0].input_ids
    ids[0] = 77
    assert at[0] == 77


def test_moving_leaves_the_views_of_the_host_in_place() -> None:
    """What maps results back to rollouts needs them there."""
    batch = read_tensors(body())
    moved = batch.to("meta")
    assert all(tensor.device.type == "meta" for row in moved.micro_batches for tensor in row.values())
    assert moved.host is batch.host


@pytest.mark.parametrize("raw", [b"", b"no", b"no body at all"])
def test_invalid_bytes_are_malformed(raw: bytes) -> None:
    with pytest.raises(Malformed):
        read_tensors(raw)


@pytest.mark.parametrize("off", [1, 2, 3])
def test_a_tensor_that_torch_cannot_view_is_malformed(off: int) -> None:
    """A header longer by less than a word moves all tensors; a reader of numpy views takes that."""
    raw = body()
    length = int.from_bytes(raw[:8], "little")
    moved = (length + off).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * off + raw[8 + length :]
    with pytest.raises(Malformed, match=r"tensor \w+ starts at byte \d+ of the body; torch needs a multiple of 4"):
        read_tensors(moved)
    assert len(read_batch(moved).micro_batches) == 3


@pytest.fixture
def attached(run: RunClient) -> Attachment:
    """A run with all batches of its life in it, and its trainer."""
    strategy = {"name": "one-step-off-policy", "options": {"max_staleness": 9}}
    run.put(batch={"groups_per_batch": 1}, strategy=strategy, max_steps=STEPS)
    epoch = run.attach()
    run.append(*(group(f"g{step}") for step in range(STEPS)))
    return Attachment(epoch=epoch, step=0)


@pytest.fixture
def reader(run: RunClient, attached: Attachment, service: ServeProcess) -> Iterator[TensorReader]:
    """A reader of that run that wants page-locked memory."""
    options = ReaderOptions(poll_s=0.05)
    with (
        Client(service.url, run.run) as client,
        TensorReader(client, attached.epoch, attached.step, options, pin_memory=True) as made,
    ):
        yield made


def test_without_cuda_pinning_does_nothing_and_logs_a_warning(
    reader: TensorReader, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = TensorReader(reader._client, 1, 0, pin_memory=True)
    assert not made.pin_memory
    assert "pin_memory has no effect" in caplog.text
    assert not made.read(body()).micro_batches[0]["input_ids"].is_pinned()


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_data_loader_yields_the_steps_in_order(reader: TensorReader, device: str | None) -> None:
    """With `batch_size=None` an item is a step, moved to the device where one is named."""
    steps = []
    for batch in DataLoader(BatchDataset(reader, device), batch_size=None, num_workers=0):
        steps.append(batch.meta.step)
        assert batch.micro_batches[0]["input_ids"].device.type == (device or "cpu")
        reader.ack()
    assert steps == list(range(STEPS))
    assert reader.finished


def test_workers_of_a_data_loader_are_rejected(reader: TensorReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked ones when they iterate, spawned ones when they are sent the data set."""
    dataset = BatchDataset(reader)
    with pytest.raises(Invalid, match="num_workers=0"):
        pickle.dumps(dataset)
    monkeypatch.setattr(reading, "get_worker_info", object)
    with pytest.raises(Invalid, match="num_workers=0"):
        iter(dataset)
