"""The ledger stream, where both streams of a run end, and waiting for them to go on."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from replaybuf.errors import Conflict, Unreadable
from replaybuf.store import keys
from replaybuf.store.connection import Connection, text
from replaybuf.store.trouble import data_lost, unavailable
from replaybuf.wire.ledger import AnyRecord, decode_record, encode_record


@dataclasses.dataclass(frozen=True, slots=True)
class Ends:
    """Where the streams of a run end: number of the newest ledger entry and of the newest group; 0 = none."""

    entry: int
    group: int


class LedgerCommands(Connection):
    """What is done with the ledger: appended to at an exact number, read in order, followed."""

    async def append_record(self, run: str, token: str, number: int, record: AnyRecord) -> None:
        """Append ledger entry `number`.

        Raises `NotLeader` where a newer leader exists, `DataLost` where the entries before it are gone, `Conflict`
        where another record has the number.
        """
        reply = await self._call_durably(
            "rb_append", [keys.ledger(run), keys.fence(run)], [token, number, encode_record(record)]
        )
        self._check_fence(run, token, reply)
        outcome, detail = text(reply[0]), text(reply[1])
        if outcome == "gap":
            raise data_lost(run, f"the ledger ends at entry {detail}, and entry {number - 1} was acknowledged")
        if outcome != "ok":
            raise Conflict(
                f"run {run}: ledger entry {number} is {outcome}; the newest is {detail}",
                name="entry",
                value=number,
                bound=detail,
            )

    async def read_ledger(
        self, run: str, after: int, count: int | None = None
    ) -> AsyncIterator[list[tuple[int, AnyRecord]]]:
        """Read ledger entries behind `after`, in chunks; at most `count` in all. Raises `Unreadable`."""
        left = count
        while left is None or left > 0:
            chunk = 1000 if left is None else min(left, 1000)
            raw = await self._guard(self._redis.xrange(keys.ledger(run), min=f"({after}-0", max="+", count=chunk))
            if not raw:
                return
            records = [_read(*entry) for entry in raw]
            yield records
            after = records[-1][0]
            left = None if left is None else left - len(records)

    async def ends(self, run: str) -> Ends:
        """Say where the streams of a run end."""
        return (await self.ends_of([run]))[0]

    async def ends_of(self, runs: Sequence[str]) -> list[Ends]:
        """Do what `ends` does for each of these runs, in one round trip."""
        pipe = self._redis.pipeline(transaction=False)
        for run in runs:
            pipe.xrevrange(keys.ledger(run), count=1)
            pipe.hget(keys.counts(run), "stored")
        replies = await self._guard(pipe.execute())
        return [
            Ends(int(newest[0][0].partition(b"-")[0]) if newest else 0, int(stored or 0))
            for newest, stored in zip(replies[::2], replies[1::2], strict=True)
        ]

    async def confirmed_ends(self, run: str) -> Ends | None:
        """Say how far the streams of a run are durable; None where everything that can be read is. Raises `NotDurable`.

        Whoever acts on what it reads, not on what it was answered, reads no further.
        """
        if self._barrier is None or self._reads_durable:
            return None
        ends = await self.ends(run)
        # The wait covers what the server wrote before the last write of this connection: so here is one.
        await self._call_durably("rb_count", [keys.counts(run)], [1, "confirmed", 1])
        return ends

    async def wait_for_entries(self, known: Mapping[str, Ends], timeout_s: float) -> list[str]:
        """Block until a stream of a run has entries behind its known end; return those runs."""
        streams: dict[Any, Any] = {}
        for run, ends in known.items():
            streams |= {keys.index(run): f"{ends.group}-0", keys.ledger(run): f"{ends.entry}-0"}

        async def read() -> (
            Any
        ):  # xread alone is two coroutines, one in the other: unawaited, one of them would complain
            return await self._blocking.xread(streams, count=1, block=int(timeout_s * 1000))

        try:
            async with asyncio.timeout(timeout_s + self.command_timeout_s):
                reply = await self._guard(read())
        except TimeoutError:
            await self._blocking.connection_pool.disconnect()
            self._fall_silent()
            within_s = timeout_s + self.command_timeout_s
            raise unavailable(self.url, f"did not answer a blocking read within {within_s} s") from None
        news = set(reply or {})
        return [run for run in known if news & {keys.index(run).encode(), keys.ledger(run).encode()}]


def _read(entry_id: bytes, fields: Mapping[bytes, bytes]) -> tuple[int, AnyRecord]:
    number = int(entry_id.partition(b"-")[0])
    try:
        return number, decode_record(fields[b"r"])
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(f"ledger entry {number} does not decode: {error}", name="entry", value=number) from error
