"""Groups and their payloads: the index stream, the table of group ids, and one string key per payload."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from redis.exceptions import RedisError

from replaybuf.errors import CheckOutdated, DataLost, LedgerGap
from replaybuf.kernel.state.tickets import prompt_key, reissue_of
from replaybuf.store import keys
from replaybuf.store.buckets import BucketStore
from replaybuf.store.chunks import split_chunks
from replaybuf.store.entries import (
    AppendResult,
    IndexChunk,
    IndexEntry,
    Names,
    NewEntry,
    PendingGroup,
    default_prompt,
    new_entries,
    publish_words,
    read_chunk,
    read_stored,
)
from replaybuf.store.known_ends import Ends
from replaybuf.store.redis.connection import Connection, text
from replaybuf.store.redis.faults import dropped_payload
from replaybuf.store.redis.pipeline import read_values
from replaybuf.store.spill import SpilledFrames

READ_CHUNK_ENTRIES = 5_000
ENTRIES_AT_ONCE = 2_000
"""Entries read by number at once: decoding them takes about 5 ms."""
FREED_AT_ONCE = 1_000
"""Payloads that one call deletes: it blocks Redis for about 1 ms."""
Published: TypeAlias = tuple[NewEntry, int, int]
"""Index entry of a group, outcome and number, as `rb_publish` returns them."""


class GroupStore:
    """Appends groups once, reads them in bulk or one by one, deletes payloads.

    `spilled` reads frames from folders; `buckets` holds the payloads on a cluster.
    """

    def __init__(self, connection: Connection, buckets: BucketStore | None = None) -> None:
        self._connection = connection
        self.spilled = SpilledFrames()
        self.buckets = buckets

    async def append(
        self,
        run: str,
        groups: Sequence[PendingGroup],
        published: Mapping[str, int],
        now_s: float,
        checked_at: int | None = None,
    ) -> list[AppendResult]:
        """Store groups, with the published version by adapter; return when everything answered `stored` is durable.

        `checked_at`: newest ledger entry that they were checked against; None = a direct writer, which checks nothing.
        Raises `CheckOutdated` if a later entry changed what groups are checked against, `DataLost` if Redis lost data
        that this process knows. A full server answers repeats of stored groups only; it raises `NoRoom` for the others.

        One round trip: SET payloads with a TTL -> publish -> wait for the disk. The function checks that each payload
        is there, removes its TTL and adds the index entry in one step, so no crash leaves one without the other. On a
        cluster three round trips, see `BucketStore`.
        """
        if self.buckets:
            published_groups = await self._append_in_buckets(self.buckets, run, groups, published, now_s, checked_at)
        else:
            published_groups = await self._append_at_once(run, groups, published, now_s, checked_at)
        results: list[AppendResult] = []
        repeated: list[int] = []
        newest, newest_key = 0, ""
        for position, (item, (entry, outcome, number)) in enumerate(zip(groups, published_groups, strict=True)):
            stored = outcome == 1
            results.append(AppendResult(item.group_id, stored, number, entry=entry if stored else None))
            if not stored:
                repeated.append(position)
            elif number > newest:
                newest, newest_key = number, entry.strings.payload_key
        if newest:  # before anything is answered `stored`
            known = self._connection.known
            known.advance(run, Ends(0, newest, newest_key, known.of(run).incarnation))
        if repeated:
            outcomes = [(groups[position].names, results[position].number) for position in repeated]
            for position, result in zip(repeated, await self._confirm(run, outcomes), strict=True):
                results[position] = result
        return results

    async def _append_at_once(
        self,
        run: str,
        groups: Sequence[PendingGroup],
        published: Mapping[str, int],
        now_s: float,
        checked_at: int | None,
    ) -> list[Published]:
        """Store groups on one server."""
        payload_keys = keys.payloads(run, [item.group_id for item in groups])
        entries = new_entries(groups, payload_keys, published, now_s, admitted=checked_at is not None)
        commands: list[Any] = []
        for key, item in zip(payload_keys, groups, strict=True):
            commands.append(("SET", key, item.frame, "EX", keys.ORPHAN_TTL_S))
        marks, words = publish_words(run, groups, entries, checked_at)
        names = [name for mark, key in zip(marks, payload_keys, strict=True) for name in (*mark, key)]
        commands.append(self._connection.words_of(run, "rb_publish", [keys.deleted(run), *names], words))
        *saved, reply = await self._connection.write(commands, may_fail=len(groups))
        try:
            outcome, flat = self._connection.check_reply(run, "", reply)
            _check_current(run, outcome)
        except (DataLost, LedgerGap, CheckOutdated):
            pipe = self._connection.pipeline()
            pipe.unlink(*payload_keys)  # of this attempt only, which was not published
            await self._connection.run(pipe.execute())
            raise
        for error, outcome in zip(saved, flat[::2], strict=True):
            if isinstance(error, RedisError) and outcome < 0:
                raise self._connection.explain(error)
            if outcome < 0:
                raise dropped_payload(self._connection.url)
        return list(zip(entries, flat[::2], flat[1::2], strict=True))

    async def _append_in_buckets(
        self,
        buckets: BucketStore,
        run: str,
        groups: Sequence[PendingGroup],
        published: Mapping[str, int],
        now_s: float,
        checked_at: int | None,
    ) -> list[Published]:
        """Store groups on a cluster. A full node takes no groups, not even repeats."""
        while True:
            payload_keys = [keys.payload_in_bucket(run, item.group_id) for item in groups]
            entries = new_entries(groups, payload_keys, published, now_s, admitted=checked_at is not None)
            frames = {key: item.frame for key, item in zip(payload_keys, groups, strict=True)}
            attempt = await buckets.write(run, frames)
            places: dict[int, list[str]] = {}
            for place, item in enumerate(groups):
                places.setdefault(keys.bucket_of(item.group_id), []).append(str(place))
            written = [(bucket, *counts, ",".join(places[bucket])) for bucket, counts in attempt.written.items()]
            marks, words = publish_words(run, groups, entries, checked_at)
            names = [keys.deleted(run), *(name for mark in marks for name in mark), keys.buckets(run)]
            words = [attempt.round, len(written), *(part for counts in written for part in counts), *words]
            try:
                outcome, flat = await self._connection.call(run, "rb_publish_stored", names, words, durably=True)
                _check_current(run, outcome)
            except (DataLost, LedgerGap, CheckOutdated):
                await buckets.withdraw(run, payload_keys)  # of this attempt only, which was not published
                raise
            if text(outcome) == "ok":
                break
            if text(outcome) == "taken":
                await buckets.take_back(run, int(flat), attempt.written[int(flat)][0], payload_keys)
            else:
                buckets.begin_round(run, int(flat))  # this process was idle for two rounds
            await buckets.withdraw(run, payload_keys)
        *flat, newest = flat
        stored = [key for key, result in zip(payload_keys, flat[::2], strict=True) if result == 1]
        buckets.settle(run, attempt, stored, int(newest))
        if repeated := [key for key, result in zip(payload_keys, flat[::2], strict=True) if result != 1]:
            await buckets.withdraw(run, repeated)
        return list(zip(entries, flat[::2], flat[1::2], strict=True))

    async def sweep(self, run: str, token: str) -> int:
        """Delete payloads of append attempts that were cut between their two steps; return how many.

        Each must be older than two calls of this method. Raises `NotLeader`.
        """
        return await self.buckets.sweep(run, token, self._find_published) if self.buckets else 0

    async def _find_published(self, run: str, payload_keys: Sequence[str]) -> set[str]:
        numbers = await self.find_numbers(run, [keys.group_of_payload(run, key) for key in payload_keys])
        entries = await self.read_entries(run, [number for number in numbers if number])
        return {entry.strings.payload_key for entry in entries}

    async def find_repeats(self, run: str, names: Sequence[Names]) -> list[AppendResult | None]:
        """Find the groups that would repeat a stored one, as durably as an append; None = the group is new."""
        numbers = await self.find_numbers(run, [name for pair in names for name in pair])
        stored: dict[int, int] = {}
        for position, (by_id, by_prompt) in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
            number = by_prompt if by_id is None else by_id
            if number is not None:
                stored[position] = number
        repeats: list[AppendResult | None] = [None] * len(names)
        if stored:
            confirmed = await self._confirm(run, [(names[position], number) for position, number in stored.items()])
            for position, repeat in zip(stored, confirmed, strict=True):
                repeats[position] = None if repeat.taken else repeat
        return repeats

    async def _confirm(self, run: str, repeats: Sequence[tuple[Names, int]]) -> list[AppendResult]:
        """Return what to answer for groups whose names are stored under these numbers, when the first is durable."""
        first = {entry.number: entry for entry in await self.read_entries(run, [number for _, number in repeats])}
        results: list[AppendResult] = []
        for (group_id, own_prompt), number in repeats:
            entry = first.get(number)
            taken = False
            if entry is not None and own_prompt and entry.strings.group_id in (group_id, own_prompt):
                strings = entry.strings
                key = prompt_key(strings.adapter, int(entry.values["prompt_index"]), reissue_of(strings.ticket))
                taken = key != own_prompt
            results.append(AppendResult(group_id, False, number, taken))
        counted = sum(not result.taken for result in results)
        if counted:  # this write makes the wait cover the append that is repeated
            await self._connection.call(run, "rb_count", [keys.deleted(run)], ["duplicate", counted], durably=True)
        return results

    async def free_payloads(
        self, run: str, token: str, payload_keys: Sequence[str], through: int, columns: Sequence[str] = ()
    ) -> None:
        """Delete payloads that the ledger freed, all of them up to entry `through`, with their late `columns`.

        Raises `NotLeader`, `DataLost`.
        """
        payload_keys = with_columns(payload_keys, columns)
        if self.buckets:
            # A leader that was replaced stops here. One that is replaced after it deletes nothing that its successor
            # needs: the ledger has freed these keys, and no append uses a key again.
            await self._connection.call(run, "rb_free", (), [""], token)
            # Durably, with their notes: the sweep takes what is left of either, and not in the index, for an attempt.
            await self.buckets.unlink(payload_keys, durably=True, noted_in=run)
            payload_keys = []
        for start in range(0, len(payload_keys) or 1, FREED_AT_ONCE):
            chunk = payload_keys[start : start + FREED_AT_ONCE]
            last = start + FREED_AT_ONCE >= len(payload_keys)
            await self._connection.call(run, "rb_free", chunk, [through if last else ""], token)

    async def read_index(
        self, run: str, after: int, through: int | None = None, count: int = READ_CHUNK_ENTRIES
    ) -> AsyncIterator[IndexChunk]:
        """Read the index stream after number `after`, up to number `through`, in chunks of `count` entries.

        While one chunk is parsed, Redis prepares the next.
        """
        reading: asyncio.Task[Any] | None = asyncio.create_task(self._read_chunk(run, f"({after}-0", through, count))
        try:
            while reading:
                raw, reading = await reading, None
                if len(raw) == count:
                    reading = asyncio.create_task(self._read_chunk(run, b"(" + raw[-1][0], through, count))
                if raw:
                    yield read_chunk(raw, run)
        finally:
            if reading:  # the consumer stopped early, or was cancelled
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _read_chunk(self, run: str, after: str | bytes, through: int | None, count: int) -> Any:
        pipe = self._connection.pipeline()
        pipe.response_callbacks = {}  # `read_chunk` takes the parser's form
        last = "+" if through is None else f"{through}-0"
        pipe.execute_command("XRANGE", keys.index(run), after, last, "COUNT", count)
        (raw,) = await self._connection.read(run, pipe)
        return raw

    async def read_entries(self, run: str, numbers: Sequence[int]) -> list[IndexEntry]:
        """Read the index entries of these groups, in this order, without trimmed ones; `ENTRIES_AT_ONCE` per call."""
        pieces = (numbers[start : start + ENTRIES_AT_ONCE] for start in range(0, len(numbers), ENTRIES_AT_ONCE))
        return [entry for piece in pieces for entry in await self._read_entries(run, piece)]

    async def _read_entries(self, run: str, numbers: Sequence[int]) -> list[IndexEntry]:
        pipe = self._connection.pipeline()
        pipe.response_callbacks = {}  # `read_chunk` takes the parser's form
        for first, last in _ranges(numbers):
            pipe.execute_command("XRANGE", keys.index(run), f"{first}-0", f"{last}-0")
        replies = await self._connection.read(run, pipe)
        entries = {entry.number: entry for reply in replies if reply for entry in read_chunk(reply, run).entries()}
        missing = [number for number in numbers if number not in entries]
        if missing:
            old = await self._connection.read_one(run, "HMGET", keys.old_entries(run), *map(str, missing))
            for number, raw in zip(missing, old, strict=True):
                if raw is not None:
                    (entries[number],) = read_stored(np.array([number]), [raw], run).entries()
        return [entries[number] for number in numbers if number in entries]

    async def find_numbers(self, run: str, group_ids: Sequence[str]) -> list[int | None]:
        """Look up the numbers stored under these ids; 0 = the group was stored, and its history is trimmed."""
        if not group_ids:
            return []
        replies = await self._connection.read_one(run, "HMGET", keys.group_ids(run), *group_ids)
        numbers = [None if number is None else int(number) for number in replies]
        pipe = self._connection.pipeline()
        asked: list[int] = []
        for position, group_id in enumerate(group_ids):
            if numbers[position] is None and (prompt := default_prompt(group_id)):
                pipe.getbit(keys.prompts_done(run, prompt[0]), prompt[1])
                asked.append(position)
        for position, bit in zip(asked, await self._connection.read(run, pipe) if asked else [], strict=True):
            numbers[position] = 0 if bit else None
        return numbers

    async def read_frames(self, run: str, sizes: Mapping[str, int]) -> list[bytes | None]:
        """Read frames of a run by payload key, given their sizes in bytes; None = the payload is missing.

        Spilled frames come from the spill folder: raises `SpillAway` if it cannot be read.
        """
        frames: list[bytes | None] = []
        for chunk in split_chunks(sizes, sizes.__getitem__):
            frames += await self.spilled.follow(run, await self.read_payloads(run, chunk))
        return frames

    async def read_payloads(self, run: str, payload_keys: Sequence[str]) -> list[bytes | None]:
        """Read payloads as they are, stubs too; None = the payload is missing. Together at most `CHUNK_BYTES`."""
        if self.buckets:
            return await self.buckets.read(run, payload_keys)
        ends = self._connection.words_of(run, "rb_ends")
        reading = asyncio.to_thread(read_values, self._connection.payload_client, payload_keys, ends)
        values, counters = await self._connection.run(reading)
        self._connection.check_reply(run, "", counters)
        payloads: list[bytes | None] = values
        return payloads


def with_columns(payload_keys: Iterable[str], columns: Sequence[str]) -> list[str]:
    """List the keys of payloads, and those that their late columns may have."""
    return [key for own in payload_keys for key in (own, *(keys.late_column(own, name) for name in columns))]


def _check_current(run: str, outcome: str) -> None:
    if outcome == "outdated_check":
        raise CheckOutdated(f"the rules of run {run} have changed while groups were being stored; send them again")


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Group numbers into ranges without gaps, each of at most `READ_CHUNK_ENTRIES`: first and last of each."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        first, last = ranges[-1] if ranges else (number, number - 2)
        if number == last + 1 and number - first < READ_CHUNK_ENTRIES:
            ranges[-1] = first, number
        else:
            ranges.append((number, number))
    return ranges
