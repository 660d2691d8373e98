"""Servers that live: each announces itself, and reads the others, by the clock of Redis."""

from __future__ import annotations

from typing import NamedTuple

from replaybuf.store import keys
from replaybuf.store.redis.connection import Connection, text


class AnnouncedServer(NamedTuple):
    """A server that has announced itself under the holder of its leases.

    `alive_s`: since its first announcement after a silence; `silent_s`: since its last one.
    """

    holder: str
    release: str
    alive_s: float
    silent_s: float


class ServerStore:
    """Announces servers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def announce(self, holder: str, release: str, most_silent_s: float) -> list[AnnouncedServer]:
        """Announce a server, and forget those that have been silent for longer; return all, this one first.

        One function call reads, compares and forgets, so a server that announces itself meanwhile is not forgotten.
        """
        pipe = self._connection.pipeline()
        pipe.fcall("rb_announce", 1, keys.SERVERS, holder, release, int(most_silent_s * 1000))
        (reply,) = await self._connection.run(pipe.execute())
        fields = [iter(reply)] * 4
        return [
            AnnouncedServer(text(name), text(of), int(alive) / 1000, int(silent) / 1000)
            for name, of, alive, silent in zip(*fields, strict=True)
        ]

    async def withdraw(self, holder: str) -> None:
        """Forget a server that ends."""
        await self._connection.run(self._connection.client.hdel(keys.SERVERS, holder))
