"""The model of Redis answers as a real Valkey does: every command and function that replaybuf uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from replaybuf.store import EmbeddedServer, keys
from replaybuf.store.redis.server import LIBRARY_CODE
from tests.simulation.plan import Plan
from tests.simulation.redis_model.commands import COMMANDS, GROWING
from tests.simulation.redis_model.link import Link
from tests.simulation.redis_model.server import RedisServer
from tests.simulation.redis_model.values import NoModel
from tests.simulation.world import World

RUN = "contract"
GUARDED = keys.guarded(RUN)
LEAD = keys.lead(RUN)
FENCE = keys.fence(RUN)
NEWEST = "1:here"
"""The first fencing token."""

STRINGS = """
SET s value|GET s|GET missing|MGET s missing h|SET s other XX|SET absent value XX|GET absent|EXISTS s absent
SET s new NX|SET s new NX GET|SET u one NX|GET u|SET v one NX GET|SET h x GET
INCR n|INCR n|INCRBY n 5|INCRBY n -2|INCRBY m 3|GETRANGE s 1 3|GETRANGE s 0 99|GETRANGE missing 0 3
SETBIT b 9 1|GETBIT b 9|GETBIT b 8|GETBIT b 999|GET b|SETBIT b 9 0|GET b
RENAME s t|GET s|GET t|RENAME s t|UNLINK t absent|DEL n|EXISTS t n|PING
"""
LIFETIMES = """
SET s value EX 100|TTL s|PERSIST s|TTL s|PERSIST s|TTL absent|PERSIST absent|EXPIRE s 50|TTL s|PEXPIRE s 70000
TTL s|SETBIT s 3 1|TTL s|SET s value|TTL s|PTTL s|PTTL absent|EXPIRE absent 5|SET t value PX 90000|RENAME t u
TTL u|DBSIZE
"""
HASHES = """
HSCAN absent 0|HSET h a 1 b 2|HSET h a 3 c 4|HSCAN h 0 COUNT 100
HGET h a|HGET h z|HGET absent a|HMGET h a z b|HMGET absent a|HGETALL h
HGETALL absent|HKEYS h|HVALS h|HLEN h|HLEN absent|HDEL h a z|HDEL h b c|EXISTS h|HDEL absent a|HINCRBY h n 5
HINCRBY h n -7|HSTRLEN h n|HSTRLEN no n|HGETALL h|GET h|HGET absent x|XLEN h|SADD h x|ZADD h 1 x|INCR h
"""
SETS = """
SADD s a b|SADD s b c|SISMEMBER s a|SISMEMBER s z|SMEMBERS s|SMEMBERS absent|SREM s a z|SREM s b c|EXISTS s
SREM absent a|ZADD z 2 b 1 a|ZADD z 2 a 3 c|ZCARD z|ZRANGE z 0 -1 WITHSCORES|ZREM z a x|ZRANGE z 0 -1 WITHSCORES
ZREM z b c|EXISTS z|ZCARD absent|ZRANGE absent 0 -1 WITHSCORES|ZREM absent a|ZADD z 1800000003190 t
ZRANGE z 0 -1 WITHSCORES|ZADD q 2 b 1 a 3 c|ZRANGEBYSCORE q -inf 2 LIMIT 0 10|ZRANGEBYSCORE q -inf +inf LIMIT 0 2
ZRANGEBYSCORE q -inf 0 LIMIT 0 10|ZRANGEBYSCORE absent -inf 2 LIMIT 0 10|ZRANGEBYSCORE q -inf (2 LIMIT 0 10
ZADD q 2.5 d|ZSCORE q d|ZSCORE q b|ZSCORE q x|ZSCORE absent a|ZRANGEBYSCORE q -inf (2.5 LIMIT 0 10
"""
STREAMS = """
XADD x 1-0 f one|XADD x 2-0 f two g more|XADD x 2-0 f again|XADD x 5-0 f five|XLEN x|XLEN absent|XRANGE x - +
XRANGE x 2-0 +|XRANGE x (2-0 +|XRANGE x - (5-0|XRANGE x 2 2|XRANGE x - + COUNT 2|XRANGE absent - +
XREVRANGE x + - COUNT 1|XREVRANGE x 4-0 - COUNT 2|XREVRANGE x + -|XREVRANGE x (5-0 -|XTRIM x MINID 2-0
XRANGE x - +|XTRIM absent MINID 2-0|XADD x 4-0 f four|XREAD COUNT 1 STREAMS x absent 1-0 0-0|XREAD STREAMS x 5-0
XREAD STREAMS x absent 0-0 0-0|XTRIM x MINID 9-0|XLEN x|EXISTS x|XADD x 5-0 f low|XADD x 6-0 f six
XADD m MAXLEN 2 1-0 f a|XADD m MAXLEN 2 2-0 f b|XADD m MAXLEN 2 3-0 f c|XRANGE m - +|GET x
"""
TRANSACTIONS = """
EXEC|MULTI|SET s value|GET s|GET absent|HGETALL h|EXEC|GET s|MULTI|EXEC|EXEC
"""
SECTIONS = {
    "transactions": TRANSACTIONS,
    "strings": STRINGS,
    "lifetimes": LIFETIMES,
    "hashes": HASHES,
    "sets": SETS,
    "streams": STREAMS,
}
APART = {b"TIME", b"DBSIZE"}
"""Commands whose reply depends on the server: the clock, and the keys of other tests."""


@pytest.fixture
def model() -> Iterator[RedisServer]:
    world = World(Plan(1))
    yield RedisServer(world, fsync="always")
    world.loop.discard()


class Both:
    """A real server and the model, which get the same commands."""

    def __init__(self, server: EmbeddedServer, model: RedisServer) -> None:
        self._client = redis.Redis.from_url(server.url, protocol=3, legacy_responses=False)
        self._connection: Any = self._client.connection_pool.get_connection()
        self.model, self._link = model, Link(model)
        self.call("FLUSHALL", modelled=False)

    def call(self, *words: Any, modelled: bool = True) -> tuple[Any, Any]:
        """Return the replies of the real server and of the model."""
        self._connection.send_command(*words)
        try:
            real = self._connection.read_response()
        except ResponseError as error:
            real = error
        return real, self.model.execute(self._link, [_raw(word) for word in words]) if modelled else None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _lines(section: str) -> list[str]:
    return [line for line in SECTIONS[section].replace("\n", "|").split("|") if line]


def _raw(word: Any) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()


def _comparable(reply: Any) -> Any:
    """Keep the code of an error, and of a time to live what no test can change."""
    if isinstance(reply, ResponseError):
        return "error", re.sub(r"^(ERR |WRONGTYPE ).*", r"\1", str(reply)) if "WRONGTYPE" in str(reply) else "ERR"
    if isinstance(reply, list):
        return [_comparable(part) for part in reply]
    return reply


@pytest.fixture
def both(server: EmbeddedServer, model: RedisServer) -> Iterator[Both]:
    pair = Both(server, model)
    yield pair
    pair.close()


@pytest.mark.parametrize("section", SECTIONS)
def test_commands_answer_as_on_a_real_server(both: Both, section: str) -> None:
    """Also their errors, replies about missing keys, and what is left of an emptied value."""
    for line in _lines(section):
        real, modelled = both.call(*line.split())
        if line.startswith("SMEMBERS"):  # a set has no order
            real = sorted(real)
        if line.split()[0].encode() not in APART:
            assert _comparable(modelled) == _comparable(real), line


def test_every_modelled_command_has_a_contract() -> None:
    """A command that no section calls could answer anything."""
    called = {
        line.split()[0].encode() for text in SECTIONS.values() for line in text.replace("\n", "|").split("|") if line
    }
    assert COMMANDS.keys() - APART <= called


def guard(token: str = NEWEST, **known: object) -> list[object]:
    ends = {"entry": 0, "entry_key": "", "group": 0, "payload_key": "", "incarnation": 0} | known
    return [token, *ends.values(), "1"]


def function(name: str, names: list[str], *arguments: object, token: str = NEWEST, **known: object) -> list[object]:
    first = [*GUARDED, *names]
    return ["FCALL", name, len(first), *first, *guard(token, **known), *arguments]


def plain(name: str, names: list[str], *arguments: object) -> list[object]:
    return ["FCALL", name, len(names), *names, *arguments]


PAYLOADS = [f"rb:p:{{{RUN}:p{n}}}:nonce" for n in range(3)]
DONE, SNAP, OLD = keys.prompts_done(RUN, ""), keys.snapshot(RUN), keys.old_entries(RUN)
SPILL, TICKETS, MARK = keys.spill(RUN), keys.tickets(RUN), keys.deleted(RUN)
LATE, ATTEMPT = f"{PAYLOADS[0]}:late", f"{PAYLOADS[0]}:late:nonce"


def group(number: int, prompt: str = "") -> list[object]:
    return [f"p{number}", prompt, b"numbers", b"strings " + PAYLOADS[number].encode(), number, ""]


NOTED = [keys.attempts(RUN, 7), keys.written(RUN, 7)]
LISTED = [MARK, keys.RUNS, keys.DELETING, keys.incarnation(RUN)]
WRITES = ["SET", 1, b"value", "HSET", 2, "f", "v"]
LONG_MS = 10**9
"""So long that the time between two replies does not count."""
SNAPSHOT = b"rbs4" + b"%020d" % 3
CALLS: list[list[object]] = [
    function("rb_lead", [LEAD], "here", 60000, "0", token=""),
    function("rb_lead", [LEAD], "there", 50000, "0", token=""),
    function("rb_lead", [LEAD], "here", 60000, "0", token=""),
    function("rb_ends", []),
    function("rb_ends", [], entry=1),
    function("rb_ends", [], token="0:older"),
    *(["SET", key, b"frame", "EX", 3600] for key in PAYLOADS[:2]),
    function("rb_publish", [MARK, DONE, DONE, PAYLOADS[0], DONE, DONE, PAYLOADS[1]], *group(0), *group(1, "p1")),
    ["SET", PAYLOADS[2], b"frame", "EX", 3600],
    function("rb_publish", [MARK, DONE, DONE, PAYLOADS[2]], "p0", "", b"n", b"s", "", "", token=""),
    function("rb_publish", [MARK, DONE, DONE, PAYLOADS[2]], *group(2)),
    plain("rb_note", NOTED, 0, 0, "payload"),
    plain("rb_note", NOTED, 2, 0, "payload"),
    plain("rb_take_back", [*NOTED, "payload"], 2),
    plain("rb_take_back", [*NOTED, "other", "payload"], 1),
    plain("rb_take_back", [*NOTED, "payload"], 1),
    plain("rb_note", NOTED, 0, 0, "payload", "other"),
    ["ZSCORE", NOTED[0], "other"],
    plain("rb_take_back", [*NOTED, "payload", "other"], 2),
    plain("rb_note", NOTED, 0, 0, "payload"),
    plain("rb_correct_written", NOTED[1:], 2),
    plain("rb_correct_written", NOTED[1:], -1),
    function("rb_begin_round", []),
    function("rb_publish_stored", [MARK, DONE, DONE, keys.buckets(RUN)], 0, 1, 7, 3, 1, "0", *group(0)),
    function("rb_publish_stored", [MARK, DONE, DONE, keys.buckets(RUN)], 0, 1, 7, 4, 2, "0", *group(0)),
    function("rb_publish_stored", [MARK, DONE, DONE, keys.buckets(RUN)], -1, 1, 7, 3, 1, "0", *group(0)),
    function("rb_append", [keys.candidates(RUN)], 1, b"first", 101),
    function("rb_append", [keys.candidates(RUN)], 1, b"first", 101),
    function("rb_append", [keys.candidates(RUN)], 1, b"other", 101),
    function("rb_append", [keys.candidates(RUN)], 3, b"gap", 103),
    function("rb_append", [keys.candidates(RUN)], 2, b"batch", 102, b"candidates"),
    function("rb_append", [keys.candidates(RUN)], 3, b"fenced", 103, token="0:older"),
    function("rb_append", [keys.candidates(RUN)], 3, b"no token", 103, token=""),
    ["SET", ATTEMPT, b"late", "EX", 3600],
    function("rb_columns", [ATTEMPT, LATE], 3, b"columns", 103, "late"),
    function("rb_columns", [ATTEMPT, LATE], 3, b"columns", 103, "late"),
    function("rb_columns", [ATTEMPT, LATE], 4, b"columns", 104, "late"),
    plain("rb_replace_column", [LATE], b"other", b"never"),
    plain("rb_replace_column", [LATE], b"late", b"later"),
    plain("rb_read_tickets", [TICKETS]),
    function("rb_tickets", [TICKETS], 1, "gone", 2, LONG_MS, "t0", 0, "t1", "issued", 2, "next:", 2),
    plain("rb_read_tickets", [TICKETS]),
    function("rb_count", [MARK], "rejected:broken", 3, "issued", 1),
    function("rb_confirm", []),
    function("rb_spill", [SPILL, PAYLOADS[0], PAYLOADS[2]], "file:///spill", "folder", 1, b"stub", 70, 9, b"stub", 8),
    function("rb_spill", [SPILL, PAYLOADS[1]], "file:///spill", "other", 2, b"stub", 70),
    function("rb_forget", [SPILL], 1, 2),
    function("rb_free", [PAYLOADS[1]], 3),
    function("rb_free", [], ""),
    function("rb_done", [DONE], "", "p", 0, 1, 1, 9),
    function("rb_publish", [MARK, DONE, DONE, PAYLOADS[0]], *group(0)),
    function("rb_snapshot", [SNAP, OLD, keys.candidates(RUN)], SNAPSHOT, 2, 2, 1, b"kept"),
    function("rb_snapshot", [SNAP, OLD, keys.candidates(RUN)], b"rbs4" + b"%020d" % 2, 2, 2),
    function("rb_drop", [OLD], 1),
    function("rb_evaluate", [MARK, keys.evaluations(RUN)], 2, b"result"),
    function("rb_sample", [keys.samples(RUN)], 1, 2, b"first", 9000),
    function("rb_sample", [keys.samples(RUN)], 2, 3, b"second", 9000),
    function("rb_sample", [keys.samples(RUN)], 1, 4, b"again", 9000),
    function("rb_sample", [keys.samples(RUN)], 2, 5, b"oldest goes", 1),
    function("rb_cursor", [keys.cursors(RUN)], "reader", b"position"),
    function("rb_cursor", [keys.cursors(RUN)], "reader", ""),
    function("rb_ends", [], entry=9, group=9, payload_key="lost"),
    function("rb_ends", [], entry=3, entry_key="103"),
    function("rb_ends", [], entry=3, entry_key="999"),
    function("rb_ends", [], entry=2, entry_key="102"),
    function("rb_ends", [], entry=2, entry_key="999"),
    plain("rb_accept_loss", [*GUARDED, LEAD], 3, 2, 0, 9, 9, b"loss", 104),
    plain("rb_accept_loss", [*GUARDED, LEAD], 1, 2, 0, 9, 9, b"loss", 104),
    function("rb_ends", [], entry=1),
    function("rb_lead", [LEAD], "there", 50000, "1", token=""),
    plain("rb_hold", [LEAD, keys.counts(RUN), FENCE, keys.counts(RUN), LEAD, FENCE], "there", 40000, "", ""),
    plain("rb_hold", [LEAD, keys.counts(RUN), FENCE], "here", 60000, ""),
    plain("rb_hold", [LEAD, keys.counts(RUN), FENCE], "here", 60000, "2 2 there"),
    plain("rb_hold", [LEAD, keys.counts(RUN), FENCE], "there", 40000, "3 2 there"),
    plain("rb_hold", [LEAD, keys.counts(RUN), FENCE], "there", 40000, "2 2 there"),
    function("rb_hand_over", [LEAD], "here", 50000, token="1:here"),
    function("rb_hand_over", [LEAD], "here", 50000, token=""),
    function("rb_hand_over", [LEAD], "here", 50000, token="2:there"),
    function("rb_lead", [LEAD], "there", 50000, "0", token=""),
    function("rb_lead", [LEAD], "here", 50000, "0", token=""),
    function("rb_hand_over", [LEAD], "there", 50000, token="3:here"),
    plain("rb_announce", [keys.SERVERS], "here", "1.0", 60000, 1000),
    plain("rb_announce", [keys.SERVERS], "there", "1.0", 60000, 1000),
    ["HSET", keys.SERVERS, "silent", "1 2 1.0", "strange", "value"],
    plain("rb_announce", [keys.SERVERS], "here", "1.1", 60000, 1000),
    ["HKEYS", keys.SERVERS],
    plain("rb_resign", [LEAD], "there"),
    function("rb_delete", [MARK], "deleting:1", token="4:there"),
    plain("rb_erase", [MARK, PAYLOADS[2]], "deleting:2"),
    plain("rb_erase", [MARK, PAYLOADS[2]], "deleting:1"),
    plain(
        "rb_erase_last",
        [MARK, keys.RUNS, keys.DELETING, keys.incarnation(RUN), *keys.all_of(RUN, [""])],
        "deleting:1",
        RUN,
        86400,
    ),
    ["SET", MARK, "restoring:1"],
    plain("rb_abandon", [MARK, LEAD], "restoring:2", "deleting:3"),
    plain("rb_abandon", [MARK, LEAD], "restoring:1", "deleting:3"),
    ["UNLINK", MARK],
    function("rb_lead", [LEAD], "restorer", 60000, "1", token=""),
    plain(
        "rb_restore", [LEAD, keys.RUNS, MARK, "a", "b"], "restorer", 60000, RUN, "SET", 1, b"value", "HSET", 2, "f", "v"
    ),
    plain("rb_restore", [LEAD, keys.RUNS, MARK, "a"], "other", 60000, RUN, "SET", 1, b"value"),
    plain("rb_missing", [LEAD]),
]


def test_functions_answer_as_on_a_real_server(both: Both) -> None:
    """The code is the same: what may differ are the commands inside, and how Lua sees their replies."""
    both.call("FUNCTION", "LOAD", "REPLACE", LIBRARY_CODE)
    for words in CALLS:
        real, modelled = both.call(*words)
        if words[1] == "rb_hold":  # each server has a name
            real, modelled = ([reply[2::5], reply[3::5], reply[5::5], reply[6::5]] for reply in (real, modelled))
        if words[1] == "rb_read_tickets":  # each server has a clock
            real, modelled = (_without_clock(reply) for reply in (real, modelled))
        if words[1] == "rb_announce":  # each server has a clock
            real, modelled = (reply[0::5] + reply[1::5] for reply in (real, modelled))
        assert _without_times(modelled) == _without_times(real), words[:2]
    for key in (*GUARDED, *keys.all_of(RUN, [""]), SNAP, OLD, SPILL, TICKETS, MARK, *PAYLOADS, LATE, "a", "b"):
        real, modelled = both.call("TTL", key)
        assert modelled == real, key


def _without_clock(reply: Any) -> list[tuple[bytes, float]]:
    """Replace each deadline by the time left, in units of `LONG_MS`."""
    now_ms, flat = reply
    deadlines = zip(flat[::2], map(float, flat[1::2]), strict=True)
    return [(ticket, round((at_ms - int(now_ms)) / LONG_MS) if at_ms else 0.0) for ticket, at_ms in deadlines]


def _without_times(reply: Any) -> Any:
    """Replace the ms that a lease has left."""
    comparable = _comparable(reply)
    if isinstance(comparable, list) and len(comparable) == 3 and isinstance(comparable[1], list):
        comparable[1] = [-1 if isinstance(part, int) and part > 1000 else part for part in comparable[1]]
    return comparable


def test_every_function_of_the_library_has_a_contract() -> None:
    """A function that is not called here could use a command that the model has wrong."""
    named = set(re.findall(r"(?:register|register_function)\('(rb_\w+)'", LIBRARY_CODE))
    assert named <= {str(words[1]) for words in CALLS}


def test_a_full_server_refuses_what_the_model_refuses(server: EmbeddedServer) -> None:
    """By the flags that the server gives its commands."""
    with redis.Redis.from_url(server.url) as client:
        commands = client.command()
    refused = {name.upper().encode() for name, facts in commands.items() if "denyoom" in facts["flags"]}
    assert refused & COMMANDS.keys() == GROWING


def test_a_command_without_a_model_is_named(model: RedisServer) -> None:
    """A world that answers what nobody has compared with a real server would prove nothing."""
    with pytest.raises(NoModel, match="LPUSH"):
        model.execute(Link(model), [b"LPUSH", b"list", b"value"])
