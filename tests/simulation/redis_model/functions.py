"""Functions of a modelled Redis: runs `library.lua` itself, on the Lua 5.1 that Redis has too.

Each start of a server runs the library anew, because its local variables do not outlive the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from lupa import lua51
from redis.exceptions import ResponseError

from tests.simulation.redis_model.lua_branches import mark_branches

Call = Callable[[Sequence[bytes]], Any]
"""Runs one command of a function."""


class _Bridge:
    """What Lua calls. Lua never holds a server: nobody would free a cycle through both languages."""

    def __init__(self) -> None:
        self.lua = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self.lua.globals()[b"HITS"] = self.lua.table()
        # Written in Lua: lupa's own conversions ask what kind of mapping each list is, and read tables item by item.
        self.table = self.lua.eval(b"function(...) return {...} end")
        self.open_table = self.lua.eval(b"function(reply) return reply.ok, unpack(reply) end")
        self.call: Call | None = None
        self.registered: dict[bytes, Any] = {}
        functions = {b"call": self._call, b"pcall": self._pcall, b"register_function": self._register}
        self.lua.globals()[b"redis"] = self.lua.table_from(functions)

    def _call(self, *words: Any) -> Any:
        if self.call is None:
            raise ResponseError("Script attempted to access a non local key while it was loaded")
        for word in words:
            if type(word) is not bytes:  # few commands have numbers
                words = tuple([word if type(word) is bytes else _word(word) for word in words])
                break
        reply = self.call(words)
        if words[-1] == b"WITHSCORES":  # the replies that functions see are of the older protocol
            reply = [part for member, score in reply for part in (member, _word(score))]
        return reply if type(reply) is bytes and reply != b"OK" else self._to_lua(reply)

    def _pcall(self, *words: Any) -> Any:
        try:
            return self._call(*words)
        except ResponseError as error:
            return self.lua.table_from({b"err": str(error).encode()})

    def _register(self, first: Any, callback: Any = None) -> None:
        name = first if callback is not None else first[b"function_name"]
        self.registered[name] = callback if callback is not None else first[b"callback"]

    def _to_lua(self, reply: Any) -> Any:
        kind = type(reply)
        if kind is bytes:
            return self.lua.table_from({b"ok": reply}) if reply == b"OK" else reply
        if kind is list:
            to_lua = self._to_lua
            return self.table(*[part if type(part) is bytes and part != b"OK" else to_lua(part) for part in reply])
        return False if reply is None else reply

    def from_lua(self, value: Any) -> Any:
        """Return what a RESP client gets for the reply of a function."""
        kind = type(value)
        if kind is bytes or kind is int:
            return value
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if kind is float:
            return int(value)
        opened = self.open_table(value)
        if type(opened) is not tuple:  # a table without items
            return [] if opened is None else opened
        status, *items = opened
        if status is not None:
            return status
        if None in items:
            del items[items.index(None) :]  # a list ends at its first nil
        return [item if type(item) is bytes else self.from_lua(item) for item in items]


@functools.cache
def _bridge() -> _Bridge:
    # One for all schedules: a new runtime takes longer than running the library.
    return _Bridge()


@functools.cache
def _compile(code: str) -> Callable[[], None]:
    function: Callable[[], None] = _bridge().lua.compile(mark_branches(code).encode())
    return function


def take_branches() -> set[int]:
    """Return the numbers of the branches that ran since the last call."""
    lua = _bridge().lua
    hits = set(lua.globals()[b"HITS"])
    lua.globals()[b"HITS"] = lua.table()
    return hits


class Functions:
    """The functions of a library, as it registered them. `call` runs their commands."""

    def __init__(self, code: str, call: Call) -> None:
        head, _, body = code.partition("\n")
        if not head.startswith("#!lua name="):
            raise ResponseError("Missing library metadata")
        self._bridge = _bridge()
        self._bridge.registered = {}
        _compile(head.replace("#!", "--") + "\n" + body)()
        self._functions = self._bridge.registered
        self._call = call

    def run(self, name: bytes, keys: Sequence[bytes], arguments: Sequence[bytes]) -> Any:
        """Call a function; return its reply as a RESP client gets it."""
        function, bridge = self._functions.get(name), self._bridge
        if function is None:
            raise ResponseError("Function not found")
        bridge.call = self._call
        try:
            return bridge.from_lua(function(bridge.table(*keys), bridge.table(*arguments)))
        finally:
            bridge.call = None


def _word(word: float) -> bytes:
    return b"%d" % word if word == int(word) else b"%.17g" % word
