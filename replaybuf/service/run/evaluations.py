"""Results of evaluations, kept for readers; they change nothing in the buffer."""

from __future__ import annotations

import math

import msgspec

from replaybuf.errors import Invalid
from replaybuf.kernel.decide.records import check_adapter
from replaybuf.service.run.served_run import Run
from replaybuf.wire.evaluations import Evaluation, EvaluationRequest, Evaluations
from replaybuf.wire.prepared_types import prepared


async def record_evaluation(run: Run, asked: EvaluationRequest) -> Evaluation:
    """Store a result. Raises `Invalid` for an unknown adapter and for a number that is not finite."""
    check_adapter(asked.adapter, run.journal.config)
    scores = {name: getattr(asked, name) for name in ("reward_mean", "standard_error", "temperature", "seconds")}
    for name, value in (scores | {f"parts.{part}": mean for part, mean in asked.parts.items()}).items():
        if value is not None and not math.isfinite(value):
            raise Invalid(f"{name} is {value}; it must be finite", name=name, value=str(value), bound="finite")
    kept = Evaluation(
        **msgspec.structs.asdict(asked), at_s=run.journal.clock.wall(), generation=run.journal.state.generation
    )
    await run.journal.store.evaluations.append(run.name, msgspec.json.encode(kept))
    return kept


async def list_evaluations(run: Run, limit: int) -> Evaluations:
    """Return the newest results, oldest first; the last one per adapter, set and version."""
    found: dict[tuple[str, str, int], Evaluation] = {}
    for raw in await run.journal.store.evaluations.read_newest(run.name, limit):
        kept = msgspec.json.decode(raw, type=prepared(Evaluation))
        key = (kept.adapter, kept.name, kept.version)
        found.pop(key, None)
        found[key] = kept
    return Evaluations(evaluations=list(found.values()))
