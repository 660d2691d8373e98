"""Accuracy on the held-out problems, asked of the running engine as any client would ask."""

from __future__ import annotations

from contextlib import aclosing

from replaybuf.generator.engines import VllmEngine
from replaybuf.generator.environments import Environment, Score, check_prompts, load_environment, score_of
from replaybuf.generator.environments.scoring import Scorer
from replaybuf.generator.evaluation import EvaluationResult, HeldOut
from replaybuf.generator.prompts import Prompt
from replaybuf.generator.prompts.sources import read_prompts
from replaybuf.lab.demo.folder import Folder
from replaybuf.wire.tokenizer import Tokenizer

ENGINE_TIMEOUT_S = 30.0
SCORE_TIMEOUT_S = 10.0
FULL_MARKS = 1.0


class FullMarks:
    """An environment that gives 1 for full marks of another one and 0 for less: its mean is an accuracy."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def check(self, prompt: Prompt) -> None:
        """Check as the other environment does."""
        self._environment.check(prompt)

    def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Score without partial credit."""
        return Score(float(score_of(self._environment.score(prompt, completion_text)).reward >= FULL_MARKS))


class Exam:
    """The held-out problems, scored by `environment`; a completion has at most `max_tokens` tokens.

    Building it reads the problems and imports the environment, which takes a second.
    Raises `Invalid` where the files are not right, `MissingExtra` where the environment is not installed.
    """

    def __init__(self, folder: Folder, environment: str, max_tokens: int) -> None:
        self._tokenizer = Tokenizer(folder.model)
        self._prompts = read_prompts(folder.held_out, self._tokenizer)
        judge = FullMarks(load_environment(environment))
        check_prompts(judge, self._prompts)
        self._scorer = Scorer(judge, timeout_s=SCORE_TIMEOUT_S)
        self._max_tokens = max_tokens

    @property
    def problems(self) -> int:
        """Number of problems."""
        return len(self._prompts)

    async def hold(self, engine_url: str, *, temperature: float, samples: int) -> EvaluationResult:
        """Ask the engine for `samples` completions of every problem. Raises as `HeldOut.evaluate`."""
        async with aclosing(VllmEngine(engine_url, timeout_s=ENGINE_TIMEOUT_S)) as engine:
            await engine.prepare()
            held_out = HeldOut(
                name="exam",
                prompts=self._prompts,
                scorer=self._scorer,
                tokenizer=self._tokenizer,
                max_tokens=self._max_tokens,
                temperature=temperature,
                samples=samples,
            )
            return await held_out.evaluate(engine)
