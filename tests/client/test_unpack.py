"""Split values per token by rollout; sum them by group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.client.unpack import GroupSum, RolloutKey, Tokens, merge_sums, per_group, per_rollout, rollout_keys
from replaybuf.errors import Invalid
from replaybuf.packing.pack import pack
from replaybuf.wire.batch import Batch, BatchGroup, Segment, encode_batch, read_batch
from replaybuf.wire.group import Group, group_from_json
from tests.builders import batch_meta, rollout, wire_group

MASKED = wire_group(
    rollout(prompt_ids=[1], completion_ids=[2, 3, 4], completion_mask=[1, 0, 1]),
    rollout(prompt_ids=[5, 6], completion_ids=[7, 8, 9], completion_mask=[0, 0, 0]),
)


def packed(groups: Sequence[Group], ranks: int = 1, seq_len: int = 64, multiple: int = 8) -> list[Batch]:
    """Pack groups as the service does; return one batch per rank."""
    lengths = np.concatenate([group.lengths for group in groups]).astype(np.int32)
    owners = [(position, k) for position, group in enumerate(groups) for k in range(group.rollouts)]
    parts = []
    for rank, grid in enumerate(pack(lengths, seq_len, ranks)):
        present = sorted({owners[item][0] for row in grid for item in row})
        entries = {
            at: BatchGroup(group=groups[at], index=index, staleness=0, times_sampled=1)
            for index, at in enumerate(present)
        }
        rows = [[Segment(entries[owners[item][0]], owners[item][1]) for item in row] for row in grid]
        names = [f"g{at}" for at in present]
        meta = batch_meta(dp_rank=rank, dp_world_size=ranks, micro_batches=len(rows), group_ids=names)
        parts.append(read_batch(encode_batch(meta, rows, pad_to_multiple_of=multiple)))
    return parts


def groups_of(sizes: Sequence[Sequence[tuple[int, int]]]) -> list[Group]:
    """Build groups from (prompt, completion) lengths; every third completion token is masked."""
    return [
        group_from_json(
            wire_group(
                *(
                    rollout(
                        prompt_ids=[1] * prompt,
                        completion_ids=[2] * completion,
                        completion_mask=[int(t % 3 != 2) for t in range(completion)],
                        inference_logprobs=[-0.5] * completion,
                    )
                    for prompt, completion in members
                ),
                group_id=f"g{number}",
            )
        )
        for number, members in enumerate(sizes)
    ]


SIZES = st.lists(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=5), min_size=1, max_size=6
)


@given(SIZES, st.integers(1, 4), st.sampled_from([1, 8]), st.integers(0, 2**31))
def test_unpacked_values_equal_the_packed_values(
    sizes: list[list[tuple[int, int]]], ranks: int, multiple: int, seed: int
) -> None:
    """Over all ranks each rollout appears once, with all its values."""
    groups = groups_of(sizes)
    rng = np.random.default_rng(seed)
    originals = {
        (f"g{number}", k): rng.standard_normal(int(group.lengths[k]))
        for number, group in enumerate(groups)
        for k in range(group.rollouts)
    }
    columns: dict[Tokens, dict[tuple[str, int], list[float]]] = {"all": {}, "completion": {}, "sampled": {}}
    for batch in packed(groups, ranks, multiple=multiple):
        for row in batch.micro_batches:
            names = [(batch.meta.group_ids[key.group_index], key.rollout_index) for key in rollout_keys(row)]
            padding = len(row.input_ids) - sum(len(originals[name]) for name in names)
            values = np.concatenate([*(originals[name] for name in names), np.full(padding, np.nan)])
            for tokens, cut in columns.items():
                for name, (key, part) in zip(names, per_rollout(row, values, tokens).items(), strict=True):
                    assert key.rollout_index == name[1] and name not in cut
                    cut[name] = part.tolist()
    assert columns["all"] == {name: values.tolist() for name, values in originals.items()}
    for (group_id, k), values in originals.items():
        group = groups[int(group_id[1:])]
        prompt, completion = int(group.prompt_lengths[k]), int(group.completion_lengths[k])
        assert columns["completion"][group_id, k] == values[prompt:].tolist()
        mask = [t % 3 != 2 for t in range(completion)]
        assert columns["sampled"][group_id, k] == values[prompt:][mask].tolist()


@given(SIZES, st.integers(1, 4))
def test_the_sum_of_a_group_covers_its_rollouts_on_all_ranks(sizes: list[list[tuple[int, int]]], ranks: int) -> None:
    """Only sampled tokens count. The values are integers, so the sums are exact."""
    groups = groups_of(sizes)
    parts = []
    expected: dict[str, list[int]] = {f"g{number}": [] for number in range(len(groups))}
    for batch in packed(groups, ranks):
        parts.append(per_group(batch, [np.arange(len(row.input_ids)) for row in batch.micro_batches]))
        for row in batch.micro_batches:
            for key, values in per_rollout(row, np.arange(len(row.input_ids)), "sampled").items():
                expected[batch.meta.group_ids[key.group_index]] += values.tolist()
    assert merge_sums(parts) == {name: GroupSum(float(sum(v)), len(v)) for name, v in expected.items()}


def test_a_fully_masked_rollout_has_an_empty_completion() -> None:
    (batch,) = packed([group_from_json(MASKED)])
    (row,) = batch.micro_batches
    values = np.arange(len(row.input_ids))
    lengths = {tokens: sorted(map(len, per_rollout(row, values, tokens).values())) for tokens in ("completion", "all")}
    assert lengths == {"completion": [0, 3], "all": [4, 5]}
    assert per_group(batch, [np.ones(len(values))]) == {"g0": GroupSum(2.0, 2)}


def test_values_per_rollout_are_views_of_any_dimension() -> None:
    (batch,) = packed(groups_of([[(1, 2), (2, 3)]]))
    row = batch.micro_batches[0]
    values = np.zeros((len(row.input_ids), 4))
    cut = per_rollout(row, values)
    assert all(np.shares_memory(part, values) and part.shape[1:] == (4,) for part in cut.values())
    assert set(cut) == {RolloutKey(0, 0), RolloutKey(0, 1)}


def test_the_mean_without_tokens_is_0() -> None:
    assert (GroupSum(3.0, 4).mean, GroupSum(0.0, 0).mean) == (0.75, 0.0)


def test_values_of_the_wrong_length_are_rejected_with_both_lengths() -> None:
    """Also when the values of a micro-batch are missing."""
    (batch,) = packed(groups_of([[(1, 2)]]))
    with pytest.raises(Invalid, match=r"shape \[3\]; the micro-batch has 8 tokens"):
        per_rollout(batch.micro_batches[0], np.zeros(3))
    with pytest.raises(Invalid, match="arrays for 0 micro-batches; the batch has 1"):
        per_group(batch, [])
