"""Cancel background tasks and wait until they have ended; raise the first error of several pieces of work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

logger = logging.getLogger(__name__)

CANCEL_AGAIN_S = 1.0


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
