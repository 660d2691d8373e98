"""The packed forward pass and the losses on it, against each rollout in a forward pass of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from replaybuf.errors import Invalid
from replaybuf.wire.batch import BatchGroup, Segment, encode_batch
from replaybuf.wire.group import RolloutJson
from replaybuf_trainer.losses import BatchTotals, LossTokens, Objective, Tally, load_objective
from replaybuf_trainer.losses.policy import BUILT_IN
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.models.packed_forward import loss_token_states, packed_forward
from replaybuf_trainer.reading import TensorBatch, read_tensors
from tests import builders
from tests.trainer.batches import Rollout, logprobs_alone, packed, rollouts, trained_rows
from tests.trainer.models import varlen

ROWS = [[4, 0, 2], [1], [], [5, 3]]
CLIPPED = load_objective("grpo", {"clip_high": 0.28})
WITH_EVERY_PART: dict[str, Any] = {
    "correction": {"level": "geometric", "mode": "reject", "lower": 0.5},
    "reference": {"weight": 0.3, "estimate": "k2"},
    "entropy": {"weight": 0.1, "share": 0.5},
}


@pytest.fixture(scope="module")
def model(models: Path) -> Any:
    """The model of folder `a`."""
    return load_model(models / "a")


@pytest.fixture(params=["eager", "sdpa", varlen.NAME])
def attending(request: pytest.FixtureRequest, model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model with each attention that runs here."""
    monkeypatch.setattr(model.config, "_attn_implementation", request.param)
    return model


@pytest.fixture(scope="module")
def members() -> list[Rollout]:
    """Six rollouts of different lengths."""
    return rollouts(6, seed=0)


def test_a_prompt_token_in_the_loss_trains_as_the_same_token_of_a_completion(attending: Any) -> None:
    """The first 4 completion tokens of one body are the end of the prompt in the other: same loss, same gradient."""
    ids, logprobs = list(range(10, 19)), [-4.0 - 0.25 * t for t in range(6)]
    shared: dict[str, Any] = {"reward": 1.0, "advantage": 0.5}
    apart = RolloutJson(prompt_ids=ids[:3], completion_ids=ids[3:], inference_logprobs=logprobs, **shared)
    moved = RolloutJson(
        prompt_ids=ids[:7],
        prompt_mask=[0] * 3 + [1] * 4,
        prompt_logprobs=[0.0] * 3 + logprobs[:4],
        completion_ids=ids[7:],
        inference_logprobs=logprobs[4:],
        **shared,
    )
    computed = []
    for rows in (apart, moved):
        entry = BatchGroup(group=builders.group(rows), index=0, staleness=0, times_sampled=1)
        body = encode_batch(builders.batch_meta(micro_batches=1), [[Segment(entry, 0)]])
        attending.zero_grad()
        tokens = packed_forward(attending, read_tensors(bytes(body)).micro_batches)
        loss = CLIPPED.value(tokens, BatchTotals(6, 1), Tally())
        torch.autograd.backward(loss)
        gradient = torch.cat([p.grad.flatten() for p in attending.parameters() if p.grad is not None])
        computed.append((len(tokens.logprobs), loss.detach(), gradient))
    (count, loss, gradient), (other_count, other_loss, other_gradient) = computed
    assert count == other_count == 6 and gradient.any()
    torch.testing.assert_close(loss, other_loss)
    torch.testing.assert_close(gradient, other_gradient)


def alone(model: Any, members: Sequence[Rollout], old: Sequence[float]) -> LossTokens:
    """The columns from one forward pass per rollout, in the order of `ROWS`; `old` is by place in that order."""
    order = [members[number] for row in ROWS for number in row]
    columns: dict[str, list[Any]] = {name: [] for name in ("logprobs", "entropies", "advantages", "rollout")}
    inference, ref = [], []
    for number, rollout in enumerate(order):
        every = logprobs_alone(model, rollout)
        for t, token in enumerate(rollout.completion_ids):
            if not rollout.completion_mask[t]:
                continue
            columns["logprobs"].append(every[t, token])
            columns["entropies"].append(-sum(p.exp() * p for p in every[t].unbind()))
            columns["advantages"].append(torch.tensor(rollout.advantage))
            columns["rollout"].append(torch.tensor(number))
            inference.append(rollout.inference_logprobs[t])
            ref.append(rollout.ref_logprobs[t])
    return LossTokens(
        **{name: torch.stack(values) for name, values in columns.items()},
        inference_logprobs=torch.tensor(inference),
        old_logprobs=torch.tensor(old),
        ref_logprobs=torch.tensor(ref),
        sampling_weights=torch.ones(len(order)),
        staleness=torch.ones(len(order), dtype=torch.int32),
    )


