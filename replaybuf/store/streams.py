"""The ends of the two streams of a run, index and ledger, and waiting for new entries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from replaybuf.store import keys
from replaybuf.store.connection import Connection


@dataclasses.dataclass(frozen=True, slots=True)
class Ends:
    """Where the streams of a run end: number of the newest ledger entry and of the newest group; 0 = none."""

    entry: int
    group: int


class StreamEnds:
    """Reads the ends of streams and waits until they move."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read_end(self, run: str) -> Ends:
        """Read where the streams of a run end."""
        return (await self.read_ends([run]))[0]

    async def read_ends(self, runs: Sequence[str]) -> list[Ends]:
        """Read where the streams of each of these runs end, in one round trip."""
        pipe = self._connection.pipeline()
        for run in runs:
            pipe.xrevrange(keys.ledger(run), count=1)
            pipe.hget(keys.counts(run), "stored")
        replies = await self._connection.run(pipe.execute())
        return [
            Ends(int(newest[0][0].partition(b"-")[0]) if newest else 0, int(stored or 0))
            for newest, stored in zip(replies[::2], replies[1::2], strict=True)
        ]

    async def read_confirmed_end(self, run: str) -> Ends | None:
        """Read up to where the streams of a run are durable; None = all readable entries are. Raises `NotDurable`.

        A reader that acts on entries it read, and not on an answer to its own write, must not read further.
        """
        if self._connection.reads_are_durable:
            return None
        ends = await self.read_end(run)
        # WAIT covers what the server wrote before the last write of this connection, so this makes one.
        await self._connection.call("rb_count", [keys.counts(run)], [1, "confirmed", 1], durably=True)
        return ends

    async def wait_for_entries(self, known: Mapping[str, Ends], timeout_s: float) -> list[str]:
        """Block until a stream of a run has entries after its known end; return those runs."""
        streams: dict[Any, Any] = {}
        for run, ends in known.items():
            streams |= {keys.index(run): f"{ends.group}-0", keys.ledger(run): f"{ends.entry}-0"}
        reply = await self._connection.read_blocking(streams, timeout_s)
        moved = set(reply or {})
        return [run for run in known if moved & {keys.index(run).encode(), keys.ledger(run).encode()}]
