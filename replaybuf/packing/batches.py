"""Groups of a batch in the rows of its ranks: the body of each rank as a pure function of record, groups and layout.

The service packs what it decides, and `replaybuf.client.offline` packs groups without a service. Both get the same
bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.packing.cost import TYPICAL
from replaybuf.packing.pack import Row, fillers, pack
from replaybuf.packing.rewards import BatchRewards, summarise_rewards
from replaybuf.wire.batch import BatchMeta, BodyExtra, padded_length
from replaybuf.wire.column.metadata import encode_within
from replaybuf.wire.column.token_versions import count_stale, mask_stale
from replaybuf.wire.config import Cost
from replaybuf.wire.group import Group
from replaybuf.wire.group_check import truncate
from replaybuf.wire.ledger import BatchRecord
from replaybuf.wire.plan import Plan, PlannedGroup, build_body

MOST_METADATA_BYTES = 16 << 20
"""Bytes of JSON that the metadata of all groups of a batch may take: readers of safetensors bound the header."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a trainer says about its batches when it attaches. `cost` of a rollout by its length; None = `TYPICAL`."""

    seq_len: int
    dp_world_size: int = 1
    pad_to_multiple_of: int = 1
    cost: Cost | None = None
    extras: tuple[BodyExtra, ...] = ()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class PackedGroups:
    """The groups of a record, in order, and the grid of its ranks.

    - `planned`, `groups`: each group as in a plan, and its columns, cut to the layout
    - `owners`: (group, rollout in it) of each rollout; `loss_tokens`: tokens of each rollout in the loss mask
    - `tokens`, `all_loss_tokens`: tokens of all ranks without padding, and how many of them are in the loss mask
    - `masked_tokens`: sampled tokens of all ranks that are too old for the loss
    - `rewards`: mean reward and its parts over all ranks, if the trainer asked for them
    """

    record: BatchRecord
    planned: list[PlannedGroup]
    groups: list[Group]
    owners: list[tuple[int, int]]
    loss_tokens: list[int]
    grid: list[list[Row]]
    row_tokens: list[list[int]]
    tokens: int
    all_loss_tokens: int
    masked_tokens: int
    rewards: BatchRewards | None
    layout: Layout

    @classmethod
    def pack(
        cls,
        record: BatchRecord,
        planned: list[PlannedGroup],
        stored: Sequence[Group],
        layout: Layout,
        **more: Any,
    ) -> Self:
        """Pack groups, as they are stored, for a layout; `more`: the other fields of a subclass."""
        groups = [truncate(group, layout.seq_len) for group in stored]
        lengths = np.concatenate([group.lengths for group in groups]).astype(np.int32)
        grid = pack(lengths, layout.seq_len, layout.dp_world_size, layout.cost or TYPICAL, _adapter_codes(groups))
        least = record.least_versions
        in_loss = [mask_stale(group, least.get(group.adapter)) for group in groups]
        loss_tokens = [tokens for group in in_loss for tokens in group.loss_lengths.tolist()]
        return cls(
            record=record,
            planned=planned,
            groups=groups,
            owners=[(position, k) for position, group in enumerate(groups) for k in range(group.rollouts)],
            loss_tokens=loss_tokens,
            grid=grid,
            row_tokens=[[int(lengths[row].sum()) for row in rank] for rank in grid],
            tokens=int(lengths.sum(dtype=np.int64)),
            all_loss_tokens=sum(loss_tokens),
            masked_tokens=sum(count_stale(group, least[group.adapter]) for group in groups) if least else 0,
            rewards=summarise_rewards(groups) if "reward_parts" in layout.extras else None,
            layout=layout,
            **more,
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches per rank."""
        return len(self.grid[0])

    @property
    def fillers(self) -> int:
        """Micro-batches without rollouts, of all ranks."""
        return fillers(self.grid)

    def positions(self, rank: int) -> list[int]:
        """List the positions in the batch of one rank's groups, ascending."""
        return sorted({self.owners[item][0] for row in self.grid[rank] for item in row})

    def padded_rows(self) -> list[int]:
        """List the tokens of every row with its padding."""
        multiple = self.layout.pad_to_multiple_of
        return [padded_length(tokens, multiple) for rank in self.row_tokens for tokens in rank]


def _adapter_codes(groups: Sequence[Group]) -> npt.NDArray[np.int32] | None:
    """Return the adapter code of each rollout; None if all have the same adapter."""
    codes = {name: code for code, name in enumerate(sorted({group.adapter for group in groups}))}
    if len(codes) < 2:
        return None
    rollouts = [group.rollouts for group in groups]
    return np.repeat(np.array([codes[group.adapter] for group in groups], np.int32), rollouts)


def plan_of(run: str, batch: PackedGroups, rank: int, release: str = "") -> Plan:
    """Return the plan of one rank's body; only plans that leave the process need the `release`."""
    record, layout, grid = batch.record, batch.layout, batch.grid[rank]
    # Groups are numbered per rank, in the order in which the batch holds them.
    present = batch.positions(rank)
    local = {position: index for index, position in enumerate(present)}
    items = [item for row in grid for item in row]
    tokens = sum(batch.row_tokens[rank])
    meta = BatchMeta(
        run=run,
        step=record.step,
        generation=record.generation,
        batch_id=record.batch_id,
        digest=record.digest,
        dp_rank=rank,
        dp_world_size=layout.dp_world_size,
        version=record.version,
        strategy=record.strategy,
        options=record.options,
        micro_batches=len(grid),
        adapters=[batch.groups[batch.owners[row[0]][0]].adapter if row else "" for row in grid],
        group_ids=[record.groups[position].group_id for position in present],
        tokens=tokens,
        padding=sum(padded_length(t, layout.pad_to_multiple_of) for t in batch.row_tokens[rank]) - tokens,
        loss_tokens=sum(batch.loss_tokens[item] for item in items),
        rollouts=len(items),
        batch_tokens=batch.tokens,
        batch_loss_tokens=batch.all_loss_tokens,
        batch_rollouts=len(batch.owners),
        batch_groups=len(batch.groups),
        adapters_completed=completed(record) if record.adapters else msgspec.UNSET,
        batch_masked_tokens=msgspec.UNSET if record.stale_token_mask is None else batch.masked_tokens,
        batch_reward_mean=batch.rewards.mean if batch.rewards else msgspec.UNSET,
        batch_reward_parts=batch.rewards.parts if batch.rewards else msgspec.UNSET,
    )
    if "metadata" in layout.extras:
        # Over the groups of all ranks, so that every rank leaves out the same.
        encoded = list(encode_within((group.metadata for group in batch.groups), MOST_METADATA_BYTES))
        meta = msgspec.structs.replace(meta, group_metadata=[encoded[position] for position in present])
    return Plan(
        meta=meta,
        rows=[[(local[batch.owners[item][0]], batch.owners[item][1]) for item in row] for row in grid],
        groups=[batch.planned[position] for position in present],
        seq_len=layout.seq_len,
        pad_to_multiple_of=layout.pad_to_multiple_of,
        release=release,
        least_versions=record.least_versions,
        extras=tuple(extra for extra in layout.extras if extra not in ("reward_parts", "metadata")),
    )


def write_body(run: str, batch: PackedGroups, rank: int) -> memoryview:
    """Write the body of one rank."""
    groups = [batch.groups[position] for position in batch.positions(rank)]
    # Not copied into bytes: that would hold the interpreter for as long as it copies.
    return build_body(plan_of(run, batch, rank), groups).toreadonly()


def completed(record: BatchRecord) -> dict[str, int]:
    """Return adapter -> own step for the adapters whose step a batch completes."""
    return {name: part.step for name, part in record.adapters.items() if part.completed}
