"""Groups and their payloads: the index stream, the table of ids, one string key per payload."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from replaybuf.errors import NoRoom
from replaybuf.kernel.index import entry_of
from replaybuf.kernel.tickets import prompt_key
from replaybuf.store import keys
from replaybuf.store.chunks import portions
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
from replaybuf.store.instep import get_in_step, receive_in_step, send_in_step
from replaybuf.store.trouble import fenced
from replaybuf.wire.group import Group

READ_CHUNK_ENTRIES = 5_000
Outcome = tuple[tuple[str, str], bool, int]
"""Of one group: its id and that of its ticket's prompt, whether it was stored now, the number stored under them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Appended:
    """Outcome of one group of an append; `number` is the index number of the group that is stored under the id.

    0 = it was stored once, and its history is trimmed. `taken`: that group is not of the prompt whose ticket came with
    this one, which therefore repeats nothing and is not stored either.
    """

    group_id: str
    stored: bool
    number: int
    taken: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ToAppend:
    """One group ready to be stored: its id, the id its ticket's prompt stands for ("" without one), its frame."""

    group: Group
    group_id: str
    prompt_key: str
    frame: bytes | memoryview
    crc32c: int


class GroupCommands(Connection):
    """What is done with groups: stored once, read in bulk or one by one, their payloads kept or let go."""

    async def append(
        self, run: str, groups: Sequence[ToAppend], published: Mapping[str, int], now_s: float, token: str = ""
    ) -> list[Appended]:
        """Store groups, with the published version by adapter; returns once what is answered `stored` is durable.

        With the fencing token of a leader nothing enters the index once a newer one leads: raises `NotLeader`.

        Order: payloads (with a TTL) -> index entries -> the TTL goes. A payload that lost the race for its id is
        deleted; a first attempt whose answer was lost gets its TTL removed by the repeat. What only repeats is answered
        on a full server too: all else raises `NoRoom` there.
        """
        payload_keys = [keys.payload(run, item.group_id) for item in groups]
        pipe = self._redis.pipeline(transaction=False)
        for key, item in zip(payload_keys, groups, strict=True):
            pipe.set(key, item.frame, ex=keys.ORPHAN_TTL_S)
        try:
            await self._guard(pipe.execute())
        except NoRoom:
            await self.unlink(payload_keys)  # some may have found room; left there they would fill what is freed
            there = await self._stored(run, [(item.group_id, item.prompt_key) for item in groups])
            if len(there) < len(groups):
                raise
            return await self._settle(run, list(there.values()), self._redis.pipeline(transaction=False))
        pipe = self._redis.pipeline(transaction=False)
        touched = keys.index(run), keys.group_ids(run), keys.counts(run), keys.fence(run)
        for key, item in zip(payload_keys, groups, strict=True):
            version = published.get(item.group.adapter, 0)
            numbers = entry_of(item.group, len(item.frame), item.crc32c, version, now_s)
            strings = EntryStrings(
                item.group_id,
                item.group.prompt_id,
                item.group.adapter,
                key,
                item.group.ticket,
                item.group.lengths.astype("<i4").tobytes(),
            )
            named = [default_prompt(name) for name in (item.group_id, item.prompt_key)]
            done = [keys.prompts_done(run, prompt[0] if prompt else "") for prompt in named]
            bits = [prompt[1] if prompt else "" for prompt in named]
            arguments = [token, item.group_id, item.prompt_key, numbers, encode_strings(strings), *bits]
            pipe.fcall("rb_publish", len(touched) + 2, *touched, *done, *arguments)
        replies = await self._guard(pipe.execute())
        for reply in replies:
            if reply[0] < 0:
                raise fenced(run, token, text(reply[1]))
        outcomes = [
            ((item.group_id, item.prompt_key), reply[0] == 1, int(reply[1]))
            for item, reply in zip(groups, replies, strict=True)
        ]
        pipe = self._redis.pipeline(transaction=False)
        for key, (_, stored, _) in zip(payload_keys, outcomes, strict=True):
            if stored:
                pipe.persist(key)
            else:
                pipe.unlink(key)
        return await self._settle(run, outcomes, pipe)

    async def repeats(self, run: str, named: Sequence[tuple[str, str]]) -> list[Appended | None]:
        """Say which of these groups would repeat one that is stored, as durably as an append does; None = it would not.

        Each is named by its id and by the id that its ticket's prompt stands for, "" where there is none.
        """
        outcomes = await self._stored(run, named)
        found: list[Appended | None] = [None] * len(named)
        if outcomes:
            settled = await self._settle(run, list(outcomes.values()), self._redis.pipeline(transaction=False))
            for position, repeat in zip(outcomes, settled, strict=True):
                found[position] = None if repeat.taken else repeat
        return found

    async def _stored(self, run: str, named: Sequence[tuple[str, str]]) -> dict[int, Outcome]:
        """Find which of these names are known, by position."""
        numbers = await self.numbers_of(run, [name for names in named for name in names])
        outcomes: dict[int, Outcome] = {}
        for position, (by_id, by_prompt) in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
            number = by_prompt if by_id is None else by_id
            if number is not None:
                outcomes[position] = (named[position], False, number)
        return outcomes

    async def _settle(self, run: str, outcomes: Sequence[Outcome], pipe: Any) -> list[Appended]:
        """See to it that what is answered of groups is durable; `pipe` has what else is to be written."""
        first = {
            entry.number: entry
            for entry in await self.entries(run, [number for _, stored, number in outcomes if number and not stored])
        }
        results: list[Appended] = []
        for (group_id, its_prompt), stored, number in outcomes:
            entry = None if stored else first.get(number)
            taken = False
            if entry is not None:
                pipe.persist(entry.strings.payload_key)
                if its_prompt and entry.strings.group_id in (group_id, its_prompt):
                    taken = prompt_key(entry.strings.adapter, int(entry.values["prompt_index"])) != its_prompt
            results.append(Appended(group_id, stored, number, taken))
        repeats = sum(not (result.stored or result.taken) for result in results)
        if repeats:  # counting them is the write by which the wait covers the append they repeat
            pipe.fcall("rb_count", 1, keys.counts(run), 1, "duplicate", repeats)
        await self._durably(pipe)
        return results

    async def adopt(self, payload_keys: Iterable[str]) -> None:
        """Make payloads permanent whose producer died between publishing and saying so."""
        pipe = self._redis.pipeline(transaction=False)
        for key in payload_keys:
            pipe.persist(key)
        await self._guard(pipe.execute())

    async def unlink(self, payload_keys: Iterable[str]) -> None:
        """Delete payloads."""
        pipe = self._redis.pipeline(transaction=False)
        for key in payload_keys:
            pipe.unlink(key)
        await self._guard(pipe.execute())

    async def read_index(self, run: str, after: int, through: int | None = None) -> AsyncIterator[IndexChunk]:
        """Read the index stream from behind number `after`, up to number `through`, in chunks.

        On a connection of its own, past the client's conversions; while a chunk is parsed Redis prepares the next.
        """
        connection: Any = await self._guard(self._redis.connection_pool.get_connection())  # type: ignore[no-untyped-call]
        last, count = "+" if through is None else f"{through}-0", READ_CHUNK_ENTRIES
        command = ["XRANGE", keys.index(run), f"({after}-0", last, "COUNT", count]
        awaited = True
        try:
            word = await self._guard(send_in_step(connection, [command]))
            while awaited:
                (raw,) = await self._guard(receive_in_step(connection, 1, word))
                awaited = len(raw) == count
                if awaited:
                    command[2] = b"(" + raw[-1][0]
                    word = await self._guard(send_in_step(connection, [command]))
                if raw:
                    yield read_chunk(raw)
        finally:
            if awaited:  # whoever left before the end left a reply on its way
                await connection.disconnect()
            await self._redis.connection_pool.release(connection)

    async def entries(self, run: str, numbers: Sequence[int]) -> list[IndexEntry]:
        """Fetch the index entries of these groups, in this order; trimmed ones are left out."""
        if not numbers:
            return []
        pipe = self._raw_pipeline()
        for first, last in _stretches(numbers):
            pipe.execute_command("XRANGE", keys.index(run), f"{first}-0", f"{last}-0")
        replies = await self._guard(pipe.execute())
        found = {entry.number: entry for reply in replies if reply for entry in read_chunk(reply).entries()}
        missing = [number for number in numbers if number not in found]
        if missing:
            aside = await self._guard(self._redis.hmget(keys.set_aside(run), [str(number) for number in missing]))
            for number, raw in zip(missing, aside, strict=True):
                if raw is not None:
                    (found[number],) = read_stored(np.array([number]), [raw]).entries()
        return [found[number] for number in numbers if number in found]

    def _raw_pipeline(self) -> Any:
        pipe = self._redis.pipeline(transaction=False)
        pipe.response_callbacks = {}
        return pipe

    async def strings(self, run: str, first: int, last: int) -> list[EntryStrings]:
        """Fetch the variable part of the index entries `first` to `last`."""
        return [strings async for chunk in self.read_index(run, first - 1, last) for strings in chunk.strings]

    async def numbers_of(self, run: str, group_ids: Sequence[str]) -> list[int | None]:
        """Look up the numbers under which ids are stored; 0 = it was, and its history is trimmed."""
        if not group_ids:
            return []
        found = await self._guard(self._redis.hmget(keys.group_ids(run), list(group_ids)))
        numbers = [None if number is None else int(number) for number in found]
        asked = [
            (k, prompt) for k, name in enumerate(group_ids) if numbers[k] is None if (prompt := default_prompt(name))
        ]
        pipe = self._redis.pipeline(transaction=False)
        for _, (adapter, index) in asked:
            pipe.getbit(keys.prompts_done(run, adapter), index)
        for (k, _), bit in zip(asked, await self._guard(pipe.execute()), strict=True):
            numbers[k] = 0 if bit else None
        return numbers

    async def frames(self, sizes: Mapping[str, int]) -> list[bytes | None]:
        """Fetch payloads by key, given their sizes in bytes; a missing one is None. Replies stay below 8 MiB."""
        # GETs, not MGET: payloads of a cluster lie in different slots.
        pieces = [
            await self._guard(asyncio.to_thread(get_in_step, self._bulk, portion))
            for portion in portions(sizes, sizes.__getitem__)
        ]
        return [frame for piece in pieces for frame in piece]


def _stretches(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Cut numbers into stretches without a gap, each of at most `READ_CHUNK_ENTRIES`: first and last of each."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        first, last = found[-1] if found else (number, number - 2)
        if number == last + 1 and number - first < READ_CHUNK_ENTRIES:
            found[-1] = first, number
        else:
            found.append((number, number))
    return found
