"""What schedules reached: awaits that had a fault, neighbours in the ledger, branches of `library.lua`."""

from __future__ import annotations

import ast
import asyncio
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

import msgspec

import replaybuf
from replaybuf.store.redis.server import LIBRARY_CODE
from tests.simulation.redis_model.lua_branches import find_branches

PRODUCT = Path(replaybuf.__file__).parent
FOLDERS = ("service", "store")
"""Folders whose awaits are counted."""
LEFT_OUT = ("service/http/call/", "service/http/guard/handshake.py", "service/sockets", "store/redis/embedded.py")
"""Modules of which few or no schedules run a part: calls that no producer makes, TLS and processes."""
RECORD_TYPE = re.compile(rb"\xa4type[\xa1-\xbf]([A-Z_]+)")
"""In the bytes of a ledger record."""
SHOWN = 6


class Reached(msgspec.Struct):
    """What was reached. An await is a file and a line; a pair is two record types that follow each other.

    `disturbed`: pairs with a fault between them.
    """

    awaits: set[tuple[str, int]] = msgspec.field(default_factory=set)
    pairs: set[tuple[str, str]] = msgspec.field(default_factory=set)
    disturbed: set[tuple[str, str]] = msgspec.field(default_factory=set)
    branches: set[int] = msgspec.field(default_factory=set)

    def add(self, other: Reached) -> None:
        """Add what another schedule reached."""
        for name in self.__struct_fields__:
            getattr(self, name).update(getattr(other, name))


class Coverage:
    """Notes what one schedule reaches."""

    def __init__(self) -> None:
        self.reached = Reached()
        self._last = ""
        self._faults = 0

    def add_stack(self, frame: FrameType | None) -> None:
        """Note the awaits of the running task, whose command meets a fault."""
        while frame:
            self._add(frame)
            frame = frame.f_back

    def add_tasks(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Note where the tasks of a killed process wait."""
        for task in tasks:
            waiting: Any = task.get_coro()
            while isinstance(waiting, CoroutineType):
                if waiting.cr_frame:
                    self._add(waiting.cr_frame)
                waiting = waiting.cr_await

    def _add(self, frame: FrameType) -> None:
        if name := _product_name(frame.f_code.co_filename):
            self.reached.awaits.add((name, frame.f_lineno))

    def add_record(self, record: bytes, faults: int) -> None:
        """Note a ledger record that was written when so many faults had happened."""
        match = RECORD_TYPE.search(record)
        name = match.group(1).decode() if match else "?"
        if self._last:
            self.reached.pairs.add((self._last, name))
            if faults > self._faults:
                self.reached.disturbed.add((self._last, name))
        self._last, self._faults = name, faults


@functools.cache
def _product_name(filename: str) -> str | None:
    """Return the path of a module below the product, None for other modules."""
    path = Path(filename)
    return path.relative_to(PRODUCT).as_posix() if path.is_relative_to(PRODUCT) else None


def _awaits() -> Iterator[tuple[str, int, int]]:
    """List every await of the product: file, first and last line."""
    for path in sorted(path for folder in FOLDERS for path in (PRODUCT / folder).rglob("*.py")):
        name = path.relative_to(PRODUCT).as_posix()
        if name.startswith(LEFT_OUT):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Await):
                yield name, node.lineno, node.end_lineno or node.lineno
            elif isinstance(node, (ast.AsyncWith, ast.AsyncFor)):
                yield name, node.lineno, node.body[0].lineno - 1


def describe(reached: Reached) -> list[str]:
    """Return a line for each kind of coverage, with some of what was never reached."""
    hit = {name: {line for file, line in reached.awaits if file == name} for name, _ in reached.awaits}
    awaits = list(_awaits())
    missed = [
        f"{name}:{first}" for name, first, last in awaits if not hit.get(name, set()) & set(range(first, last + 1))
    ]
    branches = find_branches(LIBRARY_CODE)
    unrun = [str(line) for at, line in enumerate(branches) if at not in reached.branches]
    calm = sorted("-".join(pair) for pair in reached.pairs - reached.disturbed)
    return [
        f"awaits with a fault: {len(awaits) - len(missed)} of {len(awaits)}; never: {_some(missed)}",
        f"pairs of ledger records: {len(reached.pairs)}, {len(reached.disturbed)} with a fault between; "
        f"never: {_some(calm)}",
        f"branches of library.lua: {len(branches) - len(unrun)} of {len(branches)}; never, by line: {_some(unrun, 40)}",
    ]


def _some(names: list[str], most: int = SHOWN) -> str:
    rest = len(names) - most
    step = max(1, len(names) // most)
    shown = names if rest <= 0 else names[::step][:most]
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "") if names else "none"
