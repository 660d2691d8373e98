"""Calls to the service: when they wait for more groups, how they are retried, and what a cancelled one keeps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, cast

import pytest

from replaybuf.client.client import AsyncClient
from replaybuf.errors import NoRoom, ServiceUnavailable
from replaybuf.generator import inflight as inflight_module
from replaybuf.generator.inflight import InFlight
from replaybuf.wire.contract import Tickets
from tests.generator.doubles import TIMEOUT_S, ServiceDouble


def gathering(
    main: Callable[[InFlight, Callable[[int], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]], slots: int = 64
) -> list[int]:
    """Gather among `slots` right after a call; `main` sets how many are ready. Return how many were at its end."""
    there = [1]
    ended: list[int] = []

    async def run() -> None:
        async with AsyncClient("http://127.0.0.1:1", "r") as client:
            inflight = InFlight(client)

            async def gather() -> None:
                await inflight.gather(lambda: there[0], lambda: slots, asyncio.get_running_loop().time())
                ended.append(there[0])

            async def count(number: int) -> None:
                there[0] = number
                await inflight.notify()
                for _ in range(10):
                    await asyncio.sleep(0)

            task = asyncio.create_task(gather())
            await asyncio.sleep(0)
            await main(inflight, count)
            async with asyncio.timeout(TIMEOUT_S):
                await task

    asyncio.run(run())
    return ended


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pause between two calls so long that a test which waits for its end fails."""
    monkeypatch.setattr(inflight_module, "GATHER_S", 10 * TIMEOUT_S)


@pytest.mark.usefixtures("patient")
def test_after_a_call_the_next_one_waits_until_an_eighth_is_ready() -> None:
    async def main(inflight: InFlight, count: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        await count(7)
        await count(8)
        await count(9)

    assert gathering(main) == [8]


@pytest.mark.usefixtures("patient")
def test_a_stop_ends_the_wait_for_more_groups() -> None:
    async def main(inflight: InFlight, count: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        await count(2)
        await inflight.stop()

    assert gathering(main) == [2]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("slots", [1, 8])
def test_with_few_slots_no_call_waits_for_more_groups(slots: int) -> None:
    async def main(inflight: InFlight, count: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        pass

    assert gathering(main, slots) == [1]


def test_a_single_group_goes_after_a_moment() -> None:
    async def main(inflight: InFlight, count: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        pass

    assert gathering(main) == [1]


@pytest.mark.usefixtures("patient")
async def test_a_call_long_after_the_last_one_does_not_wait() -> None:
    async with AsyncClient("http://127.0.0.1:1", "r") as client:
        long_ago_s = asyncio.get_running_loop().time() - 2 * inflight_module.GATHER_S
        async with asyncio.timeout(TIMEOUT_S):
            await InFlight(client).gather(lambda: 1, lambda: 64, long_ago_s)


@contextlib.asynccontextmanager
async def held_call() -> AsyncIterator[tuple[ServiceDouble, InFlight, asyncio.Task[Tickets]]]:
    """A call for three tickets that the service holds until there are some."""
    service = ServiceDouble()
    service.open = 0
    async with service.up(), AsyncClient(service.url, "r") as client:
        inflight = InFlight(client)
        asking = asyncio.create_task(inflight.take_tickets("p", 3, "", 60_000))
        assert await service.until(lambda: bool(service.asked))
        yield service, inflight, asking
        await service.change(open=3)


async def test_tickets_of_a_cancelled_call_are_in_flight() -> None:
    """A fault elsewhere ends the generator while it asks: what the service issued meanwhile has to go back."""
    async with held_call() as (service, inflight, asking):
        asking.cancel()
        await asyncio.sleep(0)
        await service.change(open=3)
        with pytest.raises(asyncio.CancelledError):
            await asking
        outcome = list(inflight.jobs)
    assert outcome == ["t0", "t1", "t2"]


async def test_a_cancelled_call_without_an_answer_ends_after_return_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight_module, "RETURN_S", 0.05)
    async with held_call() as (_, inflight, asking):
        asking.cancel()
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(asyncio.CancelledError):
                await asking
        assert not inflight.jobs


# ---------------------------------------------------------------------- retries


def without_client() -> InFlight:
    """Tickets in flight whose calls the test makes itself."""
    return InFlight(cast(AsyncClient, None), patience_s=TIMEOUT_S)


def failing(*errors: Exception) -> Callable[[], Awaitable[str]]:
    """Return a call that fails with these errors before it is answered."""
    left = list(errors)

    async def call() -> str:
        if left:
            raise left.pop(0)
        return "answered"

    return call


async def test_no_room_is_the_reason_until_the_service_takes_the_groups(caplog: pytest.LogCaptureFixture) -> None:
    """An answer to another call does not hide it."""
    inflight = without_client()
    full = [NoRoom("max_tokens_live is 5", retry_after_s=0.05)] * 3
    appending = asyncio.create_task(inflight.retry("append", failing(*full)))
    await asyncio.sleep(0)
    assert inflight.retry_reason == "no_room"
    assert await inflight.retry("policy", failing()) == "answered"
    assert inflight.retry_reason == "no_room"
    assert await appending == "answered"
    assert inflight.retry_reason is None
    assert caplog.text.count("s for room in the service (append); the trainer makes room; 0 groups in flight") == 3
    assert "max_tokens_live is 5" in caplog.text


async def test_the_reason_is_that_of_the_first_retried_call() -> None:
    inflight = without_client()
    away = asyncio.create_task(inflight.retry("tickets", failing(*[ServiceUnavailable("x", retry_after_s=0.05)] * 2)))
    await asyncio.sleep(0)
    full = asyncio.create_task(inflight.retry("append", failing(*[NoRoom("x", retry_after_s=0.2)] * 2)))
    await asyncio.sleep(0)
    assert inflight.retry_reason == "service_away"
    await away
    assert inflight.retry_reason == "no_room"
    await full
    assert inflight.retry_reason is None
