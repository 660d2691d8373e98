"""Results of evaluations: the request that records one, and the answers that list them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from replaybuf.wire.config import NonNegative, Positive
from replaybuf.wire.contract import Answer, Request
from replaybuf.wire.names import Name

MOST_VERSIONS = 256
MOST_PARTS = 64
"""Bound the size of a stored result to 25 kB."""

MOST_LISTED = 1000
"""Newest results that commands and reports show."""


class EvaluationRequest(Request, frozen=True, kw_only=True):
    """Record the result of an evaluation.

    - `name` of the held-out set; `versions` sampled the completions, `version` is the oldest of them
    - `reward_mean` over `rollouts` completions and its `standard_error`, None for a single prompt
    - `parts`: mean of each part of the reward; `failed`: prompts without a reward
    - `samples` per prompt at `temperature`; `seconds`: duration
    """

    name: Annotated[Name, Meta(min_length=1)]
    adapter: Name = ""
    version: NonNegative
    versions: Annotated[list[NonNegative], Meta(max_length=MOST_VERSIONS)]
    reward_mean: float
    standard_error: float | None = None
    parts: Annotated[dict[Name, float], Meta(max_length=MOST_PARTS)] = field(default_factory=dict)
    rollouts: Positive
    failed: NonNegative = 0
    samples: NonNegative = 1
    temperature: float = 0.0
    max_tokens: NonNegative | None = None
    seconds: float | None = None
    producer: Name = ""

    @property
    def set_name(self) -> str:
        """Return the name of the held-out set, with its adapter; `evaluationsBySet` of the console does the same."""
        return f"{self.name}, {self.adapter}" if self.adapter else self.name


class Evaluation(EvaluationRequest, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """A stored result: `at_s` in seconds since the epoch, `generation` = rewinds of the run before it."""

    at_s: float
    generation: int


class Evaluations(Answer, frozen=True, kw_only=True):
    """Results of evaluations, oldest first."""

    evaluations: list[Evaluation]
