"""Names of runs, and the lease on each run with its fencing token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from replaybuf.store import keys
from replaybuf.store.connection import Connection, text


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """Who leads a run: `token` is our fencing token, or None if `holder` leads for another `left_s` seconds."""

    token: str | None
    holder: str
    left_s: float


class RunStore:
    """Lists and adds runs; takes and releases their leases."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def list_names(self) -> list[str]:
        """List the names of all runs."""
        names = await self._connection.run(self._connection.client.smembers(keys.RUNS))
        return sorted(text(name) for name in names)

    async def add(self, run: str) -> None:
        """Add a name to the list of runs."""
        await self._connection.run(self._connection.client.sadd(keys.RUNS, run))

    async def take_lease(self, run: str, holder: str, ttl_s: float, *, force: bool = False) -> Lease:
        """Take or renew the lease on a run; `force` takes it from any holder, who is then fenced."""
        return (await self.take_leases([run], holder, ttl_s, force=force))[0]

    async def take_leases(self, runs: Sequence[str], holder: str, ttl_s: float, *, force: bool = False) -> list[Lease]:
        """Take or renew the leases on these runs, in one round trip."""
        pipe = self._connection.pipeline()
        for run in runs:
            pipe.fcall("rb_lead", 2, keys.lead(run), keys.fence(run), holder, int(ttl_s * 1000), "1" if force else "0")
        replies = await self._connection.run(pipe.execute())
        return [
            Lease(text(reply[1]), holder, ttl_s) if reply[0] == 1 else Lease(None, text(reply[1]), int(reply[2]) / 1000)
            for reply in replies
        ]

    async def release_lease(self, run: str, holder: str) -> None:
        """Release the lease if `holder` has it."""
        await self._connection.call("rb_resign", [keys.lead(run)], [holder])
