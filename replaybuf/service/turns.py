"""Long work beside the other tasks of the event loop: in turns with them, or in a thread. Ends of background tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeVar

from replaybuf.errors import ServiceUnavailable

T = TypeVar("T")
P = ParamSpec("P")
Work: TypeAlias = Callable[[], Awaitable[None] | None]

FEW = 2_000
"""Work on so many items takes a few milliseconds: less than a thread would delay it on a busy machine."""
TURN_S = 0.005
"""A turn of the loop costs about 20 µs, so short items share one."""
logger = logging.getLogger(__name__)
CANCEL_AGAIN_S = 1.0


class Turn:
    """One turn of work on the event loop."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()

    async def pause(self) -> None:
        """Let other tasks run if the work since the last pause took `TURN_S`."""
        if time.monotonic() - self._begun_s > TURN_S:
            await asyncio.sleep(0)
            self._begun_s = time.monotonic()


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield items; let other tasks run whenever the items since their last turn took `TURN_S`."""
    begun_s = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - begun_s > TURN_S:  # as `Turn.pause`, without a call for each item
            await asyncio.sleep(0)
            begun_s = time.monotonic()


async def do_in_turn(works: Iterable[Work], *, pass_outages: bool) -> list[ServiceUnavailable]:
    """Do several pieces of work, one after another, with turns for other tasks.

    `pass_outages`: go on after a `ServiceUnavailable`, of one node of a cluster; returns all of them.
    """
    outages = []
    async for work in in_turns(works):
        try:
            if awaitable := work():
                await awaitable
        except ServiceUnavailable as error:
            if not pass_outages:
                raise
            outages.append(error)
    return outages


async def call_beside(size: int, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call a function that works on `size` items: in a thread if they are many. Nobody may change them meanwhile."""
    if size <= FEW:
        return call(*arguments, **options)
    return await asyncio.to_thread(call, *arguments, **options)


@contextlib.asynccontextmanager
async def running_beside(jobs: Mapping[str, Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run endless jobs, by name, while the body runs. Raises what a job raises, and `RuntimeError` if one ends."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(job, name=name) for name, job in jobs.items()]
        watching = tasks.create_task(_refuse_ends(running))
        try:
            yield
        finally:
            await cancel_all([watching, *running])


async def _refuse_ends(running: list[asyncio.Task[None]]) -> None:
    """Raise once a job has ended: a cancellation that was meant for another wait ends it, and TaskGroup is silent."""
    ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    names = ", ".join(sorted(task.get_name() for task in ended))
    raise RuntimeError(f"background work has ended that must go on as long as its server: {names}")


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks again and again until each has ended: a library may swallow a cancellation."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
        for task in left:
            logger.warning("job did not end when cancelled job=%s at=%s", task.get_name(), task.get_stack(limit=1))


async def do_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at once to their ends. Raises the first of their errors."""
    raise_first(await asyncio.gather(*work, return_exceptions=True))


def raise_first(outcomes: Iterable[BaseException | None]) -> None:
    """Raise the first error among the outcomes of several pieces of work."""
    if failure := next((outcome for outcome in outcomes if outcome), None):
        raise failure
