"""Commands of a modelled Redis for streams. `STREAM_COMMANDS` is their table."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from tests.simulation.redis_model.values import NoModel, Stream, Values, Words

LAST = (2**64 - 1, 2**64 - 1)


def _read_id(word: bytes, sequence: int) -> tuple[int, int]:
    """Read an id; `sequence`: of an id that has only its first part."""
    first, _, second = word.partition(b"-")
    return int(first), int(second) if second else sequence


def _write_id(entry: tuple[int, int]) -> bytes:
    return b"%d-%d" % entry


def _reply(entries: Sequence[tuple[tuple[int, int], list[bytes]]]) -> list[Any]:
    return [[_write_id(entry), list(fields)] for entry, fields in entries]


def _bound(word: bytes, *, first: bool) -> tuple[int, int]:
    if word == b"-":
        return (0, 0)
    if word == b"+":
        return LAST
    if word.startswith(b"("):
        entry = _read_id(word[1:], 0 if first else LAST[1])
        return (entry[0], entry[1] + 1) if first else _before(entry)
    return _read_id(word, 0 if first else LAST[1])


def _before(entry: tuple[int, int]) -> tuple[int, int]:
    return (entry[0], entry[1] - 1) if entry[1] else (entry[0] - 1, LAST[1])


def _range(values: Values, key: bytes, first: bytes, last: bytes) -> list[tuple[tuple[int, int], list[bytes]]]:
    stream = values.get(key, Stream) or Stream()
    start = bisect.bisect_left(stream, _bound(first, first=True), key=lambda entry: entry[0])
    end = bisect.bisect_right(stream, _bound(last, first=False), key=lambda entry: entry[0])
    return stream[start:end]


def _count(words: Words) -> int | None:
    if not words:
        return None
    if words[0].upper() != b"COUNT" or len(words) != 2:
        raise NoModel(f"a range with {list(words)}")
    return int(words[1])


def xrange(values: Values, words: Words) -> list[Any]:
    return _reply(_range(values, words[0], words[1], words[2])[: _count(words[3:])])


def xrevrange(values: Values, words: Words) -> list[Any]:
    return _reply(_range(values, words[0], words[2], words[1])[::-1][: _count(words[3:])])


def xlen(values: Values, words: Words) -> int:
    return len(values.get(words[0], Stream) or ())


def xadd(values: Values, words: Words) -> bytes:
    key, rest, longest = words[0], list(words[1:]), None
    if rest[0].upper() == b"MAXLEN":
        longest, rest = int(rest[1]), rest[2:]
    stream = values.write(key, Stream)
    if rest[0] == b"*":
        now_ms = values.now_ms()
        entry = (now_ms, 0) if now_ms > stream.last[0] else (stream.last[0], stream.last[1] + 1)
    else:
        entry = _read_id(rest[0], 0)
    if entry <= stream.last:
        values.commit()
        message = "The ID specified in XADD is equal or smaller than the target stream top item"
        raise ResponseError(message)
    stream.append((entry, list(rest[1:])))
    stream.last = entry
    if longest is not None:
        del stream[: max(0, len(stream) - longest)]
    return _write_id(entry)


def xtrim(values: Values, words: Words) -> int:
    if words[1].upper() != b"MINID":
        raise NoModel(f"XTRIM with {words[1].decode()}")
    if values.get(words[0], Stream) is None:
        return 0
    stream = values.write(words[0], Stream)
    end = bisect.bisect_left(stream, _read_id(words[2], 0), key=lambda entry: entry[0])
    del stream[:end]
    return end


def read_new(values: Values, words: Words) -> dict[bytes, Any] | None:
    """Answer XREAD with what is there now."""
    options, at, count = [word.upper() for word in words], 0, None
    while options[at] != b"STREAMS":
        if options[at] not in (b"COUNT", b"BLOCK"):
            raise NoModel(f"XREAD with {options[at].decode()}")
        count = int(words[at + 1]) if options[at] == b"COUNT" else count
        at += 2
    names = words[at + 1 :]
    half = len(names) // 2
    streams = {}
    for key, after in zip(names[:half], names[half:], strict=True):
        entries = _range(values, key, b"(" + after, b"+")[:count]
        if entries:
            streams[key] = _reply(entries)
    return streams or None


STREAM_COMMANDS: dict[bytes, Callable[[Values, Words], Any]] = {
    b"XRANGE": xrange,
    b"XREVRANGE": xrevrange,
    b"XLEN": xlen,
    b"XADD": xadd,
    b"XTRIM": xtrim,
    b"XREAD": read_new,
}
