"""Names of runs, and the lease on each run with its fencing token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

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
        arguments = [holder, int(ttl_s * 1000), "1" if force else "0"]
        for run in runs:
            self._connection.add_call(pipe, run, "rb_lead", [keys.lead(run)], arguments)
        return [_read_lease(reply, holder, ttl_s) for reply in await self._connection.run(pipe.execute())]

    async def release_lease(self, run: str, holder: str) -> None:
        """Release the lease if `holder` has it."""
        pipe = self._connection.pipeline()
        pipe.fcall("rb_resign", 1, keys.lead(run), holder)
        await self._connection.run(pipe.execute())


def _read_lease(reply: Sequence[Any], holder: str, ttl_s: float) -> Lease:
    outcome, detail = reply[0], reply[1]
    if text(outcome) == "older":  # nobody leads on a Redis that lost data; the check of the ends reports it
        return Lease(None, "", ttl_s)
    if detail[0] == 1:
        return Lease(text(detail[1]), holder, ttl_s)
    return Lease(None, text(detail[1]), int(detail[2]) / 1000)
