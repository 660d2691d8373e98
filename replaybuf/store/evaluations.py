"""Results of evaluations: a stream of the newest results, separate from the run's history."""

from __future__ import annotations

from replaybuf.store import keys
from replaybuf.store.redis.connection import Connection

KEPT = 10_000
"""Results kept per run; the oldest are removed first."""
_FIELD = b"result"


class EvaluationStore:
    """Appends and reads results of evaluations. They have no fence, because no decision depends on them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def append(self, run: str, raw: bytes) -> None:
        """Append a result, durably."""
        await self._connection.call(run, "rb_evaluate", [keys.evaluations(run)], [KEPT, raw], durably=True)

    async def read_newest(self, run: str, limit: int) -> list[bytes]:
        """Read the newest `limit` results, oldest first."""
        pipe = self._connection.pipeline()
        pipe.xrevrange(keys.evaluations(run), count=limit)
        (entries,) = await self._connection.run(pipe.execute())
        return [fields[_FIELD] for _, fields in reversed(entries) if _FIELD in fields]
