"""The trainer of a run, batches of its history, and the rewinds that took some of them back."""

from __future__ import annotations

import dataclasses

from replaybuf.kernel.rows.index import Numbers
from replaybuf.kernel.state.rotation import Rotation
from replaybuf.packing.batches import Layout

MAX_REWINDS = 1_000
"""Rewinds kept per adapter to tell tickets apart: 128 kB."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttachedTrainer(Layout):
    """The attached trainer and the layout of its batches; `fixed`: it needs equal batches.

    `generation`: of its first batch. A follower may have read ATTACH, and not the REWIND after it.
    """

    epoch: int
    fixed: bool = False
    generation: int = 0


@dataclasses.dataclass(slots=True)
class BatchState:
    """A batch that a resume may need: ledger entry, and numbers of its groups int64 [n].

    `earlier`: last step before this one of each group used before, by number; `rotation`: that before the batch.
    """

    entry: int
    generation: int
    numbers: Numbers
    earlier: dict[int, int]
    rotation: Rotation
    acked: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedBatch:
    """A batch of the current history whose ledger record is kept: needed by a resume or not."""

    entry: int
    generation: int
    numbers: Numbers


@dataclasses.dataclass(frozen=True, slots=True)
class VoidedBatch:
    """A batch that a resample voided: valid in generations `generation` <= g < `until_generation`."""

    entry: int
    generation: int
    until_generation: int


def add_rewind(rewinds: list[tuple[int, int]], generation: int, version: int) -> list[tuple[int, int]]:
    """Add the rewind that began `generation` and went back to `version`; both numbers ascend in the list.

    An earlier rewind is dropped if this one went back as far. Above `MAX_REWINDS` the two oldest are merged: tickets
    issued between them count as of lost versions, and their prompts are issued again.
    """
    kept = [*(earlier for earlier in rewinds if earlier[1] < version), (generation, version)]
    if len(kept) > MAX_REWINDS:
        kept[:2] = [(kept[1][0], kept[0][1])]
    return kept


def lost_version_since(rewinds: list[tuple[int, int]], generation: int) -> int | None:
    """Return the lowest version that rewinds after `generation` went back to; None without such a rewind."""
    return min((version for reached, version in rewinds if reached > generation), default=None)
