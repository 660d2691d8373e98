"""A key that is put many times: the last acknowledged values come back, and older ones are freed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from replaybuf_transferqueue import restore
from tests.valkeys import Valkey

Start = Callable[..., Any]
KEYS = ["a", "b", "c"]
FIELDS = ["prompts", "responses", "scores"]
PIECES = 16
"""Most pieces of a sample between two prunes; the store looks at a sample that has so many."""


def held(valkey: Valkey) -> dict[str, int]:
    """Count the entries of every key of the store."""
    counts = {"values": len(valkey.client.keys("*:v:*"))}
    for name, count in (("records", "hlen"), ("births", "zcard"), ("deaths", "zcard"), ("at", "hlen")):
        counts[name] = getattr(valkey.client, count)(f"rbtq:{{transferqueue}}:{name}")
    return counts


def put_again(queue: Any, rng: random.Random, expected: dict[str, dict[str, int]], number: int) -> None:
    """Put some fields of some keys once more, and note them when the put returned."""
    keys, fields = rng.sample(KEYS, rng.randint(1, 3)), rng.sample(FIELDS, rng.randint(1, 3))
    columns = {field: torch.full((len(keys), 4), number) for field in fields}
    queue.kv_batch_put(keys, "train", TensorDict(columns, batch_size=len(keys)), tags=[{"number": number}] * len(keys))
    for key in keys:
        expected[key] |= dict.fromkeys(fields, number)


def read(queue: Any) -> dict[str, dict[str, int]]:
    values: dict[str, dict[str, int]] = {}
    for key in KEYS:
        data = queue.kv_batch_get(keys=[key], partition_id="train", select_fields=FIELDS)
        for field in FIELDS:
            (value,) = data[field].unbind()
            assert value.tolist() == value.tolist()[:1] * 4
            values.setdefault(key, {})[field] = value.tolist()[0]
    return values


def test_the_last_acknowledged_values_come_back_and_older_ones_are_freed(
    start_queue: Start, valkey: Valkey, tmp_path: Path
) -> None:
    queue, rng = start_queue(), random.Random(5)
    first = {field: torch.zeros(len(KEYS), 4, dtype=torch.int64) for field in FIELDS}
    queue.kv_batch_put(KEYS, "train", TensorDict(first, batch_size=len(KEYS)))
    expected = {key: dict.fromkeys(FIELDS, 0) for key in KEYS}
    most = 0
    for number in range(1, 101):
        put_again(queue, rng, expected, number)
        if number in (30, 40, 50):
            queue.save_checkpoint(tmp_path / f"ck{number}")
        most = max(most, held(valkey)["values"])
    # Two kept checkpoints may name as many again.
    assert most <= 3 * len(KEYS) * PIECES

    for folder in (tmp_path / "ck50", None):  # on a checkpoint, and without one
        queue = start_queue()
        valkey.kill()
        valkey.start()
        restored = restore(folder)
        assert not restored.missing and {sample.key for sample in restored.later} == set(KEYS)
        assert read(queue) == expected
    for number in range(2):  # the checkpoints that keep old values go
        queue.save_checkpoint(tmp_path / f"later{number}")
    left = held(valkey)
    assert left["values"] <= len(KEYS) * len(FIELDS) and left["deaths"] == 0 and left["at"] == len(KEYS)
    assert left["values"] == left["records"] == left["births"]
    assert read(queue) == expected
    queue.kv_clear(KEYS, "train")
    for number in range(2, 4):
        queue.save_checkpoint(tmp_path / f"later{number}")
    assert set(held(valkey).values()) == {0}
