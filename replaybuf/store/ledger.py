"""The ledger stream: appended to at an exact number, read in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from replaybuf.errors import Conflict, Unreadable
from replaybuf.store import keys
from replaybuf.store.connection import Connection, text
from replaybuf.store.faults import data_lost
from replaybuf.wire.ledger import PIECE, AnyRecord, BatchRecord, decode_record, encode_record

READ_CHUNK_ENTRIES = 1_000
FIRST_CHUNK_ENTRIES = 16
READ_CHUNK_BYTES = 1 << 20
"""Entries are read in chunks of about this size, as long as the entries before; a batch record may have 130 MB."""


class LedgerStore:
    """Appends and reads ledger entries."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def append(self, run: str, token: str, number: int, record: AnyRecord) -> None:
        """Append ledger entry `number`, durably. A repeat of the same entry changes nothing.

        Raises `NotLeader` if a newer leader exists, `DataLost` if the entries before it are missing, `Conflict` if
        another record has the number.
        """
        groups = len(record.groups) if isinstance(record, BatchRecord) else 0
        raw = encode_record(record) if groups <= PIECE else await asyncio.to_thread(encode_record, record)
        arguments = [number, raw]
        outcome, detail = await self._connection.call(run, "rb_append", (), arguments, token, durably=True)
        newest = text(detail)
        if outcome == "gap":
            raise data_lost(run, f"the ledger ends at entry {newest}, but entry {number - 1} was acknowledged")
        if outcome != "ok":
            raise Conflict(
                f"run {run}: ledger entry {number} is {outcome}; the newest entry is {newest}",
                name="entry",
                value=number,
                bound=newest,
            )

    async def read(self, run: str, after: int, count: int | None = None) -> AsyncIterator[list[tuple[int, AnyRecord]]]:
        """Read the entries after number `after`, in chunks; at most `count` in all. Raises `Unreadable`."""
        left, chunk = count, FIRST_CHUNK_ENTRIES
        while left is None or left > 0:
            chunk = chunk if left is None else min(left, chunk)
            pipe = self._connection.pipeline()
            pipe.xrange(keys.ledger(run), min=f"({after}-0", max="+", count=chunk)
            (raw,) = await self._connection.read(run, pipe)
            if not raw:
                return
            size = sum(len(fields.get(b"r", b"")) for _, fields in raw)
            records = _read(raw) if size < READ_CHUNK_BYTES else await asyncio.to_thread(_read, raw)
            yield records
            after = records[-1][0]
            left = None if left is None else left - len(records)
            chunk = min(max(1, READ_CHUNK_BYTES // (size // len(raw) + 1)), 8 * chunk, READ_CHUNK_ENTRIES)


def _read(raw: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[tuple[int, AnyRecord]]:
    return [_read_one(*entry) for entry in raw]


def _read_one(entry_id: bytes, fields: Mapping[bytes, bytes]) -> tuple[int, AnyRecord]:
    number = int(entry_id.partition(b"-")[0])
    try:
        return number, decode_record(fields[b"r"])
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(f"ledger entry {number} does not decode: {error}", name="entry", value=number) from error
