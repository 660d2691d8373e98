"""Makes the scored group of one ticket: prompt, completions, rewards."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from replaybuf.generator.engines import Sample, Sampling, request_seed
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.length_penalty import LengthPenalty
from replaybuf.generator.environments.process_rewards import by_text
from replaybuf.generator.environments.scoring import Scores, Scoring
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.group_requests import GroupRequests
from replaybuf.generator.groups import new_group
from replaybuf.generator.inflight import Job
from replaybuf.generator.losses import Losses
from replaybuf.generator.progress import Durations
from replaybuf.generator.prompts import Encoder, Prompt, PromptOrder
from replaybuf.tracing import spans
from replaybuf.wire.group import Group


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
            seed = request_seed(request_seed_base, ticket.prompt_index, ticket.attempt)
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
