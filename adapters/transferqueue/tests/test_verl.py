"""verl's replay buffer on this back end: verl finds it, and the oldest groups are drawn before and after a crash."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from replaybuf_transferqueue import restore
from tests.valkeys import Valkey

Start = Callable[..., Any]


def new_buffer(evicted: list[int]) -> Any:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    return ReplayBufferAsync("separate_async", {}, 2, "drop", {}, poll_interval=0.05, refill_fn=evicted.append)


def put_prompt(queue: Any, uid: str, step: int) -> None:
    tag = {"is_prompt": True, "status": "pending", "global_steps": step}
    queue.kv_batch_put([uid], "train", TensorDict({"prompt": NonTensorStack(uid)}, batch_size=1), tags=[tag])


def put_rollouts(queue: Any, uid: str, step: int) -> None:
    """Put what verl's agent loop puts: two rollouts of a prompt, and then the prompt's new status, as a tag only."""
    fields = TensorDict({"responses": torch.full((2, 4), step), "of": NonTensorStack(uid, uid)}, batch_size=2)
    tags = [{"status": "success", "global_steps": step}] * 2
    queue.kv_batch_put([f"{uid}_{session}_0" for session in (0, 1)], "train", fields, tags=tags)
    queue.kv_put(uid, "train", tag={"status": "finished"})


def read(queue: Any, keys: list[str]) -> dict[str, int]:
    """Read rollouts; return the step of each group."""
    data = queue.kv_batch_get(keys=keys, partition_id="train")
    tokens = {}
    for key, responses, uid in zip(keys, data["responses"].unbind(), data["of"], strict=True):
        assert uid == key.split("_")[0] and responses.tolist() == responses.tolist()[:1] * 4
        tokens[uid] = responses.tolist()[0]
    assert len(keys) == 2 * len(tokens)
    return tokens


def test_verl_registers_the_back_end_by_its_entry_point() -> None:
    code = (
        "import verl; from transfer_queue.storage.managers.base import StorageManagerFactory as f; print(f._registry)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "ReplaybufStorageManager" in result.stdout


def test_its_replay_buffer_draws_the_oldest_groups_before_and_after_a_crash(
    start_queue: Start, valkey: Valkey, tmp_path: Path
) -> None:
    queue, evicted = start_queue(), list[int]()
    for step, uid in ((1, "stale"), (3, "b"), (2, "a"), (4, "c")):
        put_prompt(queue, uid, step)
        put_rollouts(queue, uid, step)
    batch, metrics = new_buffer(evicted).sample(3, "train", 1)
    assert read(queue, batch.keys) == {"a": 2} and evicted == [1]
    assert metrics["training/off_policy/evicted_samples"] == 1
    queue.kv_clear(batch.keys, "train")
    queue.save_checkpoint(tmp_path / "ck")
    batch, _ = new_buffer(evicted).sample(4, "train", 2)
    queue.kv_clear(batch.keys, "train")
    assert not queue.kv_list("train")["train"]

    queue = start_queue()  # the controller and all that it knew are gone
    valkey.kill()
    valkey.start()
    queue.load_checkpoint(tmp_path / "ck")
    batch, _ = new_buffer(evicted).sample(4, "train", 2)
    assert read(queue, batch.keys) == {"b": 3, "c": 4} and evicted == [1]
    queue.kv_clear(batch.keys, "train")
    for number in range(2):
        queue.save_checkpoint(tmp_path / f"later{number}")
    assert not valkey.client.keys("*:v:*")


def test_rollouts_of_a_group_that_was_not_finished_at_the_checkpoint_are_kept_and_their_status_is_not(
    start_queue: Start, tmp_path: Path
) -> None:
    queue, evicted = start_queue(), list[int]()
    put_prompt(queue, "done", 1)
    put_rollouts(queue, "done", 1)
    put_prompt(queue, "open", 2)
    queue.save_checkpoint(tmp_path / "ck")
    put_rollouts(queue, "open", 2)

    queue = start_queue()
    restored = restore(tmp_path / "ck")
    assert {sample.key for sample in restored.later} == {"open_0_0", "open_1_0"} and not restored.missing
    buffer = new_buffer(evicted)
    assert buffer.get_sampleable_count(2, "train") == 1 and buffer.pending_keys["train"] == {"open"}
    put_rollouts(queue, "open", 2)  # verl generates the prompt again; the new rollouts replace the old ones
    batch, _ = buffer.sample(2, "train", 2)
    assert read(queue, batch.keys) == {"done": 1, "open": 2}
    assert new_buffer(evicted).get_sampleable_count(9, "train") == 0 and not evicted