def totals_of(batch: TensorBatch) -> BatchTotals:
    return BatchTotals(batch.meta.batch_loss_tokens, batch.meta.batch_rollouts)


def loss_of(model: Any, batch: TensorBatch, objective: Objective, tally: Tally | None = None) -> torch.Tensor:
    """The loss of all rows of a batch in one forward pass."""
    return objective.value(packed_forward(model, trained_rows(batch)), totals_of(batch), tally or Tally())


def gradients(model: Any, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(value, list(model.parameters()))


def test_packed_rollouts_have_the_logits_they_have_alone(attending: Any, members: list[Rollout]) -> None:
    """Rollouts of one row, padding and rows of other lengths do not see each other."""
    assert largest_difference_of_logprobs(attending, members) < 1e-5


@pytest.mark.parametrize(
    ("attention", "broken"),
    [
        ("eager", "a mask of ones"),
        ("sdpa", "a mask of ones"),
        (varlen.NAME, "no bounds"),
        (varlen.NAME, "bounds that are one token late"),
    ],
)
def test_rollouts_that_see_each_other_have_other_logits(
    attention: str, broken: str, model: Any, members: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With isolation broken on purpose the comparison above fails by far."""
    monkeypatch.setattr(model.config, "_attn_implementation", attention)
    forward = model.model.forward

    def mixed(**keywords: Any) -> Any:
        if broken == "a mask of ones":
            return forward(**keywords | {"attention_mask": torch.ones_like(keywords["input_ids"])})
        bounds = keywords.pop("cu_seq_lens_q")
        keywords.pop("cu_seq_lens_k")
        if broken == "no bounds":
            return forward(**keywords)
        bounds[1:-1] += 1
        longest = int(bounds.diff().max())
        late = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        return forward(**keywords | late)

    monkeypatch.setattr(model.model, "forward", mixed)
    assert largest_difference_of_logprobs(model, members) > 1e-2


def largest_difference_of_logprobs(model: Any, members: list[Rollout]) -> float:
    """Between packed rows and single rollouts, over the whole vocabulary at every loss token."""
    batch = packed(members, ROWS, pad_to_multiple_of=8)
    with torch.no_grad():
        targets, hidden = loss_token_states(model, trained_rows(batch))
        logprobs = torch.log_softmax(model.lm_head(hidden), -1)
    with pytest.MonkeyPatch.context() as restored, torch.no_grad():
        restored.setattr(model.model, "forward", type(model.model).forward.__get__(model.model))
        expected = [
            (logprobs_alone(model, members[number])[t], members[number].completion_ids[t])
            for row in ROWS
            for number in row
            for t, bit in enumerate(members[number].completion_mask)
            if bit
        ]
    assert targets.tolist() == [token for _, token in expected]
    return float((logprobs - torch.stack([every for every, _ in expected])).abs().max())


@pytest.mark.parametrize("options", [{}, WITH_EVERY_PART], ids=["plain", "with every part"])
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_value_and_gradient_equal_those_of_single_rollouts(
    attending: Any, members: list[Rollout], name: str, options: dict[str, Any]
) -> None:
    """With masked tokens, padding and a filler row; the weights have the same gradient within 1e-5."""
    model = attending
    objective = load_objective(name, options | {"normalise_constant": 9})
    batch = packed(members, ROWS, pad_to_multiple_of=8)
    rows = [
        row | {"old_logprobs": row["inference_logprobs"] + 0.1 * row["position_ids"].float().cos()}
        for row in trained_rows(batch)
    ]
    value = objective.value(packed_forward(model, rows), totals_of(batch), Tally())
    old = torch.cat([row["old_logprobs"][row["loss_mask"]] for row in rows]).tolist()
    expected = objective.value(alone(model, members, old), totals_of(batch), Tally())
    assert value.item() == pytest.approx(expected.item(), abs=1e-5)
    for actual, wanted in zip(gradients(model, value), gradients(model, expected), strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-4)


def test_losses_of_parts_of_a_batch_add_up_to_the_loss_of_the_whole(model: Any, members: list[Rollout]) -> None:
    """How many rows go through the model at once changes nothing."""
    batch = packed(members, ROWS)
    totals = totals_of(batch)
    with torch.no_grad():
        whole = loss_of(model, batch, CLIPPED)
        parts = [CLIPPED.value(packed_forward(model, [row]), totals, Tally()) for row in trained_rows(batch)]
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-6)


def test_rows_of_other_ranks_count_in_the_mean(model: Any, members: list[Rollout]) -> None:
    """The mean is over the loss tokens of all ranks: twice as many elsewhere halve the loss here."""
    batch = packed(members, ROWS)
    with torch.no_grad():
        tokens = packed_forward(model, trained_rows(batch))
        alone = CLIPPED.value(tokens, totals_of(batch), Tally())
        shared = CLIPPED.value(tokens, BatchTotals(2 * batch.meta.batch_loss_tokens, 0), Tally())
    assert float(shared) == pytest.approx(float(alone) / 2)


def test_sampling_weights_multiply_the_loss(model: Any, members: list[Rollout]) -> None:
    """Weight 0.5 for the only group halves the loss."""
    with torch.no_grad():
        losses = [
            float(loss_of(model, batch, CLIPPED))
            for batch in (packed(members, ROWS), packed(members, ROWS, sampling_weight=0.5))
        ]
    assert losses[1] == pytest.approx(losses[0] / 2)


def test_a_ratio_beyond_the_clip_has_no_gradient(model: Any) -> None:
    """The policy has moved far enough: an advantage that pulls on pulls no more, one that pulls back does."""
    rollout = rollouts(1, seed=3)[0]
    ones = [1] * len(rollout.completion_ids)
    for behaviour, advantage, moves in ((-9.0, 1.0, False), (-9.0, -1.0, True), (-1.0, -1.0, False), (-1.0, 1.0, True)):
        recorded = Rollout(
            rollout.prompt_ids, rollout.completion_ids, ones, [behaviour] * len(ones), rollout.ref_logprobs, advantage
        )
        batch = packed([recorded], [[0]])
        loss = loss_of(model, batch, load_objective("grpo"))
        norm = sum(float(g.norm()) for g in torch.autograd.grad(loss, list(model.parameters())))
        assert (norm > 0) == moves, (behaviour, advantage)


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(model: Any, members: list[Rollout]) -> None:
    """With the policy's own logprobs as inference logprobs; the entropy is that of the distributions."""
    recorded, entropies = [], []
    with torch.no_grad():
        for rollout in members:
            every = logprobs_alone(model, rollout)
            own = [float(every[t, token]) for t, token in enumerate(rollout.completion_ids)]
            entropies += [
                -float((e.exp() * e).sum()) for e, bit in zip(every, rollout.completion_mask, strict=True) if bit
            ]
            recorded.append(
                Rollout(
                    rollout.prompt_ids,
                    rollout.completion_ids,
                    rollout.completion_mask,
                    own,
                    rollout.ref_logprobs,
                    rollout.advantage,
                )
            )
        batch, tally = packed(recorded, ROWS), Tally()
        loss_of(model, batch, CLIPPED, tally)
    assert tally.tokens == batch.meta.batch_loss_tokens == len(entropies)
    figures = tally.figures()
    assert figures["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert figures["clip_fraction"] == 0.0
    assert figures["entropy"] == pytest.approx(sum(entropies) / len(entropies), abs=1e-5)


def test_a_penalty_without_reference_logprobs_is_rejected(model: Any, members: list[Rollout]) -> None:
    """The message names the missing logprobs."""
    batch = packed(members, ROWS, with_ref=False)
    with pytest.raises(Invalid, match="ref_logprobs"):
        loss_of(model, batch, load_objective("grpo", {"reference": {"weight": 0.1}}))
