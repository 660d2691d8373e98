"""Groups from token ids, logprobs and rewards: what arrives, and errors that name rollout, field and bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replaybuf.client import Client, group_builder
from replaybuf.client.producers import GroupBuilder, ServerTurn
from replaybuf.errors import GroupRejected
from tests.conftest import RunClient, ServeProcess

TWO = ([3, 4, 5], [-0.25, -0.5, -1.0])


def started(**fields: Any) -> GroupBuilder:
    filled: dict[str, Any] = {"prompt_id": "p", "policy_version": 4, "group_id": "g"}
    return group_builder([1, 2], **filled | fields)


def turn(prompt_ids: list[int], token_ids: list[int], **fields: Any) -> ServerTurn:
    return ServerTurn(prompt_ids=prompt_ids, token_ids=token_ids, logprobs=[-0.5] * len(token_ids), **fields)


def test_a_built_group_is_stored_and_answers_with_the_same_values(run: RunClient, service: ServeProcess) -> None:
    """With the ticket's index, and advantages of the run's estimator."""
    run.put(batch={"groups_per_batch": 1}, group_size=2)
    with Client(service.url, run.run) as client:
        tickets = client.take_tickets("mine", 1)
        (ticket,) = tickets.tickets
        builder = group_builder([1, 2], prompt_id="p/1", policy_version=tickets.published_version, ticket=ticket)
        builder.add(*TWO, 1.0, rewards={"right": 1.0}, finish_reason="stop")
        builder.add(np.array([6]), np.array([-0.125]), 0.0, rewards={"right": 0.0}, mask=[1], policy_version=0)
        (result,) = client.append([builder.build()])
        stored = client.get_group(result.group_id or "")
    assert (result.status, stored.prompt_index, stored.prompt_id) == ("stored", ticket.prompt_index, "p/1")
    assert stored.rollouts is not None
    first, second = stored.rollouts
    assert (first.prompt_ids, first.completion_ids, first.inference_logprobs) == ([1, 2], *TWO)
    assert (second.completion_ids, second.reward, second.rewards) == ([6], 0.0, {"right": 0.0})
    assert first.advantage == -(second.advantage or 0.0) != 0.0


def test_turns_and_answers_of_tools_become_one_masked_completion() -> None:
    """The version may rise between turns, and staleness counts from the oldest one."""
    builder = started()
    rollout = builder.rollout().sampled([3, 4], [-0.5, -0.5]).read([7, 8])
    rollout.sampled([5], [-1.0], policy_version=6, finish_reason="stop").score(1.0, advantage=0.5)
    group = builder.build()
    assert group.completion_ids.tolist() == [3, 4, 7, 8, 5]
    assert group.completion_mask.tolist() == [True, True, False, False, True]
    assert group.inference_logprobs.tolist() == [-0.5, -0.5, 0.0, 0.0, -1.0]
    assert group.version_spans.tolist() == [[0, 4, 0, 4], [0, 6, 4, 5]]
    assert (group.policy_version, group.finish_reasons) == (4, ("stop",))
    assert group.advantages is not None and group.advantages.tolist() == [0.5]


def test_turns_of_a_server_find_what_the_environment_wrote_between_them() -> None:
    """The prompt of a later request is the tokens so far and the answer of the tool."""
    builder = group_builder(prompt_id="p", policy_version=4, group_id="g")
    rollout = builder.rollout().turn(turn([1, 2], [3, 4])).turn(turn([1, 2, 3, 4, 9, 9], [5], versions=[(7, 0, 1)]))
    rollout.score(1)
    group = builder.build()
    assert group.prompt_ids.tolist() == [1, 2] and group.completion_ids.tolist() == [3, 4, 9, 9, 5]
    assert group.completion_mask.tolist() == [True, True, False, False, True]
    assert group.version_spans.tolist() == [[0, 4, 0, 4], [0, 7, 4, 5]]


@pytest.mark.parametrize(("prompt", "place"), [([1, 2, 3, 8, 9], 3), ([1, 2, 3], 3), ([1, 2], 2)])
def test_a_conversation_that_was_written_again_is_rejected(prompt: list[int], place: int) -> None:
    """Training would use tokens that the policy never sampled."""
    rollout = started().rollout().turn(turn([1, 2], [3, 4]))
    with pytest.raises(GroupRejected, match=rf"^rollouts\[0\].prompt_ids: differ .* at token {place}; needed: the tok"):
        rollout.turn(turn(prompt, [5]))


def test_masked_tokens_need_no_logprobs() -> None:
    """Other loops write NaN or 0 there."""
    group = started().add([3, 9, 4], [-0.5, float("nan"), -0.5], 1.0, mask=[1, 0, 1]).build()
    assert group.inference_logprobs.tolist() == [-0.5, 0.0, -0.5]


def test_columns_of_other_models_and_advantages_per_token_arrive() -> None:
    builder = started()
    for reward in (0.0, 1.0):
        builder.add(*TWO, reward, ref_logprobs=[-1.0] * 3, token_advantages=[0.5, 0.0, -0.5])
    group = builder.build()
    assert group.ref_logprobs is not None and group.ref_logprobs.tolist() == [-1.0] * 6
    assert group.token_advantages is not None and group.token_advantages.tolist() == [0.5, 0.0, -0.5] * 2


def test_prompt_tokens_of_a_rollout_can_be_in_the_loss() -> None:
    """Such as turns that the policy sampled before; the logprob of a token outside the mask does not matter."""
    builder = started().add(*TWO, 1.0, prompt_mask=[0, 1], prompt_logprobs=[float("nan"), -0.5]).add(*TWO, 0.0)
    group = builder.build()
    assert group.prompt_mask is not None and group.prompt_mask.tolist() == [False, True, False, False]
    assert group.prompt_logprobs is not None and group.prompt_logprobs.tolist() == [0.0, -0.5, 0.0, 0.0]
    assert started().add(*TWO, 1.0, prompt_mask=[0, 0], prompt_logprobs=[0, 0]).build().prompt_mask is None


def test_rollouts_have_a_proof_each_or_none_has() -> None:
    group = started().add(*TWO, 1.0, proof=b"abc").add(*TWO, 0.0, proof=b"").build()
    assert group.proofs is not None and group.proofs.tobytes() == b"abc"
    assert group.proof_lengths is not None and group.proof_lengths.tolist() == [3, 0]
    with pytest.raises(GroupRejected, match=r"rollouts\[0\].proof is missing"):
        started().add(*TWO, 1.0).add(*TWO, 0.0, proof=b"abc").build()


FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": [-0.5]}, "length_mismatch", "rollouts[1].logprobs: 1 value; needed: one per completion token, 3"),
    ({"mask": [1]}, "length_mismatch", "rollouts[1].mask: 1 value; needed: one per completion token, 3"),
    ({"mask": [1, 2, 0]}, "bad_mask", "rollouts[1].mask[1]: 2; needed: 0 or 1"),
    ({"prompt_mask": [1]}, "length_mismatch", "rollouts[1].prompt_mask: 1 value; needed: one per prompt token, 2"),
    ({"prompt_mask": [0, 1]}, "length_mismatch", "rollouts[1].prompt_logprobs: 0 values; needed: one per prompt token"),
    ({"logprobs": [-0.5, float("nan"), 0]}, "non_finite_logprobs", "rollouts[1].logprobs[1]: nan; needed: a finite"),
    ({"logprobs": [-0.5, 0.7, 0]}, "positive_logprobs", "rollouts[1].logprobs[1]: 0.7; needed: at most 0.001, in nats"),
    ({"reward": float("inf")}, "non_finite_rewards", "rollouts[1].reward: inf; needed: a finite number"),
    ({"reward": "1"}, "non_finite_rewards", "rollouts[1].reward: 1; needed: a finite number"),
    ({"rewards": {"a": float("nan")}}, "non_finite_rewards", "rollouts[1].rewards.a: nan; needed"),
    ({"advantage": float("nan")}, "non_finite_advantages", "rollouts[1].advantage: nan; needed"),
    (
        {"completion_ids": [3, -1, 4]},
        "token_out_of_range",
        "rollouts[1].completion_ids[1]: -1; needed: token ids, 0 to",
    ),
    ({"completion_ids": [3, 2**31, 4]}, "token_out_of_range", "rollouts[1].completion_ids[1]: 2147483648; needed"),
    ({"completion_ids": [3, 0.5, 4]}, "token_out_of_range", "rollouts[1].completion_ids[1]: 0.5; needed"),
    ({"completion_ids": "abc"}, "length_mismatch", "rollouts[1].completion_ids: 0 dimensions of <U3; needed: one list"),
    ({"completion_ids": [[3, 4, 5]]}, "length_mismatch", "rollouts[1].completion_ids: 2 dimensions of int64; needed"),
    ({"policy_version": -1}, "bad_version_spans", "rollouts[1].policy_version: -1; needed: 0 to 2147483647"),
    ({"policy_version": [(4, 0, 2)]}, "bad_version_spans", "rollouts[1].policy_version: spans end at token 2; needed"),
    ({"policy_version": [(4, 0, 1), (4, 2, 3)]}, "bad_version_spans", "a span from 2 to 3 after 1; needed: spans that"),
    ({"policy_version": [(4, 0, 1), (3, 1, 3)]}, "bad_version_spans", "rollouts[1].policy_version: 3; needed: 4 to"),
    ({"ref_logprobs": [-0.5]}, "length_mismatch", "rollouts[1].ref_logprobs: 1 value; needed: one per completion"),
]


@pytest.mark.parametrize(("change", "reason", "message"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_a_wrong_value_names_rollout_field_value_and_bound(change: dict[str, Any], reason: str, message: str) -> None:
    """When it is added, so that the traceback has the line that made it; the rollouts before stay."""
    builder = started().add(*TWO, 1.0)
    fields: dict[str, Any] = {"completion_ids": TWO[0], "logprobs": TWO[1], "reward": 0.0}
    with pytest.raises(GroupRejected) as caught:
        builder.add(**fields | change)
    assert (caught.value.reason, message in caught.value.detail) == (reason, True), caught.value.detail
    assert caught.value.name is not None and caught.value.name.startswith("rollouts[1].")
    assert len(builder) == len(builder.build().rewards) == 1


def test_a_version_that_falls_between_turns_is_rejected() -> None:
    """A rewind took back the weights of the first turn; their number now means other weights."""
    rollout = started().rollout().sampled([3], [-0.5], policy_version=6)
    with pytest.raises(GroupRejected, match=r"^rollouts\[0\].policy_version: 5; needed: at least 6"):
        rollout.sampled([4], [-0.5], policy_version=5)


def test_a_group_that_is_not_complete_is_not_built() -> None:
    """Rollouts without tokens or reward, values that only some rollouts have, no rollouts, no name."""
    with pytest.raises(GroupRejected, match=r"^group_id: None; needed: a name, or a ticket"):
        group_builder([1], prompt_id="p", policy_version=0)
    with pytest.raises(GroupRejected, match=r"^rollouts: 0; needed: at least 1"):
        started().build()
    with pytest.raises(GroupRejected, match=r"^rollouts\[0\].prompt_ids: 0 tokens; needed: at least 1"):
        group_builder(prompt_id="p", policy_version=0, group_id="g").add(*TWO, 1.0).build()
    with pytest.raises(GroupRejected, match=r"^rollouts\[0\].completion_ids: 0 tokens; needed: at least 1"):
        started().add([], [], 1.0).build()
    silent = started()
    silent.rollout().sampled(*TWO)
    with pytest.raises(GroupRejected, match=r"^rollouts\[0\].reward: None; needed: a finite number: call score"):
        silent.build()
    with pytest.raises(GroupRejected, match=r"^advantage: missing in rollouts\[1\]; needed: given for all"):
        started().add(*TWO, 1.0, advantage=1.0).add(*TWO, 1.0).build()
    with pytest.raises(GroupRejected, match=r"^ref_logprobs: missing in rollouts\[0\]; needed: given for all"):
        started().add(*TWO, 1.0).add(*TWO, 1.0, ref_logprobs=[-1.0] * 3).build()
    with pytest.raises(GroupRejected, match=r"^rollouts\[1\].rewards: the names \['b'\]; needed: those of"):
        started().add(*TWO, 1.0, rewards={"a": 1}).add(*TWO, 1.0, rewards={"b": 1}).build()
    with pytest.raises(TypeError, match="logits is not a column; the columns are ref_logprobs"):
        started().add(*TWO, 1.0, logits=[1, 2, 3])


def test_a_column_that_later_turns_outgrow_is_rejected() -> None:
    builder = started()
    builder.rollout().sampled(*TWO).score(1.0, ref_logprobs=[-1.0] * 3).sampled([3], [-0.5])
    with pytest.raises(GroupRejected, match=r"^rollouts\[0\].ref_logprobs: 3 values; needed: one per .* 4$"):
        builder.build()


def test_a_version_above_the_published_one_is_named_by_the_service(run: RunClient, service: ServeProcess) -> None:
    run.put(batch={"groups_per_batch": 1})
    with Client(service.url, run.run) as client:
        (result,) = client.append([started(policy_version=3).add(*TWO, 1.0).build()])
    assert (result.status, result.reason) == ("rejected", "version_above_published")
    assert result.detail == "the newest policy version is 3; the published version is 0"
