"""Version of each token, and the mask of old tokens: both against a slow reading of the JSON form."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.wire.column.token_versions import NO_VERSION, count_stale, mask_stale, token_versions
from replaybuf.wire.group import Group, group_to_json
from tests.builders import group, groups, rollout


def slow_versions(made: Group) -> list[int]:
    """Read the version of each completion token from the spans of its rollout, one token at a time."""
    versions = []
    for sequence in group_to_json(made).rollouts:
        for position, sampled in enumerate(sequence.completion_mask or []):
            (version,) = [version for version, start, end in sequence.version_spans or [] if start <= position < end]
            versions.append(version if sampled else NO_VERSION)
    return versions


@given(groups(), st.randoms(use_true_random=False))
def test_each_token_has_the_version_of_its_span(made: Group, random: np.random.Generator) -> None:
    """In whatever order the spans are, and with text of the environment in between."""
    order = list(range(len(made.version_spans)))
    random.shuffle(order)
    shuffled = msgspec.structs.replace(made, version_spans=made.version_spans[order])
    for variant in (made, shuffled):
        versions = token_versions(variant)
        assert versions.dtype == np.int32 and versions.tolist() == slow_versions(made)


@given(groups(), st.integers(0, 9))
def test_old_tokens_leave_the_mask_and_are_counted(made: Group, least: int) -> None:
    """Only sampled tokens count, prompt tokens as old as the group, and nothing else of the group changes."""
    versions = slow_versions(made)
    masked = mask_stale(made, least)
    prompts = 0 if made.prompt_mask is None or made.policy_version >= least else int(made.prompt_mask.sum())
    assert masked.completion_mask.tolist() == [version >= least for version in versions]
    assert count_stale(made, least) == sum(NO_VERSION < version < least for version in versions) + prompts
    assert (masked.prompt_mask is made.prompt_mask) == (made.prompt_mask is None or made.policy_version >= least)
    others = [name for name in made.__struct_fields__ if name not in ("completion_mask", "prompt_mask")]
    assert all(getattr(masked, name) is getattr(made, name) for name in others)


def test_a_group_without_old_tokens_stays_the_same_object() -> None:
    made = group(policy_version=3)
    assert mask_stale(made, None) is made and mask_stale(made, 3) is made
    assert mask_stale(made, 4) is not made


@pytest.mark.parametrize(
    "spans",
    [[], [[0, 9, 0, 3]], [[0, 9, 0, 3], [5, 9, 0, 3]], [[0, 9, 0, 99], [1, 9, 0, 3]], [[0, 9, -7, 3], [1, 9, 0, 3]]],
    ids=["none", "one missing", "unknown rollout", "too long", "before the start"],
)
def test_spans_that_do_not_fit_give_way_to_the_version_of_the_group(spans: list[list[int]]) -> None:
    """A direct writer stores groups that no service checked."""
    made = msgspec.structs.replace(
        group(rollout(completion_mask=[1, 0, 1]), rollout(), policy_version=2),
        version_spans=np.array(spans, np.int32).reshape(-1, 4),
    )
    assert token_versions(made).tolist() == [2, NO_VERSION, 2, 2, 2, 2]
    assert count_stale(made, 3) == 5
