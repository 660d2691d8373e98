"""Cursors of readers: one hash per run. The leader writes them under its fencing token."""

from __future__ import annotations

from replaybuf.store import keys
from replaybuf.store.redis.connection import Connection


class CursorStore:
    """Reads and changes the cursors of a run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(self, run: str) -> list[bytes]:
        """Read all cursors of a run. Raises `DataLost` if Redis is older than known."""
        pipe = self._connection.pipeline()
        pipe.hvals(keys.cursors(run))
        (fields,) = await self._connection.read(run, pipe)
        return list(fields)

    async def write(self, run: str, token: str, name: str, raw: bytes) -> None:
        """Set a cursor, durably; empty bytes forget it. Raises `NotLeader`."""
        await self._connection.call(run, "rb_cursor", [keys.cursors(run)], [name, raw], token, durably=True)
