"""Evaluation: score completions of held-out prompts; none of them reaches the buffer.

`Schedule` evaluates a held-out set while the generator runs, once in so many policy versions. Training groups go on
meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replaybuf.errors import EngineFault, EngineUnfit, Invalid, NotFound, RewardFault, counted
from replaybuf.generator.engines import Engine, Sample, Sampling
from replaybuf.generator.environments import check_prompts, load_rewards, multi_turn
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.scoring import Scorer, Scores, Scoring
from replaybuf.generator.fleet.publication import SUPERSEDED
from replaybuf.generator.inflight import InFlight
from replaybuf.generator.prompts import Encoder, Prompt
from replaybuf.generator.prompts.curriculum import Supply
from replaybuf.wire.answer.evaluations import EvaluationRequest
from replaybuf.wire.text.model_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TRIES = 3
"""Tries per prompt: the fleet gives up completions that are too old for a batch, which do not matter here."""
_RESULTS_READ = 1000
_NEVER = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Mean reward of the scored completions.

    `accuracy`: that mean; `standard_error`: of the mean, from the means of the prompts, None for one prompt; `parts`:
    means of the parts of the reward; `n`: completions scored; `failed`: prompts without a score; `versions`: policy
    versions that sampled, several where the weights changed meanwhile.
    """

    accuracy: float
    standard_error: float | None = None
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    n: int
    failed: int
    versions: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeldOut:
    """A held-out set and its sampling: `samples` completions per prompt at `temperature` (0 = greedy)."""

    name: str
    prompts: Sequence[Prompt]
    scorer: Scoring | Episodes
    tokenizer: Encoder
    max_tokens: int
    temperature: float = 0.0
    samples: int = 1
    max_inflight_prompts: int = 32
    stop_token_ids: tuple[int, ...] = ()

    async def evaluate(self, engine: Engine, done: Callable[[int, int], None] | None = None) -> EvaluationResult:
        """Sample and score the completions of every prompt, or play its episodes.

        `done` is called after each prompt with the number of finished prompts and of all.
        Raises `Invalid` where there is no prompt, `EngineUnfit`, and the last fault where no prompt could be scored.
        """
        if not self.prompts:
            raise Invalid("prompts is empty; an evaluation needs at least one", name="prompts", value=0, bound=1)
        slots = asyncio.Semaphore(self.max_inflight_prompts)

        async def outcome(prompt: Prompt) -> tuple[Sample, Scores] | EngineFault | RewardFault:
            try:
                async with slots:
                    return await self._score(engine, prompt)
            except (EngineFault, RewardFault) as fault:
                return fault
            finally:
                if done:
                    done(next(finished), len(self.prompts))

        finished = itertools.count(1)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(outcome(prompt)) for prompt in self.prompts]
        outcomes = [task.result() for task in running]
        scored = [result for result in outcomes if isinstance(result, tuple)]
        faults = [result for result in outcomes if not isinstance(result, tuple)]
        unfit = next((fault for fault in faults if isinstance(fault, EngineUnfit)), None)
        if unfit is not None or not scored:
            raise unfit or faults[-1]
        return _summary(scored, failed=len(faults))

    async def report(
        self, engine: Engine, *, adapter: str, producer: str, done: Callable[[int, int], None] | None = None
    ) -> EvaluationRequest:
        """Evaluate, and return the result in the form that the service records. Raises as `evaluate`."""
        began_s = time.monotonic()
        result = await self.evaluate(engine, done)
        return EvaluationRequest(
            name=self.name,
            adapter=adapter,
            version=result.versions[0],
            versions=list(result.versions),
            reward_mean=result.accuracy,
            standard_error=result.standard_error,
            parts=result.parts,
            rollouts=result.n,
            failed=result.failed,
            samples=self.samples,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seconds=time.monotonic() - began_s,
            producer=producer,
        )

    async def _score(self, engine: Engine, prompt: Prompt) -> tuple[Sample, Scores]:
        for _ in range(TRIES - 1):
            try:
                return await self._score_once(engine, prompt)
            except EngineFault as fault:
                if fault.reason != SUPERSEDED:
                    raise
        return await self._score_once(engine, prompt)

    async def _score_once(self, engine: Engine, prompt: Prompt) -> tuple[Sample, Scores]:
        sampling = Sampling(
            n=self.samples,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            stop_token_ids=self.stop_token_ids,
        )
        if isinstance(self.scorer, Episodes):
            return await self.scorer.play(engine, prompt, sampling)
        sample = await engine.generate(prompt.token_ids, sampling)
        return sample, await self.scorer.score(prompt, self.tokenizer.decode(sample.completions))


