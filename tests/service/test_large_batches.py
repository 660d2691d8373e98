"""Batches for thousands of ranks: what one rank gets does not cost a pass over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from replaybuf.kernel.rows.index import ENTRY
from replaybuf.kernel.state.history import AttachedTrainer
from replaybuf.packing.batches import plan_of
from replaybuf.service.bodies import assembly
from replaybuf.service.bodies.assembly import FetchedGroups, PackedBatch, pack_batch
from replaybuf.service.bodies.release import SMALL
from replaybuf.store.entries import NO_STRINGS, IndexEntry
from replaybuf.wire import ledger
from replaybuf.wire.group import group_from_json
from tests.builders import batch_entry, batch_record, rollout, wire_group


class Unread(list[Any]):
    """A list that counts the items that are read."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            Unread.read += 1
            yield item

    def __getitem__(self, at: Any) -> Any:
        Unread.read += 1
        return super().__getitem__(at)


def packed(groups: int, ranks: int, at_s: float = 0.0) -> PackedBatch:
    """Pack groups of one rollout for a layout."""
    numbers = range(1, groups + 1)
    record = msgspec.structs.replace(batch_record(0, [batch_entry(n) for n in numbers]), at_s=at_s)
    entries = [IndexEntry(n, np.zeros(1, ENTRY)[0], NO_STRINGS) for n in numbers]
    loaded = {n: group_from_json(wire_group(rollout(), group_id=f"g{n}")) for n in numbers}
    return pack_batch(
        record, FetchedGroups(entries, loaded, {}), AttachedTrainer(epoch=1, dp_world_size=ranks, seq_len=64)
    )


def test_the_plan_of_a_rank_reads_only_its_own_share() -> None:
    """Sums over all ranks in the plan of each of 4,096 ranks took half a minute."""
    batch = packed(groups=256, ranks=128)
    batch.loss_tokens, batch.owners = Unread(batch.loss_tokens), Unread(batch.owners)
    batch.row_tokens, batch.planned = Unread(batch.row_tokens), Unread(batch.planned)
    Unread.read = 0
    plan = plan_of("r", batch, 5)
    assert plan.meta.rollouts == 2
    assert Unread.read < 30
    assert (plan.meta.batch_tokens, plan.meta.batch_loss_tokens) == (
        sum(sum(rank) for rank in batch.row_tokens),
        sum(batch.loss_tokens),
    )


def test_the_tag_of_a_body_does_not_encode_the_batch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop asks for the tag of each rank; a thread encodes the record once, when it packs the batch."""
    batch = packed(groups=4, ranks=2)
    monkeypatch.setattr(ledger, "_encode", None)
    assert batch.etag(0, "identity") != batch.etag(1, "identity")


def test_the_tag_of_a_body_is_the_same_whenever_the_batch_was_recorded() -> None:
    """A batch that was prepared has the time of its preparation until the decision; no byte depends on it."""
    assert packed(4, 2, at_s=1.0).etag(0, "identity") == packed(4, 2, at_s=2.0).etag(0, "identity")
    assert packed(4, 2).etag(0, "identity") != packed(4, 4).etag(0, "identity")


def test_a_dropped_batch_is_freed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing the lists of 16,384 groups in one go held the event loop for 0.1 s."""
    garbage: list[list[Any]] = []
    monkeypatch.setattr(assembly, "release", lambda *large: garbage.extend(large))
    batch = packed(SMALL + 1, 2)
    groups, grid = batch.groups, batch.grid
    del batch
    assert all(any(part is freed for freed in garbage) for part in (groups, grid))
