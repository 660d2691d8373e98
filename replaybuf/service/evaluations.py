"""Results of evaluations, kept for whoever looks; the buffer, its ledger and its strategy know nothing of them."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from replaybuf.config import NonNegative, Positive
from replaybuf.errors import Invalid
from replaybuf.service.run import Run

LONGEST_NAME = 200


class EvaluationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an evaluation came to.

    `name`: of the held-out set; `versions` sampled the completions, `version` the oldest of them; `reward_mean` over
    `rollouts` completions, `standard_error` of it, None for one prompt; `parts`: means of the parts of the reward;
    `failed`: prompts that gave none; `samples` per prompt at `temperature`; `seconds` it took.
    """

    name: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    adapter: str = ""
    version: NonNegative
    versions: list[NonNegative]
    reward_mean: float
    standard_error: float | None = None
    parts: dict[str, float] = {}
    rollouts: Positive
    failed: NonNegative = 0
    samples: NonNegative = 1
    temperature: float = 0.0
    max_tokens: NonNegative | None = None
    seconds: float | None = None
    producer: str = ""


class Evaluation(EvaluationRequest, frozen=True, kw_only=True):
    """A result as it is kept: when it came, in seconds since the epoch, and how often the run had been rewound."""

    at_s: float
    generation: int


async def record_evaluation(run: Run, asked: EvaluationRequest) -> Evaluation:
    """Keep a result. Raises `Invalid` for an adapter there is none of and a number that is not finite."""
    _check(run, asked)
    kept = Evaluation(
        **msgspec.structs.asdict(asked), at_s=run.journal.clock(), generation=run.journal.state.generation
    )
    await run.journal.store.add_evaluation(run.name, msgspec.json.encode(kept))
    return kept


async def list_evaluations(run: Run, limit: int) -> dict[str, list[Evaluation]]:
    """Return the newest results, oldest first; of one version, set and adapter the last that came."""
    found: dict[tuple[str, str, int], Evaluation] = {}
    for raw in await run.journal.store.newest_evaluations(run.name, limit):
        kept = msgspec.json.decode(raw, type=Evaluation)
        key = (kept.adapter, kept.name, kept.version)
        found.pop(key, None)
        found[key] = kept
    return {"evaluations": list(found.values())}


def _check(run: Run, asked: EvaluationRequest) -> None:
    adapters = sorted(run.journal.config.policies)
    if asked.adapter not in adapters:
        raise Invalid(
            f"adapter of the evaluation is {asked.adapter!r}; needed: {adapters}",
            name="adapter",
            value=asked.adapter,
            bound=adapters,
        )
    scores = {name: getattr(asked, name) for name in ("reward_mean", "standard_error", "temperature", "seconds")}
    for name, value in (scores | {f"parts.{part}": mean for part, mean in asked.parts.items()}).items():
        if value is not None and not math.isfinite(value):
            raise Invalid(f"{name} is {value}; a finite number is needed", name=name, value=str(value), bound="finite")
