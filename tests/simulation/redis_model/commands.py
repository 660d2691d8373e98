"""Commands of a modelled Redis, with the replies of a RESP3 client. `COMMANDS` is their table.

Only what replaybuf sends is here: another command raises `NoModel`, which names it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from tests.simulation.redis_model.values import SortedSet, Stream, Values

Words = Sequence[bytes]
LAST = (2**64 - 1, 2**64 - 1)


class NoModel(NotImplementedError):
    """A command, or an option of one, has no model yet: add it to `commands.py` and to its contract test."""


OK = b"OK"


# ---------------------------------------------------------------------- keys and lifetimes


def ping(values: Values, words: Words) -> Any:
    return b"PONG"


def delete(values: Values, words: Words) -> int:
    return sum(values.delete(key) for key in words)


def exists(values: Values, words: Words) -> int:
    return sum(values.peek(key) is not None for key in words)


def pttl(values: Values, words: Words) -> int:
    if values.peek(words[0]) is None:
        return -2
    end_ms = values.end_of(words[0])
    return -1 if end_ms is None else end_ms - values.now_ms()


def ttl(values: Values, words: Words) -> int:
    left_ms = pttl(values, words)
    return left_ms if left_ms < 0 else (left_ms + 500) // 1000


def pexpire(values: Values, words: Words) -> int:
    if values.peek(words[0]) is None:
        return 0
    values.touch(words[0])
    values.set_end(words[0], values.now_ms() + int(words[1]))
    return 1


def expire(values: Values, words: Words) -> int:
    return pexpire(values, [words[0], b"%d" % (1000 * int(words[1]))])


def persist(values: Values, words: Words) -> int:
    if values.peek(words[0]) is None or values.end_of(words[0]) is None:
        return 0
    values.touch(words[0])
    values.set_end(words[0], None)
    return 1


def rename(values: Values, words: Words) -> bytes:
    value = values.peek(words[0])
    if value is None:
        raise ResponseError("no such key")
    end_ms = values.end_of(words[0])
    values.delete(words[0])
    values.put(words[1], value, end_ms)
    return OK


def dbsize(values: Values, words: Words) -> int:
    return values.count()


def time(values: Values, words: Words) -> list[bytes]:
    now_ms = values.now_ms()
    return [b"%d" % (now_ms // 1000), b"%d" % (now_ms % 1000 * 1000)]


# ---------------------------------------------------------------------- strings


def get(values: Values, words: Words) -> Any:
    return values.get(words[0], bytes)


def mget(values: Values, words: Words) -> list[Any]:
    found = [values.peek(key) for key in words]
    return [value if isinstance(value, bytes) else None for value in found]


def set_(values: Values, words: Words) -> Any:
    key, value, options = words[0], words[1], list(words[2:])
    end_ms, flags = None, set()
    while options:
        option = options.pop(0).upper()
        if option == b"EX":
            end_ms = values.now_ms() + 1000 * int(options.pop(0))
        elif option == b"PX":
            end_ms = values.now_ms() + int(options.pop(0))
        elif option in (b"NX", b"XX", b"GET"):
            flags.add(option)
        else:
            raise NoModel(f"SET with {option.decode()}")
    before = get(values, [key]) if b"GET" in flags else None
    present = values.peek(key) is not None
    refused = b"NX" in flags if present else b"XX" in flags
    if not refused:
        values.put(key, value, end_ms)
    return before if b"GET" in flags or refused else OK


def incr(values: Values, words: Words) -> int:
    return incrby(values, [words[0], b"1"])


def incrby(values: Values, words: Words) -> int:
    number = int(values.get(words[0], bytes) or 0) + int(words[1])
    values.keep_end(words[0], b"%d" % number)
    return number


def getrange(values: Values, words: Words) -> bytes:
    value: bytes = values.get(words[0], bytes) or b""
    first, last = int(words[1]), int(words[2])
    if first < 0 or last < 0:
        raise NoModel("GETRANGE from the end")
    return value[first : last + 1]


def getbit(values: Values, words: Words) -> int:
    value, at = values.get(words[0], bytes) or b"", int(words[1])
    return value[at // 8] >> (7 - at % 8) & 1 if at // 8 < len(value) else 0


def setbit(values: Values, words: Words) -> int:
    at, before = int(words[1]), getbit(values, words)
    raw = bytearray((values.get(words[0], bytes) or b"").ljust(at // 8 + 1, b"\0"))
    mask = 1 << (7 - at % 8)
    raw[at // 8] = raw[at // 8] | mask if words[2] == b"1" else raw[at // 8] & ~mask
    values.keep_end(words[0], bytes(raw))
    return before


# ---------------------------------------------------------------------- hashes


def _hash(values: Values, key: bytes) -> dict[bytes, bytes]:
    return values.get(key, dict) or {}


def hset(values: Values, words: Words) -> int:
    if len(words) % 2 == 0 or len(words) < 3:
        raise ResponseError("wrong number of arguments for 'hset' command")
    fields = values.write(words[0], dict)
    before = len(fields)
    fields.update(zip(words[1::2], words[2::2], strict=True))
    return len(fields) - before


def hget(values: Values, words: Words) -> Any:
    return _hash(values, words[0]).get(words[1])


def hmget(values: Values, words: Words) -> list[Any]:
    fields = _hash(values, words[0])
    return [fields.get(name) for name in words[1:]]


def hgetall(values: Values, words: Words) -> dict[bytes, bytes]:
    return dict(_hash(values, words[0]))


def hscan(values: Values, words: Words) -> list[Any]:
    """Return all fields at once, as Redis does for a small hash."""
    return [b"0", [part for pair in _hash(values, words[0]).items() for part in pair]]


def hkeys(values: Values, words: Words) -> list[bytes]:
    return list(_hash(values, words[0]))


def hvals(values: Values, words: Words) -> list[bytes]:
    return list(_hash(values, words[0]).values())


def hlen(values: Values, words: Words) -> int:
    return len(_hash(values, words[0]))


def hstrlen(values: Values, words: Words) -> int:
    return len(_hash(values, words[0]).get(words[1], b""))


def hdel(values: Values, words: Words) -> int:
    if values.get(words[0], dict) is None:
        return 0
    fields = values.write(words[0], dict)
    removed = sum(fields.pop(name, None) is not None for name in words[1:])
    values.drop_empty(words[0])
    return removed


def hincrby(values: Values, words: Words) -> int:
    fields = values.write(words[0], dict)
    number = int(fields.get(words[1], b"0")) + int(words[2])
    fields[words[1]] = b"%d" % number
    return number


# ---------------------------------------------------------------------- sets


def sadd(values: Values, words: Words) -> int:
    members = values.write(words[0], set)
    before = len(members)
    members.update(words[1:])
    return len(members) - before


def srem(values: Values, words: Words) -> int:
    if values.get(words[0], set) is None:
        return 0
    members = values.write(words[0], set)
    before = len(members)
    members.difference_update(words[1:])
    removed = before - len(members)
    values.drop_empty(words[0])
    return removed


def smembers(values: Values, words: Words) -> list[bytes]:
    return sorted(values.get(words[0], set) or ())


def sismember(values: Values, words: Words) -> int:
    return int(words[1] in (values.get(words[0], set) or ()))


def zadd(values: Values, words: Words) -> int:
    members = values.write(words[0], SortedSet)
    before = len(members)
    members.update({member: float(score) for score, member in zip(words[1::2], words[2::2], strict=True)})
    return len(members) - before


def zrem(values: Values, words: Words) -> int:
    if values.get(words[0], SortedSet) is None:
        return 0
    members = values.write(words[0], SortedSet)
    removed = sum(members.pop(member, None) is not None for member in words[1:])
    values.drop_empty(words[0])
    return removed


def zcard(values: Values, words: Words) -> int:
    return len(values.get(words[0], SortedSet) or ())


def zrange(values: Values, words: Words) -> list[list[Any]]:
    if [word.upper() for word in words[1:]] != [b"0", b"-1", b"WITHSCORES"]:
        raise NoModel(f"ZRANGE with {list(words[1:])}")
    members = values.get(words[0], SortedSet) or {}
    return [[member, members[member]] for member in sorted(members, key=lambda member: (members[member], member))]


def zrangebyscore(values: Values, words: Words) -> list[bytes]:
    """Return members from the lowest score on, up to one: other first scores have no model."""
    if words[1] != b"-inf" or words[3].upper() != b"LIMIT":
        raise NoModel(f"ZRANGEBYSCORE with {list(words[1:])}")
    members, first, count = values.get(words[0], SortedSet) or {}, int(words[4]), int(words[5])
    low = [member for member in members if members[member] <= float(words[2])]
    return sorted(low, key=lambda member: (members[member], member))[first : first + count]


# ---------------------------------------------------------------------- streams


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
    found = {}
    for key, after in zip(names[:half], names[half:], strict=True):
        entries = _range(values, key, b"(" + after, b"+")[:count]
        if entries:
            found[key] = _reply(entries)
    return found or None


GROWING = frozenset(
    [b"SET", b"INCR", b"INCRBY", b"SETBIT", b"HSET", b"HINCRBY", b"SADD", b"ZADD", b"XADD"],
)
"""Commands that a full server refuses."""
COMMANDS: dict[bytes, Callable[[Values, Words], Any]] = {
    b"PING": ping,
    b"DEL": delete,
    b"UNLINK": delete,
    b"EXISTS": exists,
    b"TTL": ttl,
    b"PTTL": pttl,
    b"EXPIRE": expire,
    b"PEXPIRE": pexpire,
    b"PERSIST": persist,
    b"RENAME": rename,
    b"DBSIZE": dbsize,
    b"TIME": time,
    b"GET": get,
    b"MGET": mget,
    b"SET": set_,
    b"INCR": incr,
    b"INCRBY": incrby,
    b"GETRANGE": getrange,
    b"GETBIT": getbit,
    b"SETBIT": setbit,
    b"HSET": hset,
    b"HGET": hget,
    b"HMGET": hmget,
    b"HGETALL": hgetall,
    b"HSCAN": hscan,
    b"HKEYS": hkeys,
    b"HVALS": hvals,
    b"HLEN": hlen,
    b"HSTRLEN": hstrlen,
    b"HDEL": hdel,
    b"HINCRBY": hincrby,
    b"SADD": sadd,
    b"SREM": srem,
    b"SMEMBERS": smembers,
    b"SISMEMBER": sismember,
    b"ZADD": zadd,
    b"ZREM": zrem,
    b"ZCARD": zcard,
    b"ZRANGE": zrange,
    b"ZRANGEBYSCORE": zrangebyscore,
    b"XRANGE": xrange,
    b"XREVRANGE": xrevrange,
    b"XLEN": xlen,
    b"XADD": xadd,
    b"XTRIM": xtrim,
    b"XREAD": read_new,
}
