"""Groups and their payloads: the index stream, the table of group ids, and one string key per payload."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from replaybuf.errors import NoRoom
from replaybuf.kernel.index import encode_entry
from replaybuf.kernel.tickets import prompt_key
from replaybuf.store import keys
from replaybuf.store.chunks import split_chunks
from replaybuf.store.connection import Connection, text
from replaybuf.store.entries import (
    EntryStrings,
    IndexChunk,
    IndexEntry,
    default_prompt,
    encode_strings,
    read_chunk,
    read_stored,
)
from replaybuf.store.faults import fenced
from replaybuf.store.pipeline import FastPipeline, read_values, receive, send
from replaybuf.wire.group import Group

READ_CHUNK_ENTRIES = 5_000
Names = tuple[str, str]
"""The id of a group, and the default id of its ticket's prompt ("" without a ticket)."""
Outcome = tuple[Names, bool, int]
"""Names of a group, whether this call stored it, and the number stored under its names."""


@dataclasses.dataclass(frozen=True, slots=True)
class AppendResult:
    """Outcome of one group of an append; `number` is the index number of the group stored under the id.

    0 = a group was stored, and its history is trimmed. `taken`: the stored group belongs to another prompt than this
    group's ticket. This group is then no repeat and is not stored either.
    """

    group_id: str
    stored: bool
    number: int
    taken: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class PendingGroup:
    """One group ready to be stored: its id, the default id of its ticket's prompt ("" without a ticket), its frame."""

    group: Group
    group_id: str
    prompt_key: str
    frame: bytes | memoryview
    crc32c: int

    @property
    def names(self) -> Names:
        """The two ids under which the group is stored."""
        return self.group_id, self.prompt_key


