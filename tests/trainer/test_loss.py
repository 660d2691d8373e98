"""The packed forward pass and the clipped objective, against the same computed naively, rollout by rollout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from replaybuf.errors import Invalid
from replaybuf_trainer.loss import Tally, rows_loss, token_logits
from replaybuf_trainer.model import load_model
from replaybuf_trainer.options import Objective
from tests.trainer.batches import Rollout, logprobs_alone, packed, rollouts, trained_rows

ROWS = [[4, 0, 2], [1], [], [5, 3]]
CLIPPED = Objective(clip_low=0.2, clip_high=0.28)


@pytest.fixture(scope="module")
def model(models: Path) -> Any:
    """The model of folder `a`."""
    return load_model(models / "a")


@pytest.fixture(scope="module")
def members() -> list[Rollout]:
    """Six rollouts of different lengths."""
    return rollouts(6, seed=0)


def naive_losses(model: Any, rollout: Rollout, objective: Objective) -> list[torch.Tensor]:
    """Losses of one rollout's loss tokens, one scalar formula per token."""
    every = logprobs_alone(model, rollout)
    losses = []
    for t, token in enumerate(rollout.completion_ids):
        if not rollout.completion_mask[t]:
            continue
        logprob = every[t, token]
        ratio = (logprob - rollout.inference_logprobs[t]).exp()
        lowest, highest = torch.tensor(1 - objective.clip_low), torch.tensor(1 + objective.clip_high)
        bounded = lowest if ratio < lowest else highest if ratio > highest else ratio
        loss = -min(ratio * rollout.advantage, bounded * rollout.advantage)
        if objective.kl:
            loss = loss + objective.kl * (
                (rollout.ref_logprobs[t] - logprob).exp() - (rollout.ref_logprobs[t] - logprob) - 1
            )
        losses.append(loss)
    return losses


def naive_loss(model: Any, members: Sequence[Rollout], objective: Objective) -> torch.Tensor:
    """Mean over all loss tokens of all rollouts."""
    losses = [loss for rollout in members for loss in naive_losses(model, rollout, objective)]
    return torch.stack(losses).mean()


def test_packed_rollouts_have_the_logits_they_have_alone(model: Any, members: list[Rollout]) -> None:
    """Rollouts of one row, padding and rows of other lengths do not see each other."""
    batch = packed(members, ROWS, pad_to_multiple_of=8)
    with torch.no_grad():
        targets, logits = token_logits(model, trained_rows(batch))
        logprobs = torch.log_softmax(logits, -1)
        alone = [
            (logprobs_alone(model, members[k])[t], members[k].completion_ids[t])
            for row in ROWS
            for k in row
            for t, bit in enumerate(members[k].completion_mask)
            if bit
        ]
    assert targets.tolist() == [token for _, token in alone]
    torch.testing.assert_close(logprobs, torch.stack([every for every, _ in alone]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("objective", [CLIPPED, Objective(kl=0.3)], ids=["clipped", "with KL"])
def test_the_loss_is_that_of_each_rollout_computed_alone(
    model: Any, members: list[Rollout], objective: Objective
) -> None:
    """Value and gradient, with masked tokens, padding and a filler row."""
    batch = packed(members, ROWS, pad_to_multiple_of=8)
    packed_loss = rows_loss(model, trained_rows(batch), batch.meta.batch_loss_tokens, objective, Tally())
    found = torch.autograd.grad(packed_loss, list(model.parameters()))
    naive = naive_loss(model, members, objective)
    expected = torch.autograd.grad(naive, list(model.parameters()))
    assert packed_loss.item() == pytest.approx(naive.item(), abs=1e-6)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-3)


def test_losses_of_parts_of_a_batch_add_up_to_the_loss_of_the_whole(model: Any, members: list[Rollout]) -> None:
    """How many rows go through the model at once changes nothing."""
    batch = packed(members, ROWS)
    rows, tokens = trained_rows(batch), batch.meta.batch_loss_tokens
    with torch.no_grad():
        whole = rows_loss(model, rows, tokens, CLIPPED, Tally())
        parts = [rows_loss(model, [row], tokens, CLIPPED, Tally()) for row in rows]
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-6)


def test_rows_of_other_ranks_count_in_the_mean(model: Any, members: list[Rollout]) -> None:
    """The mean is over the loss tokens of all ranks: twice as many elsewhere halve the loss here."""
    batch = packed(members, ROWS)
    rows, tokens = trained_rows(batch), batch.meta.batch_loss_tokens
    with torch.no_grad():
        alone = rows_loss(model, rows, tokens, CLIPPED, Tally())
        shared = rows_loss(model, rows, 2 * tokens, CLIPPED, Tally())
    assert float(shared) == pytest.approx(float(alone) / 2)


def test_sampling_weights_multiply_the_loss(model: Any, members: list[Rollout]) -> None:
    """Weight 0.5 for the only group halves the loss."""
    with torch.no_grad():
        losses = [
            float(rows_loss(model, trained_rows(batch), batch.meta.batch_loss_tokens, CLIPPED, Tally()))
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
        loss = rows_loss(model, trained_rows(batch), batch.meta.batch_loss_tokens, Objective(), Tally())
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
        rows_loss(model, trained_rows(batch), batch.meta.batch_loss_tokens, CLIPPED, tally)
    assert tally.tokens == batch.meta.batch_loss_tokens == len(entropies)
    assert tally.mean("ratio") == pytest.approx(1.0, abs=1e-5)
    assert tally.mean("clipped") == 0.0
    assert tally.mean("entropy") == pytest.approx(sum(entropies) / len(entropies), abs=1e-5)


def test_a_kl_term_without_reference_logprobs_is_rejected(model: Any, members: list[Rollout]) -> None:
    """The message names the missing logprobs."""
    batch = packed(members, ROWS, with_ref=False)
    with pytest.raises(Invalid, match="ref_logprobs"):
        rows_loss(model, trained_rows(batch), batch.meta.batch_loss_tokens, Objective(kl=0.1), Tally())
