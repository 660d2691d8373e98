"""Results of evaluations: a stream of the newest results, separate from the run's history."""

from __future__ import annotations

from replaybuf.store import keys
from replaybuf.store.connection import Connection

KEPT = 10_000
"""Results kept per run; the oldest are removed first."""
_FIELD = "result"


class EvaluationStore:
    """Appends and reads results of evaluations. They have no fence, because no decision depends on them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def append(self, run: str, raw: bytes) -> None:
        """Append a result, durably."""
        pipe = self._connection.pipeline()
        pipe.xadd(keys.evaluations(run), {_FIELD: raw}, maxlen=KEPT, approximate=False)
        await self._connection.run_durably(pipe)

    async def read_newest(self, run: str, limit: int) -> list[bytes]:
        """Read the newest `limit` results, oldest first."""
        client = self._connection.client
        entries = await self._connection.run(client.xrevrange(keys.evaluations(run), count=limit))
        return [fields[_FIELD.encode()] for _, fields in reversed(entries)]