class GroupStore:
    """Appends groups once, reads them in bulk or one by one, persists and deletes payloads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def append(
        self, run: str, groups: Sequence[PendingGroup], published: Mapping[str, int], now_s: float, token: str = ""
    ) -> list[AppendResult]:
        """Store groups, with the published version by adapter; return when everything answered `stored` is durable.

        With a leader's fencing token no group enters the index after a newer leader took over: raises `NotLeader`.
        A full server answers repeats of stored groups only; for all others it raises `NoRoom`.

        Order: SET payloads with a TTL -> publish index entries -> PERSIST payloads. A payload that lost the race for
        its id is deleted. If the answer to the first attempt was lost, the repeat removes the TTL.
        """
        payload_keys = [keys.payload(run, item.group_id) for item in groups]
        pipe = self._connection.pipeline()
        for key, item in zip(payload_keys, groups, strict=True):
            pipe.set(key, item.frame, ex=keys.ORPHAN_TTL_S)
        try:
            await self._connection.run(pipe.execute())
        except NoRoom:
            await self.delete_payloads(payload_keys)  # some were stored; they would fill the memory that is freed
            stored = await self._find_stored(run, [item.names for item in groups])
            if len(stored) < len(groups):
                raise
            return await self._confirm(run, list(stored.values()), self._connection.pipeline())
        outcomes = await self._publish(run, list(zip(payload_keys, groups, strict=True)), published, now_s, token)
        pipe = self._connection.pipeline()
        for key, (_, is_new, _) in zip(payload_keys, outcomes, strict=True):
            (pipe.persist if is_new else pipe.unlink)(key)
        return await self._confirm(run, outcomes, pipe)

    async def _publish(
        self,
        run: str,
        groups: Sequence[tuple[str, PendingGroup]],
        published: Mapping[str, int],
        now_s: float,
        token: str,
    ) -> list[Outcome]:
        """Put groups, each with its payload key, into the index."""
        run_keys = keys.index(run), keys.group_ids(run), keys.counts(run), keys.fence(run)
        pipe = self._connection.pipeline()
        for key, item in groups:
            group = item.group
            entry = encode_entry(group, len(item.frame), item.crc32c, published.get(group.adapter, 0), now_s)
            lengths = group.lengths.astype("<i4").tobytes()
            strings = EntryStrings(item.group_id, group.prompt_id, group.adapter, key, group.ticket, lengths)
            prompts = [default_prompt(name) for name in item.names]
            done = [keys.prompts_done(run, prompt[0] if prompt else "") for prompt in prompts]
            bits = [prompt[1] if prompt else "" for prompt in prompts]
            arguments = [token, *item.names, entry, encode_strings(strings), *bits]
            pipe.fcall("rb_publish", len(run_keys) + 2, *run_keys, *done, *arguments)
        replies = await self._connection.run(pipe.execute())
        for reply in replies:
            if reply[0] < 0:
                raise fenced(run, token, text(reply[1]))
        return [(item.names, reply[0] == 1, int(reply[1])) for (_, item), reply in zip(groups, replies, strict=True)]

    async def find_repeats(self, run: str, names: Sequence[Names]) -> list[AppendResult | None]:
        """Find the groups that would repeat a stored one, as durably as an append; None = the group is new."""
        outcomes = await self._find_stored(run, names)
        found: list[AppendResult | None] = [None] * len(names)
        if outcomes:
            confirmed = await self._confirm(run, list(outcomes.values()), self._connection.pipeline())
            for position, repeat in zip(outcomes, confirmed, strict=True):
                found[position] = None if repeat.taken else repeat
        return found

    async def _find_stored(self, run: str, names: Sequence[Names]) -> dict[int, Outcome]:
        """Find the groups whose names are stored, by position."""
        numbers = await self.find_numbers(run, [name for pair in names for name in pair])
        outcomes: dict[int, Outcome] = {}
        for position, (by_id, by_prompt) in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
            number = by_prompt if by_id is None else by_id
            if number is not None:
                outcomes[position] = (names[position], False, number)
        return outcomes

    async def _confirm(self, run: str, outcomes: Sequence[Outcome], pipe: FastPipeline) -> list[AppendResult]:
        """Execute `pipe` and make repeated groups durable too; return what to answer."""
        repeated = [number for _, is_new, number in outcomes if number and not is_new]
        first = {entry.number: entry for entry in await self.read_entries(run, repeated)}
        results: list[AppendResult] = []
        for (group_id, own_prompt), is_new, number in outcomes:
            entry = None if is_new else first.get(number)
            taken = False
            if entry is not None:
                pipe.persist(entry.strings.payload_key)
                if own_prompt and entry.strings.group_id in (group_id, own_prompt):
                    taken = prompt_key(entry.strings.adapter, int(entry.values["prompt_index"])) != own_prompt
            results.append(AppendResult(group_id, is_new, number, taken))
        repeats = sum(not (result.stored or result.taken) for result in results)
        if repeats:  # this write makes the wait cover the append that is repeated
            pipe.fcall("rb_count", 1, keys.counts(run), 1, "duplicate", repeats)
        await self._connection.run_durably(pipe)
        return results

    async def persist_payloads(self, payload_keys: Iterable[str]) -> None:
        """Remove the TTL of payloads whose producer died between publish and PERSIST."""
        pipe = self._connection.pipeline()
        for key in payload_keys:
            pipe.persist(key)
        await self._connection.run(pipe.execute())

    async def delete_payloads(self, payload_keys: Iterable[str]) -> None:
        """Delete payloads."""
        pipe = self._connection.pipeline()
        for key in payload_keys:
            pipe.unlink(key)
        await self._connection.run(pipe.execute())

    async def read_index(self, run: str, after: int, through: int | None = None) -> AsyncIterator[IndexChunk]:
        """Read the index stream after number `after`, up to number `through`, in chunks.

        On a connection of its own, without redis-py's conversions. While one chunk is parsed Redis prepares the next.
        """
        guard, pool = self._connection.run, self._connection.client.connection_pool
        connection: Any = await guard(pool.get_connection())  # type: ignore[no-untyped-call]
        last, count = "+" if through is None else f"{through}-0", READ_CHUNK_ENTRIES
        command = ["XRANGE", keys.index(run), f"({after}-0", last, "COUNT", count]
        pending = True
        try:
            await guard(send(connection, [command]))
            while pending:
                (raw,) = await guard(receive(connection, 1))
                pending = len(raw) == count
                if pending:
                    command[2] = b"(" + raw[-1][0]
                    await guard(send(connection, [command]))
                if raw:
                    yield read_chunk(raw)
        finally:
            if pending:  # the consumer stopped early: a reply is on its way
                await connection.disconnect()
            await pool.release(connection)

    async def read_entries(self, run: str, numbers: Sequence[int]) -> list[IndexEntry]:
        """Read the index entries of these groups, in this order, without trimmed ones."""
        if not numbers:
            return []
        pipe = self._connection.pipeline()
        pipe.response_callbacks = {}  # `read_chunk` takes the parser's form
        for first, last in _ranges(numbers):
            pipe.execute_command("XRANGE", keys.index(run), f"{first}-0", f"{last}-0")
        replies = await self._connection.run(pipe.execute())
        found = {entry.number: entry for reply in replies if reply for entry in read_chunk(reply).entries()}
        missing = [number for number in numbers if number not in found]
        if missing:
            old = self._connection.client.hmget(keys.old_entries(run), [str(number) for number in missing])
            for number, raw in zip(missing, await self._connection.run(old), strict=True):
                if raw is not None:
                    (found[number],) = read_stored(np.array([number]), [raw]).entries()
        return [found[number] for number in numbers if number in found]

    async def read_strings(self, run: str, first: int, last: int) -> list[EntryStrings]:
        """Read the variable part of the index entries `first` to `last`."""
        return [strings async for chunk in self.read_index(run, first - 1, last) for strings in chunk.strings]

    async def find_numbers(self, run: str, group_ids: Sequence[str]) -> list[int | None]:
        """Look up the numbers stored under these ids; 0 = the group was stored, and its history is trimmed."""
        if not group_ids:
            return []
        found = await self._connection.run(self._connection.client.hmget(keys.group_ids(run), list(group_ids)))
        numbers = [None if number is None else int(number) for number in found]
        pipe = self._connection.pipeline()
        asked: list[int] = []
        for position, group_id in enumerate(group_ids):
            if numbers[position] is None and (prompt := default_prompt(group_id)):
                pipe.getbit(keys.prompts_done(run, prompt[0]), prompt[1])
                asked.append(position)
        for position, bit in zip(asked, await self._connection.run(pipe.execute()), strict=True):
            numbers[position] = 0 if bit else None
        return numbers

    async def read_frames(self, sizes: Mapping[str, int]) -> list[bytes | None]:
        """Read payloads by key, given their sizes in bytes; None = the payload is missing.

        Replies stay below `CHUNK_BYTES`.
        """
        # GET and not MGET: in a cluster the payloads have different slots.
        chunks = [
            await self._connection.run(asyncio.to_thread(read_values, self._connection.payload_client, chunk))
            for chunk in split_chunks(sizes, sizes.__getitem__)
        ]
        return [frame for chunk in chunks for frame in chunk]


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
