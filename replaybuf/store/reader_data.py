"""What a run keeps for readers, beside its history: samples of trained steps, cursors, results of evaluations.

One hash per run each, which the leader writes under its fencing token, and one stream for the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replaybuf.store import keys
from replaybuf.store.redis.connection import Connection

KEPT_BYTES = 16 << 20
"""Samples of one run; the oldest steps go first."""
KEPT_RESULTS = 10_000
"""Results kept per run; the oldest are removed first."""
_FIELD = b"result"


class SampleStore:
    """Reads and writes the samples of a run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def write(self, run: str, token: str, steps: Iterable[tuple[int, int, bytes]]) -> None:
        """Replace the samples of steps, in this order: step, ledger entry of its batch, samples. Raises `NotLeader`."""
        pipe = self._connection.pipeline()
        for step, entry, raw in steps:
            arguments = [step, entry, raw, KEPT_BYTES]
            pipe.execute_command(*self._connection.words_of(run, "rb_sample", [keys.samples(run)], arguments, token))
        for reply in await self._connection.run(pipe.execute()):
            self._connection.check_reply(run, token, reply)

    async def newest_batch(self, run: str) -> int:
        """Read the ledger entry of the newest batch with samples; 0 = none. Raises `Unreadable`."""
        pipe = self._connection.pipeline()
        pipe.hget(keys.counts(run), "sampled")
        pipe.hlen(keys.samples(run))  # a key of another type makes the run unreadable now, not its ticks later
        entry, _ = await self._connection.read(run, pipe)
        return int(entry or 0)

    async def list_steps(self, run: str) -> list[int]:
        """List the steps that have samples, newest first."""
        names = await self._connection.read_one(run, "HKEYS", keys.samples(run))
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)

    async def read(self, run: str, steps: Sequence[int]) -> list[bytes | None]:
        """Read the samples of these steps; None = the step has none."""
        return list(await self._connection.read_one(run, "HMGET", keys.samples(run), *map(str, steps)))


class CursorStore:
    """Reads and changes the cursors of a run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(self, run: str) -> list[bytes]:
        """Read all cursors of a run. Raises `DataLost` if Redis is older than known."""
        return list(await self._connection.read_one(run, "HVALS", keys.cursors(run)))

    async def write(self, run: str, token: str, name: str, raw: bytes) -> None:
        """Set a cursor, durably; empty bytes forget it. Raises `NotLeader`."""
        await self._connection.call(run, "rb_cursor", [keys.cursors(run)], [name, raw], token, durably=True)


class EvaluationStore:
    """Appends and reads results of evaluations. They have no fence, because no decision depends on them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def append(self, run: str, raw: bytes) -> None:
        """Append a result, durably."""
        names = [keys.deleted(run), keys.evaluations(run)]
        await self._connection.call(run, "rb_evaluate", names, [KEPT_RESULTS, raw], durably=True)

    async def read_newest(self, run: str, limit: int) -> list[bytes]:
        """Read the newest `limit` results, oldest first."""
        entries = await self._connection.run(self._connection.client.xrevrange(keys.evaluations(run), count=limit))
        return [fields[_FIELD] for _, fields in reversed(entries) if _FIELD in fields]
