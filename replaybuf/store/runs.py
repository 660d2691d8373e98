"""Names of runs, the lease on each run with its fencing token, and marks of deleted runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from replaybuf.errors import Gone
from replaybuf.store import keys
from replaybuf.store.connection import Connection, text
from replaybuf.store.ends import NO_ENDS

NAME_TAKEN_S = 86400
"""How long the name of a deleted run is not free: clients that still use it must not reach another run."""


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

    # ------------------------------------------------------------------ deleted runs

    async def exists(self, run: str) -> bool:
        """Return whether a run is listed, or was known. Raises `Gone` if it was deleted less than a day ago."""
        pipe = self._connection.pipeline()
        pipe.sismember(keys.RUNS, run)
        pipe.ttl(keys.deleted(run))
        listed, left_s = await self._connection.run(pipe.execute())
        if left_s != -2:
            free = "is being deleted" if left_s < 0 else f"was deleted; its name is free in {left_s / 3600:.1f} hours"
            raise Gone(f"run {run} {free}; use another name", name="run", value=run)
        return bool(listed) or self._connection.known.of(run) != NO_ENDS

    async def is_deleted(self, run: str) -> bool:
        """Return whether a run was deleted less than a day ago."""
        return bool(await self._connection.run(self._connection.client.exists(keys.deleted(run))))

    async def mark_deleted(self, run: str, token: str) -> None:
        """Record durably that a run is to be deleted. Raises `NotLeader`."""
        # First the list of work, which may name a run without a mark: a run with a mark must not be forgotten.
        await self._connection.run(self._connection.client.sadd(keys.DELETING, run))
        await self._connection.call(run, "rb_delete", [keys.deleted(run)], token=token, durably=True)

    async def list_deleting(self) -> list[str]:
        """List the deleted runs that still have keys."""
        names = sorted(map(text, await self._connection.run(self._connection.client.smembers(keys.DELETING))))
        return [name for name in names if await self.is_deleted(name)]

    async def delete_keys(self, run: str, adapters: Iterable[str]) -> None:
        """Delete the keys of a deleted run except its payloads, and start the day after which its name is free."""
        pipe = self._connection.pipeline()
        pipe.unlink(*keys.all_of(run, adapters))
        pipe.set(keys.deleted(run), "deleted", ex=NAME_TAKEN_S)
        pipe.srem(keys.RUNS, run)
        pipe.srem(keys.DELETING, run)  # last: after a crash before it, all of this is done again
        await self._connection.run_durably(pipe)
        self._connection.known.forget(run)


def _read_lease(reply: Sequence[Any], holder: str, ttl_s: float) -> Lease:
    outcome, detail = reply[0], reply[1]
    if text(outcome) == "older":  # nobody leads on a Redis that lost data; the check of the ends reports it
        return Lease(None, "", ttl_s)
    if detail[0] == 1:
        return Lease(text(detail[1]), holder, ttl_s)
    return Lease(None, text(detail[1]), int(detail[2]) / 1000)
