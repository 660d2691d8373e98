"""Rollouts from traces of verifiers 0.4."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaybuf.client.producers.group_building import GroupBuilder, Versions
from replaybuf.errors import GroupRejected, counted


def add_trace(group: GroupBuilder, trace: Any, policy_version: Versions | None = None) -> int:
    """Add each trainable branch of a `verifiers.v1.Trace` as a rollout; return how many.

    A branch begins with its prompt, up to the first sampled token. All branches of a trace have its reward; parts are
    the scores by name. Raises `GroupRejected` for a trace that is not scored, failed, or has no token ids: sample with
    a `TrainClientConfig`, which records them.
    """
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        fault = f"no score of {', '.join(missing) or 'any reward'}"
        raise GroupRejected("non_finite_rewards", f"trace {trace.id} has {fault}", name="trace.rewards", value=fault)
    parts = {name: float(reward.score) for name, reward in trace.rewards.items()}
    branches = [branch for branch in trace.branches if branch.trainable]
    for branch in branches:
        ids, mask = branch.token_ids, np.array(branch.sampled_mask, np.bool_)
        if not mask.any():
            detail = f"branch {branch.index} of trace {trace.id} has no sampled token ids; use a TrainClientConfig"
            raise GroupRejected("empty_completion", detail, name="trace.branches", value=branch.index)
        for node in branch.nodes:  # `logprobs` of a branch would be 0 there
            if len(node.logprobs) != sum(node.mask):
                name = f"branch {branch.index} of trace {trace.id}"
                sampled = counted(sum(node.mask), "sampled token")
                detail = f"{name} has {counted(len(node.logprobs), 'logprob')} for {sampled} of a message"
                raise GroupRejected("length_mismatch", detail, name="trace.nodes.logprobs", value=len(node.logprobs))
        start = int(np.argmax(mask))
        reason = branch.calls[-1].finish_reason if branch.calls else None
        group.add(
            ids[start:],
            branch.logprobs[start:],
            float(trace.reward),
            mask=mask[start:],
            prompt_ids=ids[:start],
            policy_version=policy_version,
            finish_reason=reason,
            rewards=parts,
        )
    return len(branches)
