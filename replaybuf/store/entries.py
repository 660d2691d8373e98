"""Entries of the index stream: their content, and decoding many of them at once.

An entry has two fields: `n`, the bytes of one `ENTRY`, and `s`, msgpack of `EntryStrings`. Any other entry was not
written by a publish: it keeps its number, is marked `malformed`, and never stops a reader. So is an entry whose payload
is not of the run: the service would read a key of another run, and delete it.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.kernel.rows.index import ENTRY, Numbers, source_of
from replaybuf.kernel.rows.index import encode_entry as encode_values
from replaybuf.store.keys import payload_prefixes, prompts_done
from replaybuf.wire.group import Group

_SIZE = ENTRY.itemsize
_FIELDS = [b"n", b"s"]
_DEFAULT_ID = re.compile(r"(?:(?P<adapter>.+)/)?p(?P<index>0|[1-9][0-9]{0,9})", re.DOTALL)
_LARGEST_BIT = 2**32 - 1
"""Redis bounds a bitmap at 512 MiB."""


class EntryStrings(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The variable part of an index entry; `lengths` are the tokens of each rollout, int32 bytes.

    `ticket_s`: seconds since the epoch when the ticket was issued; None = unknown.
    """

    group_id: str
    prompt_id: str
    adapter: str
    payload_key: str
    ticket: str | None
    lengths: bytes
    ticket_s: float | None = None


NO_STRINGS = EntryStrings("", "", "", "", None, b"")
"""The strings of a malformed entry."""

encode_strings = msgspec.msgpack.Encoder().encode
_decode_strings = msgspec.msgpack.Decoder(EntryStrings).decode
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError)


class NewEntry(msgspec.Struct, frozen=True, gc=False):
    """The entry of a group that was just stored: the bytes of one `ENTRY` and its strings, and the group's source."""

    values: bytes
    strings: EntryStrings
    source: str = ""


_values_of, _strings_of = operator.attrgetter("values"), operator.attrgetter("strings")

Names = tuple[str, str]
"""The id of a group, and the default id of its ticket's prompt ("" without a ticket)."""


class AppendResult(msgspec.Struct, frozen=True):
    """Outcome of one group of an append; `number` is the index number of the group stored under the id.

    0 = a group was stored, and its history is trimmed. `taken`: the stored group belongs to another prompt than this
    group's ticket. This group is then no repeat and is not stored either. `entry`: index entry that this call wrote.
    """

    group_id: str
    stored: bool
    number: int
    taken: bool = False
    entry: NewEntry | None = None


class PendingGroup(msgspec.Struct, frozen=True):
    """One group ready to be stored: its id, the default id of its ticket's prompt ("" without a ticket), its frame.

    `ticket_s`: seconds since the epoch when its ticket was issued; None = unknown.
    """

    group: Group
    group_id: str
    prompt_key: str
    frame: bytes | memoryview
    crc32c: int
    ticket_s: float | None = None

    @property
    def names(self) -> Names:
        """The two ids under which the group is stored."""
        return self.group_id, self.prompt_key


