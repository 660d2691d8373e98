"""Accuracy on the held-out problems, measured at the running engine."""

from __future__ import annotations

from contextlib import aclosing

from replaybuf.generator.engines import VllmEngine
from replaybuf.generator.environments import Environment, Score, check_prompts, load_environment, score_of
from replaybuf.generator.environments.scoring import Scorer
from replaybuf.generator.evaluation import HeldOut
from replaybuf.generator.prompts import Prompt
from replaybuf.generator.prompts.sources import read_prompts
from replaybuf.lab.demo.folder import Folder
from replaybuf.wire.tokenizer import Tokenizer

ENGINE_TIMEOUT_S = 30.0
SCORE_TIMEOUT_S = 10.0
FULL_MARKS = 1.0


class FullMarks:
    """Environment that scores 1 for full marks of another environment, else 0: the mean is an accuracy."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def check(self, prompt: Prompt) -> None:
        """Check as the other environment does."""
        self._environment.check(prompt)

    def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Score without partial credit."""
        return Score(float(score_of(self._environment.score(prompt, completion_text)).reward >= FULL_MARKS))


class HeldOutProblems:
    """The held-out problems and their scorer. A completion has at most `max_tokens` tokens.

    The constructor reads the problems and imports the environment, which takes about 1 s. Raises `Invalid` for broken
    files, `MissingExtra` if the environment is not installed.
    """

    def __init__(self, folder: Folder, environment: str, max_tokens: int) -> None:
        self._tokenizer = Tokenizer(folder.model)
        self._prompts = read_prompts(folder.held_out, self._tokenizer)
        full_marks = FullMarks(load_environment(environment))
        check_prompts(full_marks, self._prompts)
        self._scorer = Scorer(full_marks, timeout_s=SCORE_TIMEOUT_S)
        self._max_tokens = max_tokens

    def __len__(self) -> int:
        return len(self._prompts)

    async def accuracy(self, engine_url: str, *, temperature: float, samples: int) -> float:
        """Sample `samples` completions of every problem; return the share with full marks.

        Raises as `HeldOut.evaluate`.
        """
        async with aclosing(VllmEngine(engine_url, timeout_s=ENGINE_TIMEOUT_S)) as engine:
            await engine.prepare()
            held_out = HeldOut(
                name="held-out",
                prompts=self._prompts,
                scorer=self._scorer,
                tokenizer=self._tokenizer,
                max_tokens=self._max_tokens,
                temperature=temperature,
                samples=samples,
            )
            return (await held_out.evaluate(engine)).accuracy
