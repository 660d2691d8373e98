"""Accuracy on the held-out problems, measured at the running engine, with some of the answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from replaybuf.errors import Invalid
from replaybuf.generator.engines import VllmEngine
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.scoring import Scores, Scoring
from replaybuf.generator.evaluation import open_held_out
from replaybuf.generator.prompts import Prompt
from replaybuf.lab.demo.folder import Folder
from replaybuf.launch.progress import Evaluation, Example
from replaybuf.wire.answer.evaluations import EvaluationRequest
from replaybuf.wire.text.model_tokenizer import Tokenizer

ENGINE_TIMEOUT_S = 30.0
SCORE_TIMEOUT_S = 10.0
SAMPLES = 4
"""Completions per held-out problem at temperature 1."""
EXAMPLES = 8
"""Problems whose completions are kept: the first ones of the file, which is in random order."""


class Recorder:
    """Scorer that keeps the completions and scores of every prompt, in `texts` and `scores` by prompt id."""

    def __init__(self, scorer: Scoring) -> None:
        self._scorer = scorer
        self.texts: dict[str, Sequence[str]] = {}
        self.scores: dict[str, Sequence[float]] = {}

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Scores:
        """Score as the other scorer does."""
        scores = await self._scorer.score(prompt, completions)
        self.texts[prompt.prompt_id] = list(completions)
        self.scores[prompt.prompt_id] = scores.rewards.tolist()
        return scores


class HeldOutProblems:
    """The held-out problems and their scorer. A completion has at most `max_tokens` tokens; its score is 0 or 1.

    The constructor reads the problems and imports the environment, which takes about 1 s. Raises as `open_held_out`,
    and `Invalid` for an environment of several turns.
    """

    def __init__(self, folder: Folder, environment: str, max_tokens: int) -> None:
        held_out = open_held_out(
            str(folder.held_out),
            environment,
            Tokenizer(folder.model),
            max_turns=1,
            reward_timeout_s=SCORE_TIMEOUT_S,
            max_tokens=max_tokens,
        )
        if isinstance(held_out.scorer, Episodes):
            detail = f"environment {environment!r} has several turns; the demo measures single completions"
            raise Invalid(detail, name="environment", value=environment)
        self._held_out = held_out
        self._scorer: Scoring = held_out.scorer

    async def evaluate(self, engine_url: str, step: int, *, greedy: bool) -> tuple[Evaluation, list[EvaluationRequest]]:
        """Sample every problem `SAMPLES` times at temperature 1, and if `greedy` once at temperature 0.

        Also returns the results in the form that the service records. Raises as `HeldOut.evaluate`.
        """
        sampled, samples = await self._sample(engine_url, "sampled", temperature=1.0, samples=SAMPLES)
        evaluation = Evaluation(
            step=step,
            problems=len(samples.scores),
            samples=SAMPLES,
            sampled=sampled.reward_mean,
            sampled_error=sampled.standard_error,
            sampled_by_problem=_means(samples),
        )
        if not greedy:
            return evaluation, [sampled]
        likeliest, answers = await self._sample(engine_url, "greedy", temperature=0.0, samples=1)
        with_greedy = msgspec.structs.replace(
            evaluation,
            greedy=likeliest.reward_mean,
            greedy_error=likeliest.standard_error,
            greedy_by_problem=_means(answers),
            examples=self._examples(samples, answers),
        )
        return with_greedy, [sampled, likeliest]

    async def _sample(
        self, engine_url: str, name: str, *, temperature: float, samples: int
    ) -> tuple[EvaluationRequest, Recorder]:
        recorder = Recorder(self._scorer)
        sampling: dict[str, Any] = {"temperature": temperature, "samples": samples}
        held_out = dataclasses.replace(self._held_out, name=f"held-out, {name}", scorer=recorder, **sampling)
        async with aclosing(VllmEngine(engine_url, timeout_s=ENGINE_TIMEOUT_S)) as engine:
            await engine.prepare()
            return await held_out.report(engine, adapter="", producer="demo"), recorder

    def _examples(self, samples: Recorder, answers: Recorder) -> list[Example]:
        """Return what was completed for the first problems that both samplings scored."""
        prompt_ids = samples.scores.keys() & answers.scores.keys()
        scored = [prompt for prompt in self._held_out.prompts if prompt.prompt_id in prompt_ids]
        return [
            Example(
                prompt=prompt.text,
                answer=prompt.answer,
                greedy=answers.texts[prompt.prompt_id][0],
                greedy_right=answers.scores[prompt.prompt_id][0] >= 1,
                sampled=list(samples.texts[prompt.prompt_id]),
                sampled_right=[score >= 1 for score in samples.scores[prompt.prompt_id]],
            )
            for prompt in scored[:EXAMPLES]
        ]


def _means(recorder: Recorder) -> dict[str, float]:
    """Return the mean score of each problem by its id."""
    return {name: sum(scores) / len(scores) for name, scores in recorder.scores.items()}
