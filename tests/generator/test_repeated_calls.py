"""What is told while calls to the service are repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from replaybuf.client.client import AsyncClient
from replaybuf.errors import NoRoom, ServiceUnavailable
from replaybuf.generator.inflight import InFlight
from tests.generator.doubles import TIMEOUT_S


def flight() -> InFlight:
    """A flight whose calls are the test's own."""
    return InFlight(cast(AsyncClient, None), patience_s=TIMEOUT_S)


def failing(*errors: Exception) -> Callable[[], Awaitable[str]]:
    """A call that fails so often before it is answered."""
    left = list(errors)

    async def call() -> str:
        if left:
            raise left.pop(0)
        return "answered"

    return call


def run(main: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await main

    asyncio.run(bounded())


def test_a_service_without_room_is_told_as_such_until_it_takes_the_groups(caplog: pytest.LogCaptureFixture) -> None:
    """The answers to other calls meanwhile do not hide it."""

    async def main() -> None:
        made = flight()
        full = [NoRoom("max_tokens_live is 5", retry_after_s=0.05)] * 3
        appending = asyncio.create_task(made.retry("append", failing(*full)))
        await asyncio.sleep(0)
        assert made.retry_reason == "no_room"
        assert await made.retry("policy", failing()) == "answered"
        assert made.retry_reason == "no_room"
        assert await appending == "answered"
        assert made.retry_reason is None

    run(main())
    assert caplog.text.count("s for room in the service (append); the trainer makes room; 0 groups are in flight") == 3
    assert "max_tokens_live is 5" in caplog.text


def test_of_several_calls_that_are_repeated_the_first_that_began_is_told() -> None:
    async def main() -> None:
        made = flight()
        away = asyncio.create_task(made.retry("tickets", failing(*[ServiceUnavailable("x", retry_after_s=0.05)] * 2)))
        await asyncio.sleep(0)
        full = asyncio.create_task(made.retry("append", failing(*[NoRoom("x", retry_after_s=0.2)] * 2)))
        await asyncio.sleep(0)
        assert made.retry_reason == "service_away"
        await away
        assert made.retry_reason == "no_room"
        await full
        assert made.retry_reason is None

    run(main())
