"""The ledger stream: appended to at an exact number, read in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import RedisError

from replaybuf.errors import ServiceUnavailable, Unreadable
from replaybuf.store import keys
from replaybuf.store.redis.connection import Connection, text
from replaybuf.store.redis.faults import data_lost, dropped_payload
from replaybuf.wire.answer.explain import Candidates
from replaybuf.wire.decoding import prepared
from replaybuf.wire.ledger import (
    PIECE,
    AnyRecord,
    BatchRecord,
    ColumnsRecord,
    ConfigRecord,
    RewindRecord,
    decode_record,
    encode_record,
)

logger = logging.getLogger(__name__)

RULE_RECORDS = (ConfigRecord, RewindRecord)
"""Records that change what groups are checked against: a group that was checked before one is not stored after it."""
READ_CHUNK_ENTRIES = 1_000
FIRST_CHUNK_ENTRIES = 16
READ_CHUNK_BYTES = 1 << 20
"""Entries are read in chunks of about this size, as long as the entries before; a batch record may have 130 MB."""


class LedgerEntry(NamedTuple):
    """An entry as it was read. `key` is random: it identifies the history."""

    number: int
    record: AnyRecord
    key: str


class NewColumn(NamedTuple):
    """A late column to publish: key of its group's payload, name, frame."""

    payload_key: str
    name: str
    frame: bytes


