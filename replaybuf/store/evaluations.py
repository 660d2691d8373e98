"""Results of evaluations: a stream of the newest ones, beside the run's history and no part of it."""

from __future__ import annotations

from replaybuf.store import keys
from replaybuf.store.connection import Connection

KEPT = 10_000
"""Results of a run that stay; the oldest go first."""
_FIELD = "result"


class EvaluationCommands(Connection):
    """What is done with results of evaluations. No fence: they decide nothing."""

    async def add_evaluation(self, run: str, raw: bytes) -> None:
        """Append a result, durably."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.xadd(keys.evaluations(run), {_FIELD: raw}, maxlen=KEPT, approximate=False)
        await self._durably(pipe)

    async def newest_evaluations(self, run: str, limit: int) -> list[bytes]:
        """Read the newest `limit` results, the oldest of them first."""
        entries = await self._guard(self._redis.xrevrange(keys.evaluations(run), count=limit))
        return [fields[_FIELD.encode()] for _, fields in reversed(entries)]
