"""Makes the scored group of one ticket: prompt, requests for its rollouts, rewards, advantages."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from replaybuf.errors import Invalid, RewardFault
from replaybuf.generator.engines import Sample, Sampling, request_seed
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.length_penalty import LengthPenalty
from replaybuf.generator.environments.process_rewards import by_text
from replaybuf.generator.environments.scoring import Scores, Scoring
from replaybuf.generator.failures import Losses
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.fleet.publication import joined, pieces
from replaybuf.generator.inflight import Job
from replaybuf.generator.progress import Durations
from replaybuf.generator.prompts import Encoder, Prompt, PromptOrder
from replaybuf.kernel.strategy.advantages import PROCESS, group_advantages, process_advantages, zero_variance
from replaybuf.tracing import spans
from replaybuf.wire.contract import Ticket
from replaybuf.wire.group import Group, Int32s
from replaybuf.wire.text.pieces import group_of_completions

LONGEST_ANSWER = 256
"""Letters of the right answer that are stored with a group."""


class GroupMaker:
    """Samples and scores groups. `scoring`: number of groups in a reward; `reward_s`: time to score a group.

    `per_request`: rollouts per request, None = the whole group; `least`: fewest rollouts of a group, None = all;
    `length_penalty`: added to the rewards, None = no penalty.
    """

    def __init__(
        self,
        engine: Fleet,
        scorer: Scoring | Episodes,
        prompts: PromptOrder,
        tokenizer: Encoder,
        reward_s: Durations,
        *,
        per_request: int | None = None,
        least: int | None = None,
        length_penalty: LengthPenalty | None = None,
    ) -> None:
        self.scoring = 0
        self._engine = engine
        self._scorer = scorer
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._reward_s = reward_s
        self._per_request = per_request
        self._least = least
        self._length_penalty = length_penalty

    async def make(
        self,
        job: Job,
        sampling: Sampling,
        *,
        request_seed_base: int | None,
        advantage: str,
        metadata: dict[str, Any],
        adapter: str,
    ) -> Group:
        """Make the group of a job's ticket. Raises `EngineFault`, `PromptFault`, `RewardFault`."""
        ticket = job.ticket
        prompt = self._prompts.at(ticket.prompt_index)
        if request_seed_base is not None:
            seed = request_seed(request_seed_base, ticket.prompt_index, ticket.attempt, ticket.reissue)
            sampling = dataclasses.replace(sampling, seed=seed)
        losses = Losses(0 if self._least is None else sampling.n - self._least)
        requests = GroupRequests(self._engine, self._per_request, losses)
        if isinstance(self._scorer, Episodes):
            sample, scores = await self._scorer.play(requests, prompt, sampling, self._engine.check_rest, losses)
        else:
            sample = await requests.generate(prompt.token_ids, sampling)
            job.sampled = True
            scores = await self._score(self._scorer, prompt, sample)
        if self._length_penalty is not None:
            scores = self._length_penalty.add(prompt, scores, sample.completion_lengths)
        return new_group(
            ticket,
            prompt,
            sample,
            scores,
            temperature=sampling.temperature,
            advantage=advantage,
            metadata=metadata | losses.metadata,
            adapter=adapter,
        )

    async def _score(self, scorer: Scoring, prompt: Prompt, sample: Sample) -> Scores:
        clock = asyncio.get_running_loop().time
        self.scoring += 1
        began_s = clock()
        try:
            with spans.part("score"):
                scores = await scorer.score(prompt, self._tokenizer.decode(sample.completions))
        finally:
            self.scoring -= 1
            self._reward_s.add(clock() - began_s)
        return by_text(prompt, scores, sample.completions, self._tokenizer) if scores.process_rewards else scores


class GroupRequests:
    """Samples one group from a fleet, `per_request` rollouts per request (None = all in one).

    Several requests spread a group over the engines, and each fails for itself: `losses` counts its rollouts.
    """

    def __init__(self, fleet: Fleet, per_request: int | None, losses: Losses) -> None:
        self._fleet = fleet
        self._per_request = per_request
        self._losses = losses

    async def generate(self, prompt_ids: Int32s, sampling: Sampling) -> Sample:
        """Sample completions, `sampling.n` less the lost ones. Raises as `Fleet.generate`."""
        parts = split(sampling, self._per_request)
        if len(parts) == 1:
            return await self._fleet.generate(prompt_ids, sampling, self._losses)
        works = [functools.partial(self._fleet.generate, prompt_ids, part, self._losses) for part in parts]
        samples = await self._losses.gather_rest(works, [part.n for part in parts])
        self._fleet.check_use(min(sample.policy_version for sample in samples))
        rollouts = [piece for sample in samples for piece in pieces(sample)]
        metadata = samples[0].metadata | {"sampling": sampling.record(), "requests": len(parts)}
        return dataclasses.replace(joined(rollouts, metadata), exact=all(sample.exact for sample in samples))


def split(sampling: Sampling, per_request: int | None) -> Sequence[Sampling]:
    """Split n completions into requests of at most `per_request`, each with a seed of its own if there is one.

    An engine gives completion i of a request the seed + i, so the seeds are those of one request for all.
    """
    size = per_request or sampling.n
    return [
        dataclasses.replace(
            sampling,
            n=min(size, sampling.n - start),
            seed=None if sampling.seed is None else sampling.seed + start,
        )
        for start in range(0, sampling.n, size)
    ]


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
        metadata=metadata
        | _source_of(prompt)
        | _answer_of(prompt)
        | prompt.recorded
        | sample.metadata
        | _flags(scores),
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


def _answer_of(prompt: Prompt) -> dict[str, Any]:
    """Record the right answer for people who read the rollouts."""
    return {} if prompt.answer is None else {"answer": prompt.answer[:LONGEST_ANSWER]}


def _flags(scores: Scores) -> dict[str, Any]:
    """Flag a group with equal rewards and equal process rewards; filters decide whether to drop it."""
    rewards = [scores.rewards, np.array([reward for stretches in scores.process_rewards for _, reward in stretches])]
    return {"zero_variance": True} if all(zero_variance(some) for some in rewards if len(some)) else {}
