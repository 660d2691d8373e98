"""Samples of slime from a batch."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from replaybuf.client import RolloutKey, rollout_keys
from replaybuf.client.unpack import check_unweighted
from replaybuf.errors import Invalid
from replaybuf.wire.batch import Batch, MicroBatch

if TYPE_CHECKING:
    from slime.utils.types import Sample


def samples_of(batch: Batch, reward_key: str | None = None) -> list[list[Sample]]:
    """Return the samples of each group, groups and rollouts in the order of the batch's record.

    The body must have the extra `lengths`. slime computes advantages from rewards, so those of the batch are not used.
    Raises `Invalid` for sampling weights, which slime has no place for.
    """
    check_unweighted(batch, "slime")
    samples: dict[RolloutKey, Sample] = {}
    for row in batch.micro_batches:
        for number, key in enumerate(rollout_keys(row)):
            samples[key] = _sample(batch, row, number, reward_key)
    groups: list[list[Sample]] = [[] for _ in batch.meta.group_ids]
    for index, (key, sample) in enumerate(sorted(samples.items(), key=itemgetter(0))):
        sample.group_index, sample.index = key.group_index, index
        groups[key.group_index].append(sample)
    return groups


def _sample(batch: Batch, row: MicroBatch, number: int, reward_key: str | None) -> Sample:
    from slime.utils.types import Sample  # imports torch; conversion alone needs it

    start, end = int(row.cu_seqlens[number]), int(row.cu_seqlens[number + 1])
    if row.prompt_lengths is None:
        raise Invalid("the body has no prompt_lengths; attach with lengths=True", name="lengths", value=False)
    prompt, mask = int(row.prompt_lengths[number]), row.loss_mask[start:end]
    # slime has a loss mask of the response alone, so the response begins at the first prompt token in the loss.
    first = start + (min(prompt, int(mask.argmax())) if mask.any() else prompt)
    reward = float(row.rewards[number])
    metadata: dict[str, Any] = {
        "group_id": batch.meta.group_ids[row.group_index[number]],
        "policy_version": int(row.policy_versions[number]),
        "staleness": int(row.staleness[number]),
        "times_sampled": int(row.times_sampled[number]),
    }
    teacher = row.teacher_logprobs
    return Sample(
        tokens=row.input_ids[start:end].tolist(),
        response_length=end - first,
        reward=reward if reward_key is None else {reward_key: reward},
        loss_mask=row.loss_mask[first:end].astype(int).tolist(),
        rollout_log_probs=row.inference_logprobs[first:end].tolist(),
        teacher_log_probs=None if teacher is None else teacher[first:end].tolist(),
        weight_versions=[str(metadata["policy_version"])],
        status=Sample.Status.COMPLETED,
        metadata=metadata,
    )
