"""Commands of a modelled Redis, with the replies of a RESP3 client. `COMMANDS` is their table.

Only what replaybuf sends is here: another command raises `NoModel`, which names it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from redis.exceptions import ResponseError

from tests.simulation.redis_model.stream_commands import STREAM_COMMANDS
from tests.simulation.redis_model.values import NoModel, SortedSet, Values, Words

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


def zscore(values: Values, words: Words) -> float | None:
    return (values.get(words[0], SortedSet) or {}).get(words[1])


def zrange(values: Values, words: Words) -> list[list[Any]]:
    if [word.upper() for word in words[1:]] != [b"0", b"-1", b"WITHSCORES"]:
        raise NoModel(f"ZRANGE with {list(words[1:])}")
    members = values.get(words[0], SortedSet) or {}
    return [[member, members[member]] for member in sorted(members, key=lambda member: (members[member], member))]


def zrangebyscore(values: Values, words: Words) -> list[bytes]:
    """Return members from the lowest score on, up to one or below it: other first scores have no model."""
    if words[1] != b"-inf" or words[3].upper() != b"LIMIT":
        raise NoModel(f"ZRANGEBYSCORE with {list(words[1:])}")
    members, first, count = values.get(words[0], SortedSet) or {}, int(words[4]), int(words[5])
    within, last = (operator.lt, words[2][1:]) if words[2].startswith(b"(") else (operator.le, words[2])
    low = [member for member in members if within(members[member], float(last))]
    return sorted(low, key=lambda member: (members[member], member))[first : first + count]


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
    b"ZSCORE": zscore,
    b"ZRANGE": zrange,
    b"ZRANGEBYSCORE": zrangebyscore,
} | STREAM_COMMANDS