class LedgerStore:
    """Appends and reads ledger entries."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def append(
        self, run: str, token: str, number: int, record: AnyRecord, candidates: Candidates | None = None
    ) -> LedgerEntry:
        """Append ledger entry `number`, durably, and return it. A repeat of the same entry changes nothing.

        `candidates`: what a batch was chosen from, kept beside the entry and trimmed with it.
        Raises `NotLeader` if a newer leader exists, `DataLost` if the entries before it are missing, and
        `ServiceUnavailable` if another record has the number: a write without an answer may arrive after the next read.
        """
        groups = len(record.groups) if isinstance(record, BatchRecord) else 0
        raw = encode_record(record) if groups <= PIECE else await asyncio.to_thread(encode_record, record)
        beside = b"" if candidates is None else msgspec.msgpack.encode(candidates)
        words = [number, raw, keys.new_entry(), beside, int(isinstance(record, RULE_RECORDS))]
        outcome, detail = await self._connection.call(
            run, "rb_append", [keys.candidates(run)], words, token, durably=True
        )
        return self._check(run, number, record, outcome, text(detail))

    async def append_columns(
        self, run: str, token: str, number: int, record: ColumnsRecord, frames: Sequence[NewColumn]
    ) -> LedgerEntry:
        """Append ledger entry `number`, which adds late columns, and publish their frames: all or nothing, durably.

        Returns the entry. Raises what `append` raises, and `NoRoom` if a full server has no memory for the
        frames. What a failed attempt leaves behind expires.
        """
        if self._connection.cluster:
            return await self._append_columns_on_nodes(run, token, number, record, frames)
        connection = self._connection
        commands, names = list[Any](), list[str]()
        for column in frames:
            attempt = keys.late_attempt(column.payload_key, column.name)
            commands.append(("SET", attempt, column.frame, "EX", keys.ORPHAN_TTL_S))
            names += [attempt, keys.late_column(column.payload_key, column.name)]
        arguments = [number, encode_record(record), keys.new_entry(), *(column.name for column in frames)]
        commands.append(connection.words_of(run, "rb_columns", names, arguments, token))
        *saved, reply = await connection.write(commands, may_fail=len(frames))
        outcome, detail = connection.check_reply(run, token, reply)
        if outcome == "missing":
            error = next((outcome for outcome in saved if isinstance(outcome, RedisError)), None)
            raise connection.explain(error) if error else dropped_payload(connection.url)
        return self._check(run, number, record, outcome, text(detail))

    async def _append_columns_on_nodes(
        self, run: str, token: str, number: int, record: ColumnsRecord, frames: Sequence[NewColumn]
    ) -> LedgerEntry:
        """Write the frames where they belong, then append the entry, which makes them count.

        A frame that is there already is kept if it is the same: it is from a call that was cut. Another one is
        replaced, unless this server does not lead any more, or another leader has replaced it meanwhile.
        """
        connection = self._connection
        flags = [part for name in dict.fromkeys(column.name for column in frames) for part in (f"column:{name}", 1)]
        # A deletion then deletes them too.
        await connection.call(run, "rb_count", [keys.deleted(run)], flags, token, durably=True)
        pipe = connection.pipeline()
        for column in frames:
            key = keys.late_column(column.payload_key, column.name)
            pipe.execute_command("SET", key, column.frame, "NX", "GET")
        held = await connection.run_durably(pipe)
        if other := [pair for pair in zip(frames, held, strict=True) if pair[1] not in (None, pair[0].frame)]:
            await connection.call(run, "rb_count", [keys.deleted(run)], (), token)
            pipe = connection.pipeline()
            for column, frame in other:
                key = keys.late_column(column.payload_key, column.name)
                pipe.execute_command("FCALL", "rb_replace_column", 1, key, frame, column.frame)
            await connection.run_durably(pipe)
        words = [number, encode_record(record), keys.new_entry()]
        outcome, detail = await connection.call(run, "rb_append", [keys.candidates(run)], words, token, durably=True)
        return self._check(run, number, record, outcome, text(detail))

    def _check(self, run: str, number: int, record: AnyRecord, outcome: str, detail: str) -> LedgerEntry:
        """Return an entry as it is read later. Raises the error of an append that wrote nothing.

        `detail`: key of the entry and newest group then, if it was noted; else the number of the newest entry.
        """
        if outcome == "ok":
            key, _, newest_group = detail.partition(" ")
            return LedgerEntry(number, _reaching(record, newest_group), key)
        if outcome == "gap":
            raise data_lost(run, f"the ledger ends at entry {detail}, but entry {number - 1} was acknowledged")
        logger.error("ledger entry is %s run=%s entry=%d newest=%s", outcome, run, number, detail)
        raise ServiceUnavailable(
            f"run {run}: ledger entry {number} is {outcome}; the newest entry is {detail}; an earlier write "
            "arrived late: send the request again",
            name="entry",
            value=number,
            bound=detail,
        )

    async def read(self, run: str, after: int, count: int | None = None) -> AsyncIterator[list[LedgerEntry]]:
        """Read the entries after number `after`, in chunks; at most `count` in all. Raises `Unreadable`."""
        left, chunk = count, FIRST_CHUNK_ENTRIES
        while left is None or left > 0:
            chunk = chunk if left is None else min(left, chunk)
            raw = await self._connection.read_one(run, "XRANGE", keys.ledger(run), f"({after}-0", "+", "COUNT", chunk)
            if not raw:
                return
            size = sum(len(fields.get(b"r", b"")) for _, fields in raw)
            records = _read(raw) if size < READ_CHUNK_BYTES else await asyncio.to_thread(_read, raw)
            yield records
            after = records[-1].number
            left = None if left is None else left - len(records)
            chunk = min(max(1, READ_CHUNK_BYTES // (size // len(raw) + 1)), 8 * chunk, READ_CHUNK_ENTRIES)

    async def read_candidates(self, run: str, upto: int | None, count: int) -> list[tuple[int, Candidates]]:
        """Read what the newest `count` batches up to ledger entry `upto` (None = the end) were chosen from.

        Returns them with their entries, newest first. Raises `Unreadable`.
        """
        newest = "+" if upto is None else f"{upto}-0"
        words = ("XREVRANGE", keys.candidates(run), newest, "-", "COUNT", count)
        candidates = await self._connection.read_one(run, *words)
        return [_read_candidates(*candidate) for candidate in candidates or ()]


def _read_candidates(entry_id: bytes, fields: Mapping[bytes, bytes]) -> tuple[int, Candidates]:
    number = int(entry_id.partition(b"-")[0])
    try:
        return number, msgspec.msgpack.decode(fields[b"c"], type=prepared(Candidates))
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError) as error:
        detail = f"what the batch at ledger entry {number} was chosen from does not decode: {error}"
        raise Unreadable(detail, name="entry", value=number) from error


def _reaching(record: AnyRecord, newest_group: bytes | str) -> AnyRecord:
    """Return a record with the newest group at the moment in which it was written, "" = not noted.

    A rewind reaches all groups that were checked before it. Only Redis knows them: any server may store groups.
    """
    if isinstance(record, RewindRecord) and newest_group:
        return msgspec.structs.replace(record, until=max(record.until, int(newest_group)))
    return record


def _read(raw: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[LedgerEntry]:
    return [_read_one(*entry) for entry in raw]


def _read_one(entry_id: bytes, fields: Mapping[bytes, bytes]) -> LedgerEntry:
    number = int(entry_id.partition(b"-")[0])
    try:
        record = _reaching(decode_record(fields[b"r"]), fields.get(b"g", b""))
        return LedgerEntry(number, record, text(fields.get(b"k", b"")))
    except (KeyError, ValueError) as error:  # also of msgspec and of text
        raise Unreadable(f"ledger entry {number} does not decode: {error}", name="entry", value=number) from error
