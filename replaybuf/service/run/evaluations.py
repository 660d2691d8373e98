"""Results of evaluations, kept for readers; they change nothing in the buffer."""

from __future__ import annotations

import math

import msgspec

from replaybuf.errors import Invalid
from replaybuf.kernel.decide.records import check_adapter
from replaybuf.service.run.journal import Journal
from replaybuf.wire.answer.evaluations import Evaluation, EvaluationRequest, Evaluations
from replaybuf.wire.decoding import prepared

MOST_SETS = 64
"""Held-out sets with metrics: those with the newest results. It bounds the labels."""
READ_AT_TAKEOVER = 256
"""Newest results that a new leader reads for its metrics, at most 25 kB each."""


class RecordedEvaluations:
    """Records and lists results. `newest`: last result of each held-out set while this server leads, oldest first."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.newest: dict[tuple[str, str], Evaluation] = {}

    async def record(self, asked: EvaluationRequest) -> Evaluation:
        """Store a result.

        Raises `Invalid` for an unknown adapter, a version that the trainer has not reached, and a number that is not
        finite.
        """
        journal = self._journal
        check_adapter(asked.adapter, journal.config)
        newest = journal.state.version_at(journal.state.step, asked.adapter)
        if (version := max(asked.version, *asked.versions)) > newest:
            detail = (
                f"version is {version}; the trainer has reached {newest}: send the version whose weights sampled, "
                "and nothing if a rewind took it back"
            )
            raise Invalid(detail, name="version", value=version, bound=[0, newest])
        scores = {name: getattr(asked, name) for name in ("reward_mean", "standard_error", "temperature", "seconds")}
        for name, value in (scores | {f"parts.{part}": mean for part, mean in asked.parts.items()}).items():
            if value is not None and not math.isfinite(value):
                raise Invalid(f"{name} is {value}; it must be finite", name=name, value=str(value), bound="finite")
        kept = Evaluation(
            **msgspec.structs.asdict(asked), at_s=journal.clock.wall(), generation=journal.state.generation
        )
        await journal.store.evaluations.append(journal.name, msgspec.json.encode(kept))
        self._keep(kept)
        return kept

    async def list_newest(self, limit: int) -> Evaluations:
        """Return the newest results, oldest first; the last one per adapter, set and version."""
        last: dict[tuple[str, str, int], Evaluation] = {}
        for result in await self._read(limit):
            key = (result.adapter, result.name, result.version)
            last.pop(key, None)
            last[key] = result
        return Evaluations(evaluations=list(last.values()))

    async def take_over(self) -> None:
        """Read the newest results that an older leader stored."""
        for result in await self._read(READ_AT_TAKEOVER):
            self._keep(result)

    async def _read(self, limit: int) -> list[Evaluation]:
        journal = self._journal
        stored = await journal.store.evaluations.read_newest(journal.name, limit)
        return [msgspec.json.decode(raw, type=prepared(Evaluation)) for raw in stored]

    def _keep(self, result: Evaluation) -> None:
        key = (result.name, result.adapter)
        self.newest.pop(key, None)
        self.newest[key] = result
        if len(self.newest) > MOST_SETS:
            del self.newest[next(iter(self.newest))]