def open_held_out(
    prompts: str,
    environment: str,
    tokenizer: Tokenizer,
    *,
    max_turns: int,
    reward_timeout_s: float,
    name: str | None = None,
    **sampling: Any,
) -> HeldOut:
    """Load the prompts of an evaluation and its environment; `sampling`: the other fields of `HeldOut`.

    `name` None: the name of the prompts' file. Raises `Invalid` for an infinite supply of prompts, and where the
    environment cannot score a prompt.
    """
    supply = Supply(prompts, tokenizer)
    if not supply.finite:
        raise Invalid(f"prompts {prompts!r} never end; an evaluation needs a finite set", name="prompts", value=prompts)
    rewards = load_rewards(environment)
    check_prompts(rewards, supply.loaded)
    played = multi_turn(rewards)
    scorer = (
        Scorer(rewards, timeout_s=reward_timeout_s)
        if played is None
        else Episodes(played, tokenizer, max_turns=max_turns, timeout_s=reward_timeout_s)
    )
    return HeldOut(
        name=name or Path(prompts).stem,
        prompts=supply.loaded,
        scorer=scorer,
        tokenizer=tokenizer,
        stop_token_ids=tokenizer.stop_token_ids,
        **sampling,
    )


class Schedule:
    """Follower that evaluates at the first version it sees of 0..every-1, every..2*every-1, and so on.

    One evaluation runs at a time; it skips versions that pass meanwhile. It also skips a turn of which the service has
    a result, from before a restart or from another generator.
    """

    def __init__(self, held_out: HeldOut, every: int, *, adapter: str = "", producer: str = "") -> None:
        self.held_out = held_out
        self._every = every
        self._adapter = adapter
        self._producer = producer
        self._turn = _NEVER

    async def follow(self, inflight: InFlight, engine: Engine, published: Callable[[], int | None]) -> None:
        """Loop: evaluate when a turn begins. Ends at a stop; raises `EngineUnfit`, and as `InFlight.retry`."""
        while not inflight.stopping:
            await inflight.until(lambda: inflight.stopping or self._due(published()))
            version = published()
            if inflight.stopping or version is None:
                return
            self._turn = version // self._every
            if not await self._recorded(inflight):
                await self._evaluate(inflight, engine)

    def _due(self, version: int | None) -> bool:
        return version is not None and version // self._every != self._turn

    async def _recorded(self, inflight: InFlight) -> bool:
        """Return whether the service has a result of this turn."""
        try:
            recorded = await inflight.retry("evaluations", lambda: inflight.client.list_evaluations(_RESULTS_READ))
        except NotFound:  # an older service without this call
            return False
        return any(
            (result.name, result.adapter) == (self.held_out.name, self._adapter)
            and result.version // self._every == self._turn
            for result in recorded or ()
        )

    async def _evaluate(self, inflight: InFlight, engine: Engine) -> None:
        try:
            result = await self.held_out.report(engine, adapter=self._adapter, producer=self._producer)
        except EngineUnfit:
            raise
        except (EngineFault, RewardFault) as fault:
            inflight.progress.evaluations_failed += 1
            logger.error("evaluation %s failed: %s", self.held_out.name, fault)
            return
        inflight.progress.record_evaluation(result)
        logger.info("evaluation %s", describe(result))
        try:
            await inflight.retry("evaluation", lambda: inflight.client.record_evaluation(result))
        except (NotFound, Invalid) as error:  # an older service; a version that a rewind took back meanwhile
            logger.warning("the service does not record evaluation %s: %s", self.held_out.name, error)


def describe(result: EvaluationRequest) -> str:
    """Describe a result in one line."""
    error = "" if result.standard_error is None else f" ± {result.standard_error:.3f}"
    versions = ", ".join(str(version) for version in result.versions)
    return (
        f"{result.set_name} at version {versions}: reward {result.reward_mean:.3f}{error} over {result.rollouts} "
        f"completions, {counted(result.failed, 'prompt')} failed, {result.seconds or 0.0:.1f} s"
    )


def _summary(scored: Sequence[tuple[Sample, Scores]], *, failed: int) -> EvaluationResult:
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
