"""Sections: the pieces of which a copy of a run consists, in a file and on the way to another Redis.

A copy is a sequence of sections. `MOMENT` begins the keys of the run anew: those of an earlier moment no longer count.
Payloads count whenever they came.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from replaybuf.errors import counted
from replaybuf.store.copying import Moment, StreamEntry

Stream: TypeAlias = Literal["index", "ledger", "candidates", "evaluations"]
Fields: TypeAlias = Literal["group_ids", "old_entries", "samples"]

FORMAT = 2
_ENTRY_ID = re.compile(rb"[0-9]+-[0-9]+")


class MomentSection(msgspec.Struct, frozen=True, tag="moment"):
    """The keys that change in place."""

    moment: Moment


class StreamSection(msgspec.Struct, frozen=True, tag="stream"):
    """Consecutive entries of a stream."""

    stream: Stream
    entries: list[StreamEntry]

    def __post_init__(self) -> None:
        for number, fields in self.entries:
            if not _ENTRY_ID.fullmatch(number) or not fields or len(fields) % 2:
                raise ValueError(
                    f"the stream {self.stream} has the entry {number[:40]!r} of {counted(len(fields), 'word')}"
                )


class FieldsSection(msgspec.Struct, frozen=True, tag="fields"):
    """Fields of a hash."""

    name: Fields
    fields: dict[bytes, bytes]


class PromptsSection(msgspec.Struct, frozen=True, tag="prompts"):
    """Bitmap of an adapter's prompts whose group is trimmed."""

    adapter: str
    bits: bytes


class PayloadsSection(msgspec.Struct, frozen=True, tag="payloads"):
    """Frames by the names of payloads within the run, as `keys.payload_name` returns them."""

    frames: dict[str, bytes]


Section: TypeAlias = MomentSection | StreamSection | FieldsSection | PromptsSection | PayloadsSection

encode_section = msgspec.msgpack.Encoder().encode
decode_section: Any = msgspec.msgpack.Decoder(Section).decode


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy holds. `entries`, `stored`: numbers of its newest ledger entry and group; `taken_at`: Unix time.

    `missing`: payloads that the run itself lacked.
    """

    run: str
    release: str
    taken_at: float
    entries: int
    stored: int
    payloads: int
    payload_bytes: int
    missing: int


class Sink(Protocol):
    """Takes the sections of a copy in order."""

    async def add(self, section: Section) -> None:
        """Take one section."""
