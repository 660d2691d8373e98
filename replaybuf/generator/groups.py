"""Build the group of a ticket from its completions and scores."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from replaybuf.errors import Invalid, RewardFault
from replaybuf.generator.engines import Sample
from replaybuf.generator.environments.scoring import Scores
from replaybuf.generator.prompts import Prompt
from replaybuf.kernel.strategy.advantages import PROCESS, group_advantages, process_advantages, zero_variance
from replaybuf.wire.contract import Ticket
from replaybuf.wire.group import Group
from replaybuf.wire.pieces import group_of_completions


def new_group(
    ticket: Ticket,
    prompt: Prompt,
    sample: Sample,
    scores: Scores,
    *,
    temperature: float,
    advantage: str,
    metadata: dict[str, Any],
    adapter: str = "",
) -> Group:
    """Build a group. Raises `RewardFault` if the rewards give no finite advantages."""
    rollouts = len(sample.completion_lengths)
    group = group_of_completions(
        [prompt.token_ids] * rollouts,
        sample,
        rewards=scores.rewards,
        temperatures=[temperature] * rollouts,
        group_id=None,  # the service names it after the prompt index, so that a second attempt is a duplicate
        ticket=ticket.ticket,
        prompt_index=ticket.prompt_index,
        prompt_id=prompt.prompt_id,
        adapter=adapter,
        reward_parts=scores.parts,
        metadata=metadata | _source_of(prompt) | prompt.recorded | sample.metadata | _flags(scores),
    )
    try:
        if advantage == PROCESS and scores.process_rewards:
            return _with_process_advantages(group, scores)
        return msgspec.structs.replace(group, advantages=group_advantages(advantage, group))
    except Invalid as error:
        raise RewardFault("reward_too_large", error.detail, name=error.name, value=error.value) from error


def _with_process_advantages(group: Group, scores: Scores) -> Group:
    """Add advantages per token; that of a rollout, which strategies use, is their mean over sampled tokens."""
    by_token = process_advantages(scores.process_rewards, group.completion_lengths)
    starts = np.cumsum(group.completion_lengths) - group.completion_lengths
    sums = np.add.reduceat(np.where(group.completion_mask, by_token, 0.0), starts)
    means = sums / np.maximum(group.sampled_lengths, 1.0)
    return msgspec.structs.replace(group, token_advantages=by_token, advantages=means)


def _source_of(prompt: Prompt) -> dict[str, Any]:
    """Record the source of a prompt, by which strategies mix; the default is the environment."""
    return {"source": prompt.metadata["source"]} if "source" in prompt.metadata else {}


def _flags(scores: Scores) -> dict[str, Any]:
    """Flag a group with equal rewards and equal process rewards; filters decide whether to drop it."""
    rewards = [scores.rewards, np.array([reward for stretches in scores.process_rewards for _, reward in stretches])]
    return {"zero_variance": True} if all(zero_variance(some) for some in rewards if len(some)) else {}
