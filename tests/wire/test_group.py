"""Groups: two forms with the same content, checks of the whole group, consistent truncation."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import GroupRejected
from replaybuf.wire.group import Group, GroupJson, RolloutJson, group_from_json, group_to_json
from replaybuf.wire.group_check import LOGPROB_TOLERANCE, GroupLimits, Rejection, check_group, truncate
from tests.builders import assert_same_group, group, group_of_lengths, groups, rollout, wire_group, wire_groups

NAN, INF = math.nan, math.inf
FIELDS_PER_TOKEN = (
    "completion_mask",
    "inference_logprobs",
    "ref_logprobs",
    "old_logprobs",
    "teacher_logprobs",
    "token_advantages",
)


def reason_of(made: Group, **bounds: Any) -> str | None:
    """Return the rejection reason of a group in a run with these limits, or None."""
    rejection = check_group(made, GroupLimits(**bounds))
    return None if rejection is None else rejection.reason


# ---------------------------------------------------------------------- two forms


@given(wire_groups())
def test_a_group_round_trips_from_json_to_columns(wire: GroupJson) -> None:
    """Missing fields come back as their defaults."""
    back = group_to_json(group_from_json(wire))
    for sent, received in zip(wire.rollouts, back.rollouts, strict=True):
        length = len(sent.completion_ids)
        expected = msgspec.structs.replace(
            sent,
            completion_mask=sent.completion_mask if sent.completion_mask is not None else [1] * length,
            version_spans=sent.version_spans or [(wire.policy_version, 0, length)],
        )
        assert msgspec.to_builtins(received) == msgspec.to_builtins(expected)
    assert msgspec.structs.replace(back, rollouts=[]) == msgspec.structs.replace(wire, rollouts=[])


@given(groups())
def test_columns_round_trip_through_json_text(made: Group) -> None:
    text = msgspec.json.encode(group_to_json(made))
    assert_same_group(group_from_json(msgspec.json.decode(text, type=GroupJson)), made)


@given(groups())
def test_columns_agree_on_rollouts_and_tokens(made: Group) -> None:
    n, tokens = made.rollouts, int(made.completion_lengths.sum())
    assert made.tokens == int(made.lengths.sum()) == len(made.prompt_ids) + tokens
    assert len(made.completion_ids) == len(made.completion_mask) == len(made.inference_logprobs) == tokens
    assert len(made.rewards) == len(made.temperatures) == len(made.finish_reasons) == n
    assert made.policy_version <= made.policy_version_max == int(made.version_spans[:, 1].max())


def test_a_group_without_spans_has_one_span_of_its_policy_version() -> None:
    made = group(rollout(), policy_version=4)
    assert made.version_spans.tolist() == [[0, 4, 0, 3]]
    assert made.policy_version_max == 4


def test_an_unknown_field_is_rejected() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `logprobs`"):
        msgspec.convert(msgspec.to_builtins(rollout()) | {"logprobs": []}, RolloutJson)


def test_prompt_tokens_are_in_the_loss_only_where_a_mask_says_so() -> None:
    """A mask of zeros is the default; other rollouts of the group need neither mask nor logprobs."""
    none = group(rollout(prompt_mask=[0, 0], prompt_logprobs=[-0.5, -0.5]), rollout())
    assert none.prompt_mask is None and none.prompt_logprobs is None
    made = group(rollout(prompt_mask=[0, 1], prompt_logprobs=[-9.0, -0.5]), rollout(prompt_logprobs=[-0.5, -0.5]))
    assert made.prompt_mask is not None and made.prompt_mask.tolist() == [False, True, False, False]
    assert made.prompt_logprobs is not None and made.prompt_logprobs.tolist() == [0.0, -0.5, 0.0, 0.0]
    assert (made.sampled_lengths.tolist(), made.loss_lengths.tolist()) == ([3, 3], [4, 3])
    assert reason_of(made) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_mask": [1]}, "prompt_mask: 1 value; needed: one per prompt token, 2"),
        ({"prompt_mask": [0, 1], "prompt_logprobs": [-0.5]}, "prompt_logprobs: 1 value; .*one per prompt token, 2"),
        ({"prompt_mask": [0, 1]}, "prompt_logprobs: missing, and prompt_mask has a 1; needed: one per prompt token, 2"),
        ({"prompt_mask": [0, 2], "prompt_logprobs": [-0.5, -0.5]}, "prompt_mask: a value other than 0 and 1"),
    ],
)
def test_prompt_masks_that_do_not_fit_their_prompt_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GroupRejected, match=message):
        group(rollout(), rollout(**fields))


# ---------------------------------------------------------------------- rejected by the conversion


@pytest.mark.parametrize("name", FIELDS_PER_TOKEN)
@pytest.mark.parametrize("length", [0, 2, 4])
def test_lists_of_wrong_length_are_rejected_by_name(name: str, length: int) -> None:
    value = [1 if name == "completion_mask" else -0.5] * length
    with pytest.raises(GroupRejected, match=rf"rollouts\[1\].{name}: {length} values; needed: .* 3") as caught:
        group(rollout(), rollout(**{name: value}))
    assert caught.value.reason == "length_mismatch"


@pytest.mark.parametrize(
    ("reason", "first", "other"),
    [
        ("partial_advantages", {"advantage": 0.5}, {}),
        ("length_mismatch", {"ref_logprobs": [-1.0] * 3}, {}),
        ("length_mismatch", {"old_logprobs": [-1.0] * 3}, {}),
        ("length_mismatch", {"teacher_logprobs": [-1.0] * 3}, {}),
        ("length_mismatch", {"token_advantages": [-1.0] * 3}, {}),
        ("length_mismatch", {"rewards": {"correct": 1.0}}, {}),
        ("length_mismatch", {"rewards": {"correct": 1.0}}, {"rewards": {"style": 1.0}}),
        ("bad_mask", {}, {"completion_mask": [0, 1, 2]}),
        ("token_out_of_range", {}, {"prompt_ids": [1, 2**31]}),
        ("token_out_of_range", {}, {"completion_ids": [1, 2, -(2**40)]}),
        ("token_out_of_range", {}, {"completion_ids": [1, 2, 2**70]}),
        ("bad_version_spans", {}, {"version_spans": [(2**31, 0, 3)]}),
    ],
)
def test_one_rollout_that_does_not_fit_columns_rejects_the_group(
    reason: str, first: dict[str, Any], other: dict[str, Any]
) -> None:
    """Optional values are given for all rollouts or none; numbers fit their column."""
    for rollouts in ([rollout(**first), rollout(**other)], [rollout(**other), rollout(**first)]):
        with pytest.raises(GroupRejected) as caught:
            group(*rollouts)
        assert caught.value.reason == reason
        assert caught.value.status == 422


# ---------------------------------------------------------------------- rejected by the checks


def test_a_group_within_all_limits_is_accepted() -> None:
    bounds = GroupLimits(
        published_version=0,
        adapters=frozenset({"a"}),
        group_size=2,
        vocab_size=6,
        seq_len=5,
        tokens_per_batch=10,
    )
    assert check_group(group(adapter="a"), bounds) is None


@pytest.mark.parametrize(
    ("reason", "bounds"),
    [
        ("wrong_group_size", {"group_size": 3}),
        ("token_out_of_range", {"vocab_size": 5}),
        ("overlong", {"seq_len": 4}),
        ("over_budget", {"tokens_per_batch": 9}),
        ("version_above_published", {"published_version": -1}),
    ],
)
def test_each_limit_has_its_own_reason(reason: str, bounds: dict[str, int]) -> None:
    rejection = check_group(group(), GroupLimits(**bounds))  # type: ignore[arg-type]
    assert rejection is not None and rejection.reason == reason
    assert str(next(iter(bounds.values()))) in rejection.detail


BAD_SPANS: list[list[tuple[int, int, int]]] = [
    [],
    [(0, 0, 2)],
    [(0, 1, 3)],
    [(0, 0, 4)],
    [(0, 0, 1), (0, 2, 3)],
    [(0, 0, 2), (0, 1, 3)],
    [(0, 0, 3), (0, 3, 3)],
    [(0, 0, 3), (0, 0, 3)],
    [(-1, 0, 3)],
]


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("empty_prompt", {"prompt_ids": []}),
        ("empty_completion", {"completion_ids": [], "inference_logprobs": []}),
        ("token_out_of_range", {"prompt_ids": [-1]}),
        ("token_out_of_range", {"completion_ids": [1, 2, -1]}),
        *[("non_finite_logprobs", {"inference_logprobs": [-0.1, bad, -0.1]}) for bad in (NAN, INF, -INF, -1e300)],
        ("positive_logprobs", {"inference_logprobs": [-0.1, -0.1, 0.0011]}),
        *[("non_finite_rewards", {"reward": bad}) for bad in (NAN, INF, -INF, 1e39, -1e300)],
        *[("non_finite_rewards", {"rewards": {"correct": bad}}) for bad in (NAN, INF)],
        *[("bad_temperature", {"temperature": bad}) for bad in (NAN, INF, -0.1, 1e300)],
        *[("bad_version_spans", {"version_spans": spans}) for spans in BAD_SPANS],
        ("version_above_published", {"version_spans": [(0, 0, 2), (1, 2, 3)]}),
    ],
)
def test_one_bad_rollout_rejects_the_whole_group(reason: str, fields: dict[str, Any]) -> None:
    """At any position among good rollouts."""
    names = fields.get("rewards", {})
    good = [rollout(rewards=dict.fromkeys(names, 0.0)) for _ in range(2)]
    for at in range(3):
        rollouts = [*good[:at], rollout(**fields), *good[at:]]
        assert reason_of(group(*rollouts), published_version=0) == reason


@pytest.mark.parametrize("name", ["ref_logprobs", "old_logprobs", "teacher_logprobs"])
@pytest.mark.parametrize(("value", "reason"), [(NAN, "non_finite_logprobs"), (0.5, "positive_logprobs")])
def test_optional_logprobs_have_the_same_rules(name: str, value: float, reason: str) -> None:
    good, bad = rollout(**{name: [-0.5] * 3}), rollout(**{name: [-0.5, value, -0.5]})
    assert reason_of(group(good, bad)) == reason


@pytest.mark.parametrize(
    ("mask", "logprobs", "reason"),
    [
        ([0, 1], [0.0, NAN], "non_finite_logprobs"),
        ([0, 1], [0.0, 0.5], "positive_logprobs"),
        ([1, 1], [-0.5, -0.5], "bad_mask"),
    ],
)
def test_prompt_tokens_in_the_loss_have_the_rules_of_sampled_ones(
    mask: list[int], logprobs: list[float], reason: str
) -> None:
    """Nothing predicts the first token of a prompt, so it cannot be in the loss."""
    assert reason_of(group(rollout(), rollout(prompt_mask=mask, prompt_logprobs=logprobs))) == reason


def test_a_prompt_mask_of_a_frame_needs_logprobs() -> None:
    made = group(rollout(prompt_mask=[0, 1], prompt_logprobs=[0.0, -0.5]))
    assert reason_of(msgspec.structs.replace(made, prompt_logprobs=None)) == "bad_mask"


@pytest.mark.parametrize("bad", [NAN, INF, 1e39])
def test_an_advantage_beyond_float32_is_rejected(bad: float) -> None:
    """Times a mask of 0 it would be NaN in the trainer's loss."""
    assert reason_of(group(rollout(advantage=0.0), rollout(advantage=bad))) == "non_finite_advantages"
    by_token = [rollout(token_advantages=[0.0, value, 0.0]) for value in (0.5, bad)]
    assert reason_of(group(*by_token)) == "non_finite_advantages"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rollouts": []}, "no_rollouts"),
        ({"policy_version": 3, "rollouts": [rollout(version_spans=[(4, 0, 3)])]}, "bad_version_spans"),
        ({"policy_version": -1}, "bad_version_spans"),
        ({"adapter": "unknown"}, "unknown_adapter"),
        ({"prompt_index": -1}, "bad_prompt_index"),
        ({"prompt_index": 2**70}, "bad_prompt_index"),
    ],
)
def test_wrong_fields_of_the_group_reject_it(fields: dict[str, Any], reason: str) -> None:
    made = group_from_json(msgspec.structs.replace(wire_group(), **fields))
    assert reason_of(made) == reason


