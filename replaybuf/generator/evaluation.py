"""Evaluation: completions of held-out prompts, scored and counted; nothing of it ever reaches the buffer."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from replaybuf.errors import EngineFault, EngineUnfit, Invalid, RewardFault
from replaybuf.generator.engines import Engine, Sample, Sampling
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.scoring import Scores, Scoring
from replaybuf.generator.fleet.publication import SUPERSEDED
from replaybuf.generator.prompts import Encoder, Prompt

T = TypeVar("T")

TRIES = 3
"""Completions that new weights made too old for a batch are too old for nothing here, but the fleet gives them up."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Mean reward over the completions scored.

    `accuracy` is that mean, `standard_error` of it by the means of the prompts, None for one prompt; `parts` means of
    the parts of the reward; `n` the number of completions in it, `failed` the prompts that gave none, `versions` the
    policy versions that sampled them: more than one where weights changed meanwhile.
    """

    accuracy: float
    standard_error: float | None = None
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    n: int
    failed: int
    versions: tuple[int, ...]


async def evaluate(
    engine: Engine,
    scorer: Scoring | Episodes,
    prompts: Iterable[Prompt],
    tokenizer: Encoder,
    *,
    temperature: float,
    max_tokens: int,
    samples: int = 1,
    max_inflight_prompts: int = 32,
    stop_token_ids: tuple[int, ...] = (),
) -> EvaluationResult:
    """Sample `samples` completions of every prompt at `temperature` (0 = greedy) and score them, or play its episodes.

    Raises `Invalid` where there is no prompt, the last fault where no prompt could be scored, `EngineUnfit`.
    """
    sampling = Sampling(n=samples, max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop_token_ids)
    room = asyncio.Semaphore(max_inflight_prompts)

    async def made(prompt: Prompt) -> tuple[Sample, Scores]:
        if isinstance(scorer, Episodes):
            return await scorer.play(engine, prompt, sampling)
        sample = await engine.generate(prompt.token_ids, sampling)
        return sample, await scorer.score(prompt, tokenizer.decode(sample.completions))

    async def one(prompt: Prompt) -> tuple[Sample, Scores] | EngineFault | RewardFault:
        try:
            async with room:
                return await _patiently(lambda: made(prompt))
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
    return _counted(scored, failed=len(faults))


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeldOut:
    """A held-out set and how it is asked: `samples` completions per prompt at `temperature`, by `scorer`."""

    name: str
    prompts: Sequence[Prompt]
    scorer: Scoring | Episodes
    tokenizer: Encoder
    max_tokens: int
    temperature: float = 0.0
    samples: int = 1
    max_inflight_prompts: int = 32
    stop_token_ids: tuple[int, ...] = ()

    async def evaluate(self, engine: Engine) -> dict[str, Any]:
        """Evaluate, and return the result as the service keeps it. Raises as `evaluate` does."""
        began_s = time.monotonic()
        result = await evaluate(
            engine,
            self.scorer,
            self.prompts,
            self.tokenizer,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            samples=self.samples,
            max_inflight_prompts=self.max_inflight_prompts,
            stop_token_ids=self.stop_token_ids,
        )
        return {
            "name": self.name,
            "version": result.versions[0],
            "versions": list(result.versions),
            "reward_mean": result.accuracy,
            "standard_error": result.standard_error,
            "parts": result.parts,
            "rollouts": result.n,
            "failed": result.failed,
            "samples": self.samples,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seconds": time.monotonic() - began_s,
        }


async def _patiently(make: Callable[[], Awaitable[T]]) -> T:
    for _ in range(TRIES - 1):
        try:
            return await make()
        except EngineFault as fault:
            if fault.reason != SUPERSEDED:
                raise
    return await make()


def _counted(scored: Sequence[tuple[Sample, Scores]], *, failed: int) -> EvaluationResult:
    rewards = np.concatenate([scores.rewards for _, scores in scored])
    by_prompt = np.array([scores.rewards.mean() for _, scores in scored])
    names = set.intersection(*(set(scores.parts) for _, scores in scored))
    return EvaluationResult(
        accuracy=float(rewards.mean()),
        standard_error=float(by_prompt.std(ddof=1) / len(by_prompt) ** 0.5) if len(by_prompt) > 1 else None,
        parts={name: float(np.mean([scores.parts[name] for _, scores in scored])) for name in sorted(names)},
        n=len(rewards),
        failed=failed,
        versions=tuple(sorted({int(version) for sample, _ in scored for version in sample.version_spans[:, 1]})),
    )
