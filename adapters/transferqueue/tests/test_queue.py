"""TransferQueue on the store: puts, gets, clears, checkpoints, restores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transfer_queue
from starting_queue import empty_queue, start_queue_on
from tensordict import NonTensorStack, TensorDict

from replaybuf.errors import BrokenFrame, Conflict, Unreadable
from replaybuf_transferqueue import restore
from tests.valkeys import Valkey

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """One Valkey for all tests here, so that a queue can serve several."""
    with Valkey(tmp_path_factory.mktemp("shared") / "valkey") as server:
        yield server


@pytest.fixture(scope="module")
def idle_queues(ray_cluster: None, valkey: Valkey) -> Iterator[list[Any]]:
    """The running queue if the test before left it empty: at most one."""
    yield []
    transfer_queue.close()


@pytest.fixture
def start_queue(idle_queues: list[Any], valkey: Valkey, tmp_path: Path) -> Iterator[Start]:
    """Take the queue that the test before left, at the first call, and start others after that, as a crash does.

    A start takes 4 s, and half a minute on a busy machine.
    """
    usual = True

    def start(**settings: Any) -> Any:
        nonlocal usual
        usual = not settings
        idle = idle_queues.pop() if idle_queues else None
        return idle if usual and idle is not None else start_queue_on(valkey, settings)

    yield start
    if usual:
        empty_queue(tmp_path)
    if usual and not valkey.client.keys("*:v:*"):
        idle_queues.append(transfer_queue)
    else:
        transfer_queue.close()
        valkey.client.flushall()


def rows(*numbers: int) -> TensorDict:
    return TensorDict(
        {
            "ids": torch.nested.as_nested_tensor([torch.full((n + 1,), n) for n in numbers], layout=torch.jagged),
            "text": NonTensorStack(*[{"number": n, "scores": torch.ones(2) * n} for n in numbers]),
        },
        batch_size=len(numbers),
    )


def numbers_of(queue: Any, keys: list[str], partition: str = "train") -> list[int]:
    """Read keys; check that every field holds the number that its sample was made of."""
    data = queue.kv_batch_get(keys=keys, partition_id=partition)
    numbers = []
    for ids, text in zip(data["ids"].unbind(), data["text"], strict=True):
        number = text["number"]
        assert ids.tolist() == [number] * (number + 1) and torch.equal(text["scores"], torch.ones(2) * number)
        numbers.append(number)
    return numbers


def test_a_reused_index_never_reads_another_samples_bytes(start_queue: Start) -> None:
    queue = start_queue()
    first = queue.kv_batch_put(["a"], "train", rows(1))
    client = queue.get_client()
    stale = client.kv_retrieve_meta(["a"], "train", create=False)
    queue.kv_clear("a", "train")
    queue.kv_batch_put([f"b{n}" for n in range(3)], "train", rows(5, 6, 7))
    assert first.keys == ["a"] and numbers_of(queue, ["b0", "b1", "b2"]) == [5, 6, 7]
    reused = client.kv_retrieve_meta(["b0", "b1", "b2"], "train", create=False).global_indexes
    assert stale.global_indexes[0] in reused
    with pytest.raises(Exception, match="not in the store"):
        client.get_data(stale)


def test_a_clear_frees_fields_that_only_some_samples_have_and_keys_without_any(
    start_queue: Start, valkey: Valkey
) -> None:
    queue = start_queue()
    queue.kv_batch_put(["a", "b"], "train", rows(1, 2))
    queue.kv_batch_put(["a"], "train", TensorDict({"extra": torch.ones(1, 2)}, batch_size=1))
    queue.kv_put("prompt", "train", tag={"status": "running"})
    queue.kv_clear(["a", "b", "prompt"], "train")
    assert queue.kv_list("train") == {"train": {}} and not valkey.client.keys("*:v:*")


def test_an_unset_field_and_broken_bytes_are_named(start_queue: Start, valkey: Valkey) -> None:
    queue = start_queue()
    queue.kv_batch_put(["a"], "train", rows(3))
    (key,) = valkey.client.keys("*:v:*")
    value = bytearray(valkey.client.get(key))
    value[-1] ^= 1
    valkey.client.set(key, bytes(value))
    with pytest.raises(BrokenFrame, match=r"@text' .* does not match its CRC"):
        numbers_of(queue, ["a"])


def test_a_checkpoint_comes_back_with_the_bytes_that_it_named(start_queue: Start, tmp_path: Path) -> None:
    queue = start_queue()
    queue.kv_batch_put(["a", "b"], "train", rows(1, 2), tags=[{"step": 1}, {"step": 1}])
    queue.save_checkpoint(tmp_path / "ck")
    queue.kv_batch_put(["a"], "train", rows(9))  # the same key, other bytes
    queue.kv_clear("b", "train")
    queue.kv_batch_put(["c"], "train", rows(4))  # reuses the index of b
    queue = start_queue()
    queue.load_checkpoint(tmp_path / "ck")
    assert numbers_of(queue, ["a", "b"]) == [1, 2]
    assert queue.kv_list("train") == {"train": {"a": {"step": 1}, "b": {"step": 1}}}


def test_a_restore_brings_back_what_was_put_after_the_checkpoint(start_queue: Start, tmp_path: Path) -> None:
    queue = start_queue()
    queue.kv_batch_put(["a", "b"], "train", rows(1, 2), tags=[{"step": 1}, {"step": 1}])
    queue.save_checkpoint(tmp_path / "ck")
    queue.kv_batch_put(["a"], "train", rows(9), tags=[{"step": 2}])
    queue.kv_clear("b", "train")
    queue.kv_batch_put(["c", "d"], "train", rows(4, 5), tags=[{"step": 3}, {"step": 3}])
    queue.kv_clear("d", "train")
    queue = start_queue()
    restored = restore(tmp_path / "ck")
    assert (restored.samples, restored.values, len(restored.later), restored.missing) == (2, 4, 2, ())
    assert {sample.key for sample in restored.later} == {"a", "c"}
    # b was cleared after the checkpoint; the trainer is back at the checkpoint, so b is too.
    assert numbers_of(queue, ["a", "b", "c"]) == [9, 2, 4]
    assert queue.kv_list("train")["train"] == {"a": {"step": 2}, "b": {"step": 1}, "c": {"step": 3}}
    queue.kv_clear(["a", "b", "c"], "train")
    queue.save_checkpoint(tmp_path / "ck2")
    queue.save_checkpoint(tmp_path / "ck3")


def test_a_restore_without_a_checkpoint_brings_back_all_that_was_not_cleared(
    start_queue: Start, valkey: Valkey
) -> None:
    queue = start_queue()
    queue.kv_batch_put(["a", "b"], "train", rows(1, 2), tags=[{"n": np.int64(1)}, {"n": 2}])
    queue.kv_batch_put(["a"], "other", rows(3))
    queue.kv_clear("b", "train")
    queue.get_client().put(rows(6, 7), partition_id="native")  # samples without keys
    for _ in range(2):  # a second crash, after a restore
        queue = start_queue()
        assert len(restore().later) == 4
    assert numbers_of(queue, ["a"]) == [1] and numbers_of(queue, ["a"], "other") == [3]
    meta = queue.get_client().get_meta(["ids", "text"], 2, "native", mode="fetch", task_name="train")
    data = queue.get_client().get_data(meta)
    assert sorted(text["number"] for text in data["text"]) == [6, 7]
    assert sorted(ids.tolist()[0] for ids in data["ids"].unbind()) == [6, 7]
    queue.get_client().clear_partition("native")
    queue.kv_clear("a", "train")
    queue.kv_clear("a", "other")
    assert not valkey.client.keys("*:v:*")


def test_a_restore_names_what_is_missing_and_leaves_it_out(start_queue: Start, valkey: Valkey, tmp_path: Path) -> None:
    queue = start_queue()
    queue.kv_batch_put(["a"], "train", rows(1))
    (lost,) = valkey.client.keys("*:v:*")
    queue.kv_batch_put(["b"], "train", rows(2))
    queue.save_checkpoint(tmp_path / "ck")
    valkey.client.delete(lost)
    queue = start_queue()
    with pytest.raises(Exception, match=r"1 sample without all values \(train/a: ids, text\)") as caught:
        queue.load_checkpoint(tmp_path / "ck")
    assert isinstance(caught.value, Unreadable)
    restored = restore(tmp_path / "ck")
    assert [(sample.partition, sample.key, sample.fields) for sample in restored.missing] == [
        ("train", "a", ("ids", "text"))
    ]
    assert set(queue.kv_list("train")["train"]) == {"b"} and numbers_of(queue, ["b"]) == [2]


def test_a_checkpoint_of_another_store_or_one_no_longer_kept_is_refused(start_queue: Start, tmp_path: Path) -> None:
    queue = start_queue()
    queue.kv_batch_put(["a"], "train", rows(1))
    for number in range(3):
        queue.save_checkpoint(tmp_path / f"ck{number}")
    with pytest.raises(Conflict, match=r"ck0 is not one of the 2 that the store keeps \(keep_checkpoints: 2\)"):
        restore(tmp_path / "ck0")
    restore(tmp_path / "ck1")
    start_queue(name="second")
    with pytest.raises(Conflict, match="is of the store 'transferqueue'; this is 'second'"):
        restore(tmp_path / "ck2")


def test_a_worker_of_an_older_controller_is_fenced(start_queue: Start, valkey: Valkey) -> None:
    start_queue()
    held = transfer_queue.get_client()
    transfer_queue.interface._TQ_CLIENT = None  # a worker that outlives its controller
    queue = start_queue()
    with pytest.raises(Exception, match=r"belongs to session \d+; session \d+ took over"):
        held.storage_manager.storage_client.put(["1@ids"], [torch.ones(1)])
    queue.kv_batch_put(["a"], "train", rows(1))
    assert numbers_of(queue, ["a"]) == [1]
    held.close()


def test_another_process_reads_and_writes(start_queue: Start) -> None:
    queue = start_queue()
    queue.kv_batch_put(["a"], "train", rows(1))

    @ray.remote
    def work() -> list[int]:
        transfer_queue.init()
        ids = transfer_queue.kv_batch_get(keys=["a"], partition_id="train")["ids"].unbind()[0].tolist()
        transfer_queue.kv_batch_put(["b"], "train", TensorDict({"ids": torch.tensor([ids])}, batch_size=1))
        transfer_queue.get_client().close()  # transfer_queue.close() would kill the controller of all
        return list(ids)

    assert ray.get(work.remote()) == [1, 1]
    assert queue.kv_batch_get(keys=["b"], partition_id="train")["ids"].unbind()[0].tolist() == [1, 1]
