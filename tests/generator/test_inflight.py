"""Calls about many groups: what waits for company, and what does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from replaybuf.client.client import AsyncClient
from replaybuf.generator import inflight as inflight_module
from replaybuf.generator.inflight import InFlight
from replaybuf.wire.contract import Tickets
from tests.generator.doubles import TIMEOUT_S, ServiceDouble


def gathering(
    main: Callable[[InFlight, Callable[[int], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]], slots: int = 64
) -> list[int]:
    """Gather among `slots` right after a call; `main` says how many are there. Returns how many it ended with."""
    there = [1]
    ended: list[int] = []

    async def run() -> None:
        async with AsyncClient("http://127.0.0.1:1", "r") as client:
            flight = InFlight(client)

            async def gather() -> None:
                await flight.gather(lambda: there[0], lambda: slots, asyncio.get_running_loop().time())
                ended.append(there[0])

            async def count(number: int) -> None:
                there[0] = number
                await flight.notify()
                for _ in range(10):
                    await asyncio.sleep(0)

            task = asyncio.create_task(gather())
            await asyncio.sleep(0)
            await main(flight, count)
            async with asyncio.timeout(TIMEOUT_S):
                await task

    asyncio.run(run())
    return ended


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pause between two calls so long that a test which waits for its end fails."""
    monkeypatch.setattr(inflight_module, "GATHER_S", 10 * TIMEOUT_S)


@pytest.mark.usefixtures("patient")
def test_what_comes_right_after_a_call_waits_until_an_eighth_is_there() -> None:
    async def main(flight: InFlight, count: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        await count(7)
        await count(8)
        await count(9)

    assert gathering(main) == [8]


@pytest.mark.usefixtures("patient")
def test_a_stop_is_not_held_up_by_what_waits_for_company() -> None:
    async def main(flight: InFlight, count: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        await count(2)
        await flight.stop()

    assert gathering(main) == [2]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("slots", [1, 8])
def test_where_slots_are_few_nothing_waits_for_company(slots: int) -> None:
    async def main(flight: InFlight, count: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        pass

    assert gathering(main, slots) == [1]


def test_what_stays_alone_goes_after_a_moment() -> None:
    async def main(flight: InFlight, count: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        pass

    assert gathering(main) == [1]


@pytest.mark.usefixtures("patient")
def test_a_call_long_after_the_last_one_waits_for_nothing() -> None:
    async def main() -> None:
        async with AsyncClient("http://127.0.0.1:1", "r") as client:
            long_ago_s = asyncio.get_running_loop().time() - 2 * inflight_module.GATHER_S
            async with asyncio.timeout(TIMEOUT_S):
                await InFlight(client).gather(lambda: 1, lambda: 64, long_ago_s)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def held_call() -> AsyncIterator[tuple[ServiceDouble, InFlight, asyncio.Task[Tickets]]]:
    """A call for three tickets that the service holds until there are some."""
    service = ServiceDouble()
    service.open = 0
    async with service.up(), AsyncClient(service.url, "r") as client:
        flight = InFlight(client)
        asking = asyncio.create_task(flight.take_tickets("p", 3, "", 60_000))
        assert await service.until(lambda: bool(service.asked))
        yield service, flight, asking
        await service.change(open=3)


def test_tickets_that_come_after_a_call_was_cut_off_are_known() -> None:
    """A fault elsewhere ends the generator while it asks: what the service issued meanwhile has to go back."""

    async def main() -> list[str]:
        async with held_call() as (service, flight, asking):
            asking.cancel()
            await asyncio.sleep(0)
            await service.change(open=3)
            with pytest.raises(asyncio.CancelledError):
                await asking
            return list(flight.jobs)

    assert asyncio.run(main()) == ["t0", "t1", "t2"]


def test_an_answer_that_does_not_come_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight_module, "RETURN_S", 0.05)

    async def main() -> None:
        async with held_call() as (_, flight, asking):
            asking.cancel()
            async with asyncio.timeout(TIMEOUT_S):
                with pytest.raises(asyncio.CancelledError):
                    await asking
            assert not flight.jobs

    asyncio.run(main())
