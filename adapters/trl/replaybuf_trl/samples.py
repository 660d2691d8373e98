"""From a batch of the service to the samples of TRL, one per rollout."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from replaybuf.client import RolloutKey, per_rollout, rollout_keys
from replaybuf.errors import Invalid
from replaybuf.wire.batch import Batch, MicroBatch
from replaybuf.wire.group import Float32s


def samples_of(batch: Batch) -> list[RolloutSample]:
    """Return the rollouts of a batch, group by group, because TRL computes the tokens that neighbours share once.

    `model_version` is the policy version of the group. `group_id` is a number that no other step has. A sampling weight
    is part of the advantage: the clipped loss is linear in it. Raises `Invalid` for a rollout with several advantages.
    """
    keyed = [sample for row in batch.micro_batches for sample in _samples_of_row(batch, row)]
    keyed.sort(key=lambda item: item[0])
    samples = [sample for _, sample in keyed]
    _add_deviation(samples)
    return samples


def filler_of(sample: RolloutSample) -> RolloutSample:
    """Return a sample that TRL may fetch behind the last batch and never trains on: no token of it counts."""
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=sample.input_ids,
        completion_mask=np.zeros_like(sample.completion_mask),
        old_log_probs=np.zeros_like(sample.old_log_probs),
        advantage=0.0,
        model_version=sample.model_version,
        group_id=sample.group_id,
        metrics={},
    )


def _samples_of_row(batch: Batch, row: MicroBatch) -> list[tuple[RolloutKey, RolloutSample]]:
    keys = rollout_keys(row)
    columns = [
        per_rollout(row, values) for values in (row.input_ids, row.loss_mask, row.inference_logprobs, row.advantages)
    ]
    weights = [1.0] * len(keys) if row.sampling_weights is None else row.sampling_weights.tolist()
    samples = []
    for number, key in enumerate(keys):
        ids, mask, logprobs, advantages = (column[key] for column in columns)
        group_id = batch.meta.group_ids[key.group_index]
        sample = RolloutSample(
            prompt=[],
            completion=[],
            input_ids=ids.astype(np.int64),
            completion_mask=mask.astype(np.int64),
            old_log_probs=logprobs.astype(np.float32),
            advantage=_scalar_advantage(group_id, advantages[mask]) * weights[number],
            model_version=int(row.policy_versions[number]),
            group_id=batch.meta.step * batch.meta.batch_groups + key.group_index,
            metrics={"reward": float(row.rewards[number])},
        )
        samples.append((key, sample))
    return samples


def _scalar_advantage(group_id: str, advantages: Float32s) -> float:
    """Return the one advantage of a rollout's sampled tokens. Raises `Invalid` if they differ: TRL takes one number."""
    if not len(advantages):
        return 0.0
    first, lowest, highest = float(advantages[0]), float(advantages.min()), float(advantages.max())
    if lowest != highest:
        raise Invalid(
            f"group {group_id} has a rollout with advantages from {lowest:g} to {highest:g}; TRL takes one advantage "
            "per rollout. Let producers send one per rollout, and use no token-wise estimator",
            name="advantages",
            value=highest,
            bound=lowest,
        )
    return first


def _add_deviation(samples: list[RolloutSample]) -> None:
    """Add the standard deviation of the rewards of its group to each sample, as TRL's own worker does."""
    rewards = defaultdict(list)
    for sample in samples:
        rewards[sample.group_id].append(sample.metrics["reward"])
    for sample in samples:
        sample.metrics["reward_std"] = float(np.std(rewards[sample.group_id]))