def test_an_adapter_of_the_run_is_accepted() -> None:
    assert reason_of(group(adapter="math"), adapters=frozenset({"math"})) is None


@pytest.mark.parametrize("within", [0.0, 0.5 * LOGPROB_TOLERANCE, LOGPROB_TOLERANCE])
def test_a_logprob_may_exceed_zero_by_the_rounding_of_engines(within: float) -> None:
    assert LOGPROB_TOLERANCE == 1e-3
    assert reason_of(group(rollout(inference_logprobs=[-0.1, -0.1, within]))) is None


def test_masked_tokens_have_the_same_rules() -> None:
    """They have logprobs too, and a NaN would spread through sums."""
    made = group(rollout(completion_mask=[1, 0, 1], inference_logprobs=[-0.1, NAN, -0.1]))
    assert reason_of(made) == "non_finite_logprobs"


@given(groups())
def test_spans_may_come_in_any_order(made: Group) -> None:
    order = np.random.default_rng(made.tokens).permutation(len(made.version_spans))
    shuffled = msgspec.structs.replace(made, version_spans=made.version_spans[order], adapter="")
    assert reason_of(shuffled, published_version=99) is None


@given(groups(), st.lists(st.tuples(*[st.integers(-1, 5)] * 4), max_size=6))
def test_spans_are_accepted_only_if_they_cover_every_token_once(
    made: Group, spans: list[tuple[int, int, int, int]]
) -> None:
    """Against a slow check: each token of each completion is in one span, no span is empty or outside."""
    drawn = msgspec.structs.replace(made, version_spans=np.array(spans, np.int32).reshape(-1, 4), adapter="")
    wanted = {(k, token) for k, n in enumerate(made.completion_lengths.tolist()) for token in range(n)}
    covered = [(k, token) for k, _, start, end in spans for token in range(start, end)]
    exact = sorted(covered) == sorted(wanted) and all(start < end for *_, start, end in spans)
    right = exact and min(version for _, version, *_ in spans) == made.policy_version
    assert (reason_of(drawn) is None) == right


