"""Which runs there are, and who leads each: the lease and its fencing token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from replaybuf.store import keys
from replaybuf.store.connection import Connection, text


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """Who leads a run: `token` is our fencing token, or None where the `holder` leads for another `left_s` seconds."""

    token: str | None
    holder: str
    left_s: float


class LeaseCommands(Connection):
    """What is done with runs as such: listed, added, led, given back."""

    async def runs(self) -> list[str]:
        """List the names of all runs."""
        names = await self._guard(self._redis.smembers(keys.RUNS))
        return sorted(text(name) for name in names)

    async def add_run(self, run: str) -> None:
        """Add a name to the list of runs."""
        await self._guard(self._redis.sadd(keys.RUNS, run))

    async def check_writable(self) -> None:
        """Raise `ServiceUnavailable` while Redis cannot be reached or takes no writes."""
        await self._guard(self._redis.srem(keys.RUNS, ""))  # a write that changes nothing

    async def lead(self, run: str, holder: str, ttl_s: float, *, force: bool = False) -> Lease:
        """Take or renew the lease on a run; `force` takes it from whoever holds it, fencing him."""
        return (await self.lead_all([run], holder, ttl_s, force=force))[0]

    async def lead_all(self, runs: Sequence[str], holder: str, ttl_s: float, *, force: bool = False) -> list[Lease]:
        """Do what `lead` does for each of these runs, in one round trip."""
        pipe = self._redis.pipeline(transaction=False)
        for run in runs:
            pipe.fcall("rb_lead", 2, keys.lead(run), keys.fence(run), holder, int(ttl_s * 1000), "1" if force else "0")
        replies = await self._guard(pipe.execute())
        return [
            Lease(text(reply[1]), holder, ttl_s) if reply[0] == 1 else Lease(None, text(reply[1]), int(reply[2]) / 1000)
            for reply in replies
        ]

    async def resign(self, run: str, holder: str) -> None:
        """Give the lease back, if it is held."""
        await self._call("rb_resign", [keys.lead(run)], [holder])
