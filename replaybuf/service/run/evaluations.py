"""Results of evaluations, kept for whoever looks; the buffer, its ledger and its strategy know nothing of them."""

from __future__ import annotations

import math

import msgspec

from replaybuf.errors import Invalid
from replaybuf.service.run.run import Run
from replaybuf.wire.evaluations import Evaluation, EvaluationRequest, Evaluations


async def record_evaluation(run: Run, asked: EvaluationRequest) -> Evaluation:
    """Keep a result. Raises `Invalid` for an adapter there is none of and a number that is not finite."""
    _check(run, asked)
    kept = Evaluation(
        **msgspec.structs.asdict(asked), at_s=run.journal.clock(), generation=run.journal.state.generation
    )
    await run.journal.store.evaluations.append(run.name, msgspec.json.encode(kept))
    return kept


async def list_evaluations(run: Run, limit: int) -> Evaluations:
    """Return the newest results, oldest first; of one version, set and adapter the last that came."""
    found: dict[tuple[str, str, int], Evaluation] = {}
    for raw in await run.journal.store.evaluations.read_newest(run.name, limit):
        kept = msgspec.json.decode(raw, type=Evaluation)
        key = (kept.adapter, kept.name, kept.version)
        found.pop(key, None)
        found[key] = kept
    return Evaluations(evaluations=list(found.values()))


def _check(run: Run, asked: EvaluationRequest) -> None:
    adapters = sorted(run.journal.config.adapter_names)
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
