"""Servers that live: each announces itself, and reads the others, by the clock of Redis."""

from __future__ import annotations

import re
from typing import NamedTuple

from replaybuf.errors import Conflict
from replaybuf.store import keys
from replaybuf.store.redis.connection import Connection, text

_ANNOUNCED = re.compile(r"(\d+) (\d+) (\S*) ?(-?\d*)")
"""As `rb_announce` writes it: since, last seen, release, clock ahead, times in ms."""


class AnnouncedServer(NamedTuple):
    """A server that has announced itself under the holder of its leases.

    `alive_s`: since its first announcement after a silence; `silent_s`: since its last one. `ahead_s`: by how much its
    clock is ahead of that of Redis, 0 = unknown.
    """

    holder: str
    release: str
    alive_s: float
    silent_s: float
    ahead_s: float = 0.0


class ServerStore:
    """Announces servers, and keeps those of another deployment away."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def claim(self, deployment: str | None) -> None:
        """Give this Redis to a deployment, if it has none. Raises `Conflict` for the Redis of another deployment."""
        pipe = self._connection.pipeline()
        if deployment:
            pipe.execute_command("SET", keys.DEPLOYMENT, deployment, "NX")
        pipe.execute_command("GET", keys.DEPLOYMENT)
        owner = (await self._connection.run_durably(pipe))[-1]
        if owner is not None and text(owner) != deployment:
            ours = f"this server is of {deployment!r}" if deployment else "this server names none"
            detail = (
                f"{self._connection.url} belongs to the deployment {text(owner)!r}, and {ours}: start it with "
                f"--deployment {text(owner)}, or with another Redis; if that deployment is gone, delete the key "
                f"{keys.DEPLOYMENT}"
            )
            raise Conflict(detail, name="deployment", value=deployment, bound=text(owner))

    async def announce(self, holder: str, release: str, most_silent_s: float, wall_s: float) -> list[AnnouncedServer]:
        """Announce a server, and forget those that have been silent for longer; return all, this one first.

        `wall_s`: the time by its clock.

        One function call reads, compares and forgets, so a server that announces itself meanwhile is not forgotten.
        """
        words = (holder, release, int(most_silent_s * 1000), int(wall_s * 1000))
        call = self._connection.client.execute_command("FCALL", "rb_announce", 1, keys.SERVERS, *words)
        reply = await self._connection.run(call)
        fields = [iter(reply)] * 5
        return [
            AnnouncedServer(text(name), text(of), int(alive) / 1000, int(silent) / 1000, int(ahead or 0) / 1000)
            for name, of, alive, silent, ahead in zip(*fields, strict=True)
        ]

    async def read(self) -> list[AnnouncedServer]:
        """Read the servers that have announced themselves, without announcing one."""
        pipe = self._connection.pipeline()
        pipe.hgetall(keys.SERVERS)
        pipe.time()
        announced, (seconds, micros) = await self._connection.run(pipe.execute())
        now_ms = 1000 * int(seconds) + int(micros) / 1000
        servers = []
        for holder, value in announced.items():
            if match := _ANNOUNCED.fullmatch(text(value)):
                since, seen, release, ahead = match.groups()
                alive_s, silent_s = ((now_ms - int(moment)) / 1000 for moment in (since, seen))
                servers.append(AnnouncedServer(text(holder), release, alive_s, silent_s, int(ahead or 0) / 1000))
        return servers

    async def withdraw(self, holder: str) -> None:
        """Forget a server that ends."""
        await self._connection.run(self._connection.client.hdel(keys.SERVERS, holder))
