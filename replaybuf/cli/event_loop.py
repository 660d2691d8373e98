"""Run a coroutine as the only user of this process's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from replaybuf.errors import first_error

T = TypeVar("T")


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on uvloop and return its result. Raises the first error of a task group instead of the group."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main)
    except BaseExceptionGroup as group:
        raise first_error(group) from group