# ---------------------------------------------------------------------- truncation


@given(groups(longest=9), st.integers(1, 20))
def test_a_truncated_group_is_consistent_and_as_long_as_possible(made: Group, seq_len: int) -> None:
    """Lengths are min(tokens, seq_len), but at least one completion token stays; other tokens do not change."""
    made = msgspec.structs.replace(made, adapter="")
    cut = truncate(made, seq_len)
    assert reason_of(cut, published_version=99) is None
    expected = np.minimum(made.lengths, np.maximum(seq_len, made.prompt_lengths + 1))
    assert cut.lengths.tolist() == expected.tolist()
    assert cut.prompt_ids is made.prompt_ids
    before, after = group_to_json(made).rollouts, group_to_json(cut).rollouts
    for first, other in zip(before, after, strict=True):
        kept = len(other.completion_ids)
        for name in ("completion_ids", *FIELDS_PER_TOKEN):
            whole = getattr(first, name)
            assert getattr(other, name) == (None if whole is None else whole[:kept])
        assert (other.reward, other.advantage, other.temperature) == (first.reward, first.advantage, first.temperature)
        assert other.finish_reason == (first.finish_reason if kept == len(first.completion_ids) else "length")
        assert other.version_spans == [(v, a, min(b, kept)) for v, a, b in first.version_spans or [] if a < kept]


def test_a_short_group_is_not_copied() -> None:
    made = group_of_lengths([4, 6])
    assert truncate(made, 6) is made


def test_a_group_without_its_oldest_tokens_has_a_newer_policy_version() -> None:
    """`policy_version` is the version of the oldest token that is left."""
    made = group(rollout(version_spans=[(7, 0, 2), (5, 2, 3)]), policy_version=5)
    cut = truncate(made, 4)
    assert (cut.policy_version, cut.policy_version_max) == (7, 7)
    assert reason_of(cut) is None


@pytest.mark.parametrize("spans", [[[9, 0, 0, 3]], [[-9, 0, 0, 3]], [[0, 0, 0, 9]], [[0, 0, 0, 1]], []])
def test_truncation_does_not_repair_wrong_spans(spans: list[list[int]]) -> None:
    made = msgspec.structs.replace(group(rollout()), version_spans=np.array(spans, np.int32).reshape(-1, 4))
    assert reason_of(truncate(made, 3), seq_len=3) == "bad_version_spans"


def test_a_rejection_has_a_reason_and_a_detail() -> None:
    rejection = check_group(group(), GroupLimits(vocab_size=5))
    assert rejection == Rejection("token_out_of_range", "completion_ids holds 5; vocab_size is 5")
