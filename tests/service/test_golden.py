"""Stored bytes keep their meaning: frames, snapshots, ledger records and batch bodies do not change by accident.

A digest that changes on purpose needs a new format version, so that older bytes are refused and never misread.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any

import msgspec

from replaybuf.kernel.state.snapshot import MAGIC, encode_snapshot, take
from replaybuf.wire.frame import encode_frame
from tests.builders import group, group_of_lengths, rollout
from tests.conftest import RunClient, ServeProcess
from tests.conftest import group as json_group
from tests.kernel.test_state import Run

FRAMES = "5807bb3b57de99ef"
SNAPSHOT = "231ee9140578b34f"
BODIES = "7806d51dbf26c725"
LEDGER = "8821a7d74b177c91"
HEADER_BYTES = len(MAGIC) + 20


def digest(*parts: bytes) -> str:
    """Return one short digest of these bytes."""
    return hashlib.sha256(b"|".join(parts)).hexdigest()[:16]


def test_frames_are_the_same_bytes() -> None:
    """A plain group, one with every optional column, one of long rollouts."""
    full = rollout(
        completion_mask=[1, 0, 1],
        ref_logprobs=[-0.5, -0.5, -0.5],
        old_logprobs=[-0.25, -0.5, -1.0],
        teacher_logprobs=[-2.0, -1.0, -0.5],
        rewards={"correct": 1.0},
        advantage=0.5,
        version_spans=[(3, 0, 2), (4, 2, 3)],
        finish_reason="stop",
        temperature=0.5,
    )
    whole = group(full, full, group_id="full", policy_version=3, adapter="a", metadata={"env": "sum", "n": 1})
    assert digest(*map(encode_frame, (group(), whole, group_of_lengths([900, 30])))) == FRAMES


def test_a_snapshot_is_the_same_bytes() -> None:
    """A run with batches, acks, an eviction, a checkpoint, a rewind and a failed prompt."""
    run = Run(max_uses=2)
    run.store(0, 0, 1, 1, 2)
    run.train(1, 2)
    run.train(2, 3)
    run.evict(5)
    run.checkpoint(1)
    run.rewind(1, "resample")
    assert digest(zlib.decompress(encode_snapshot(take(run.state))[HEADER_BYTES:])) == SNAPSHOT


def _comparable(value: Any) -> Any:
    """Leave out what people read, times and how far the index was, and the random part of payload keys."""
    if isinstance(value, dict):
        return {name: _comparable(part) for name, part in value.items() if name not in ("at_s", "index_end")}
    if isinstance(value, list):
        return [_comparable(part) for part in value]
    return value.rpartition(":")[0] if isinstance(value, str) and value.startswith("rb:p:") else value


def test_batch_bodies_and_ledger_records_are_the_same(service: ServeProcess) -> None:
    """Two ranks, two uses of a group, padding: every body and the whole ledger but for the times in it."""
    run = RunClient(service.url, "golden")
    assert run.put(
        strategy={"name": "replay", "options": {"max_uses": 2, "max_staleness": 3}},
        batch={"groups_per_batch": 4, "seq_len": 32, "pad_to_multiple_of": 8},
        seed=7,
    ).is_success
    epoch = run.attach(dp_world_size=2)
    run.append(*(json_group(f"g{n}", tokens=5 + n, rollouts=1 + n % 3) for n in range(8)))
    bodies = []
    for step in range(3):
        for rank in range(2):
            response = run.batch(step, epoch, dp_rank=rank)
            assert response.status_code == 200, response.text
            bodies.append(response.content)
        run.ack(step, epoch)
        run.publish(step + 1, epoch)
    ledger = _comparable(run.get("ledger").json()["records"])
    assert digest(msgspec.json.encode(ledger)) == LEDGER, json.dumps(ledger, indent=1)
    assert digest(*bodies) == BODIES
    run.http.close()
