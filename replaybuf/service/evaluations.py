"""Results of evaluations, kept for whoever looks; the buffer, its ledger and its strategy know nothing of them."""

from __future__ import annotations

import msgspec

from replaybuf.errors import Invalid
from replaybuf.service.run import Run

LONGEST_NAME = 200


class EvaluationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an evaluation came to.

    `name`: of the held-out set; `versions` sampled the completions, `version` the oldest of them; `reward_mean` over
    `rollouts` completions, `standard_error` of it, None for one prompt; `parts`: means of the parts of the reward;
    `failed`: prompts that gave none; `samples` per prompt at `temperature`; `seconds` it took.
    """

    name: str
    adapter: str = ""
    version: int
    versions: list[int]
    reward_mean: float
    standard_error: float | None = None
    parts: dict[str, float] = {}
    rollouts: int
    failed: int = 0
    samples: int = 1
    temperature: float = 0.0
    max_tokens: int | None = None
    seconds: float | None = None
    producer: str = ""


class Evaluation(EvaluationRequest, frozen=True, kw_only=True):
    """A result as it is kept: when it came, in seconds since the epoch, and how often the run had been rewound."""

    at_s: float
    generation: int


async def record_evaluation(run: Run, asked: EvaluationRequest) -> Evaluation:
    """Keep a result. Raises `Invalid` where a number cannot be one of an evaluation."""
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
    refused: list[tuple[bool, str, object, object]] = [
        (not 0 < len(asked.name) <= LONGEST_NAME, "name", asked.name, f"1 to {LONGEST_NAME} characters"),
        (asked.adapter not in adapters, "adapter", asked.adapter, adapters),
        (asked.version < 0, "version", asked.version, 0),
        (asked.rollouts < 1, "rollouts", asked.rollouts, 1),
    ]
    for wrong, name, value, bound in refused:
        if wrong:
            raise Invalid(
                f"{name} of the evaluation is {value!r}; needed: {bound}", name=name, value=value, bound=bound
            )
