"""A burst of calls starts in order, a few per turn of the event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

from replaybuf.service.http.guard.gates import STARTED_AT_ONCE, StartGate

CALLS = 500


def burst(gate: StartGate, numbers: Iterable[int] = range(CALLS), path: str = "/batch") -> list[asyncio.Task[None]]:
    """Make calls of one path in one turn; each is known by its number."""

    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        del message

    return [asyncio.create_task(gate({"number": number, "path": path}, receive, send)) for number in numbers]


def numbered(begun: list[int]) -> StartGate:
    """Return a gate before an application that lists the calls that have started."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["number"])

    return StartGate(app)


def test_a_burst_of_calls_leaves_the_loop_to_others_in_between() -> None:
    """Two thousand that arrive together would hold the event loop for 0.3 s."""

    async def main() -> None:
        begun: list[int] = []
        tasks = burst(numbered(begun))
        seen = [0]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            seen.append(len(begun))
        assert begun == list(range(CALLS))
        assert max(later - earlier for earlier, later in itertools.pairwise(seen)) <= STARTED_AT_ONCE

    asyncio.run(main())


def test_a_call_that_is_cancelled_before_its_start_holds_up_nobody() -> None:
    async def main() -> None:
        begun: list[int] = []
        tasks = burst(numbered(begun))
        await asyncio.sleep(0)
        for task in tasks[100:300]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert begun == [*range(100), *range(300, CALLS)]

    asyncio.run(main())


def test_a_call_of_another_path_does_not_wait_for_the_burst() -> None:
    """It starts in the next turn: a probe took a second while the ranks of a trainer arrived."""

    async def main() -> None:
        begun: list[int] = []
        gate = numbered(begun)
        tasks = [*burst(gate), *burst(gate, [-1], "/healthz")]
        await asyncio.gather(*tasks)
        assert begun.index(-1) <= 2 * STARTED_AT_ONCE

    asyncio.run(main())


def test_single_calls_start_at_once() -> None:
    """Without a turn of the loop, however many there were before."""

    async def main() -> None:
        begun: list[int] = []
        gate = numbered(begun)
        for _ in range(3):
            await asyncio.gather(*burst(gate))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            begun.clear()
        (alone,) = burst(gate)[:1]
        await asyncio.sleep(0)
        assert alone.done() and begun[0] == 0

    asyncio.run(main())