class IndexEntry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One group of the index stream: its number, its numeric part (`ENTRY` scalar) and its strings.

    Not seen by the garbage collector: a batch may have 16,384 of them, of 8 rollouts each.
    """

    number: int
    values: np.void
    strings: EntryStrings


@dataclasses.dataclass(frozen=True, slots=True)
class IndexChunk:
    """Consecutive entries: numbers int64 [n], values `ENTRY` [n], malformed bool [n], strings [n]."""

    numbers: Numbers
    values: npt.NDArray[Any]
    malformed: npt.NDArray[np.bool_]
    strings: list[EntryStrings]

    def entries(self) -> list[IndexEntry]:
        """List the entries one by one."""
        return list(map(IndexEntry, self.numbers.tolist(), self.values, self.strings))


def read_chunk(raw: Sequence[Any], run: str) -> IndexChunk:
    """Decode a reply of XRANGE for a run, as the parser returns it: pairs of id and a flat list of fields."""
    numbers = _numbers([entry[0] for entry in raw])
    fields = [entry[1] for entry in raw]
    try:
        values, strings = [field[1] for field in fields], [_decode_strings(field[3]) for field in fields]
        names = {(field[0], field[2]) for field in fields}
        whole = names == {(b"n", b"s")} and {*map(len, values)} == {_SIZE} and {*map(len, fields)} == {4}
        own = payload_prefixes(run)
        if whole and all(entry.payload_key.startswith(own) for entry in strings):
            return IndexChunk(numbers, np.frombuffer(b"".join(values), ENTRY), np.zeros(len(raw), bool), strings)
    except (IndexError, *_DECODE_ERRORS):
        pass  # at least one entry is malformed: decode them one by one
    return read_stored(numbers, [b"".join(field[1::2]) if field[::2] == _FIELDS else b"" for field in fields], run)


def build_chunk(numbers: Sequence[int], entries: Sequence[NewEntry]) -> IndexChunk:
    """Build the chunk that a reader of these entries would get."""
    values = np.frombuffer(b"".join(map(_values_of, entries)), ENTRY)
    strings = list(map(_strings_of, entries))
    return IndexChunk(np.array(numbers, np.int64), values, np.zeros(len(entries), bool), strings)


def encode_entry(chunk: IndexChunk, position: int) -> bytes:
    """Encode one entry for the hash of old entries: its two fields joined; empty for a malformed entry."""
    if chunk.malformed[position]:
        return b""
    raw: bytes = chunk.values[position].tobytes() + encode_strings(chunk.strings[position])
    return raw


def read_stored(numbers: Numbers, raw: Sequence[bytes], run: str) -> IndexChunk:
    """Decode entries of a run that `encode_entry` wrote, one by one: some may be malformed."""
    own = payload_prefixes(run)
    values = np.zeros(len(raw), ENTRY)
    malformed = np.zeros(len(raw), bool)
    strings = [NO_STRINGS] * len(raw)
    for position, value in enumerate(raw):
        try:
            decoded = _decode_strings(value[_SIZE:])
        except _DECODE_ERRORS:
            malformed[position] = True
            continue
        if decoded.payload_key.startswith(own):
            strings[position], values[position] = decoded, np.frombuffer(value[:_SIZE], ENTRY)[0]
        else:
            malformed[position] = True
    return IndexChunk(numbers, values, malformed, strings)


def default_prompt(group_id: str) -> tuple[str, int] | None:
    """Return adapter and prompt index of a default group id (`p7`, `adapter/p7`); None for other ids."""
    match = _DEFAULT_ID.fullmatch(group_id)
    if not match or int(match["index"]) > _LARGEST_BIT:
        return None
    return match["adapter"] or "", int(match["index"])


def new_entries(
    groups: Sequence[PendingGroup],
    payload_keys: Sequence[str],
    published: Mapping[str, int],
    now_s: float,
    *,
    admitted: bool,
) -> list[NewEntry]:
    """Make the entries of groups that are to be stored; `admitted`: they were checked."""
    entries: list[NewEntry] = []
    for item, payload_key in zip(groups, payload_keys, strict=True):
        group, size, lengths = item.group, len(item.frame), item.group.lengths
        source = source_of(group)
        values = encode_values(
            group,
            size,
            item.crc32c,
            published.get(group.adapter, 0),
            now_s,
            source=source,
            admitted=admitted,
            lengths=lengths.tolist(),
        )
        raw = lengths.astype("<i4").tobytes()
        names = item.group_id, group.prompt_id, group.adapter, payload_key, group.ticket
        strings = EntryStrings(*names, raw, item.ticket_s)
        entries.append(NewEntry(values, strings, source))
    return entries


def publish_words(
    run: str, groups: Sequence[PendingGroup], entries: Sequence[NewEntry], checked_at: int | None
) -> tuple[list[tuple[str, str]], list[Any]]:
    """List keys and arguments of `rb_publish`; the keys of each group are those where trimmed prompts are marked."""
    marks: list[tuple[str, str]] = []
    words: list[Any] = []
    unmarked = prompts_done(run, "")
    for item, entry in zip(groups, entries, strict=True):
        own = default_prompt(item.group_id)
        key = item.prompt_key
        of_ticket = own if key == item.group_id else default_prompt(key) if key else None
        marks.append(
            (
                prompts_done(run, own[0]) if own else unmarked,
                prompts_done(run, of_ticket[0]) if of_ticket else unmarked,
            )
        )
        words += [item.group_id, item.prompt_key, entry.values, encode_strings(entry.strings)]
        words += [own[1] if own else "", of_ticket[1] if of_ticket else ""]
    return marks, words if checked_at is None else [*words, checked_at]


def _numbers(ids: list[bytes]) -> Numbers:
    first, last = (int(entry_id.partition(b"-")[0]) for entry_id in (ids[0], ids[-1]))
    if last - first + 1 == len(ids):  # ids ascend without gaps: no need to parse each
        return np.arange(first, last + 1, dtype=np.int64)
    return np.array([int(entry_id.partition(b"-")[0]) for entry_id in ids], np.int64)
