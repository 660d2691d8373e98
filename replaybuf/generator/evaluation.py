"""Evaluation: completions of held-out prompts, scored and counted; nothing of it ever reaches the buffer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable

from replaybuf.errors import EngineFault, EngineUnfit, Invalid, RewardFault
from replaybuf.generator.engines import Engine, Sample, Sampling
from replaybuf.generator.prompts import Encoder, Prompt
from replaybuf.generator.scoring import Scores, Scoring


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Mean reward over the completions scored.

    `accuracy` is that mean, `n` the number of completions in it, `failed` the prompts that gave none, `versions` the
    policy versions that sampled them: more than one where weights changed meanwhile.
    """

    accuracy: float
    n: int
    failed: int
    versions: tuple[int, ...]


async def evaluate(
    engine: Engine,
    scorer: Scoring,
    prompts: Iterable[Prompt],
    tokenizer: Encoder,
    *,
    temperature: float,
    max_tokens: int,
    samples: int = 1,
    max_inflight_prompts: int = 32,
) -> EvaluationResult:
    """Sample `samples` completions of every prompt at `temperature` (0 = greedy) and score them.

    Raises `Invalid` where there is no prompt, the last fault where no prompt could be scored, `EngineUnfit`.
    """
    sampling = Sampling(n=samples, max_tokens=max_tokens, temperature=temperature)
    room = asyncio.Semaphore(max_inflight_prompts)

    async def one(prompt: Prompt) -> tuple[Sample, Scores] | EngineFault | RewardFault:
        try:
            async with room:
                sample = await engine.generate(prompt.token_ids, sampling)
                return sample, await scorer.score(prompt, tokenizer.decode(sample.completions))
        except (EngineFault, RewardFault) as fault:
            return fault

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(prompt)) for prompt in prompts]
    outcomes = [task.result() for task in running]
    scored = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    faults = [outcome for outcome in outcomes if not isinstance(outcome, tuple)]
    if not outcomes:
        raise Invalid("prompts is empty; an evaluation needs at least one", name="prompts", value=0, bound=1)
    unfit = next((fault for fault in faults if isinstance(fault, EngineUnfit)), None)
    if unfit is not None or not scored:
        raise unfit or faults[-1]
    rewards = [float(reward) for _, scores in scored for reward in scores.rewards]
    return EvaluationResult(
        accuracy=sum(rewards) / len(rewards),
        n=len(rewards),
        failed=len(faults),
        versions=tuple(sorted({int(version) for sample, _ in scored for version in sample.version_spans[:, 1]})),
    )
